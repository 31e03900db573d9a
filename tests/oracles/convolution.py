"""Kernel gradients of convolutions in float64, from the definition: no autograd, no convolution call."""

import itertools

import numpy as np


def kernel_gradients(
    pixels: np.ndarray, gradient: np.ndarray, weight_shape: tuple[int, ...], geometry: dict
) -> np.ndarray:
    """[batch, *weight_shape]: G[o, c, k] = sum_p gradient[o, p] * pixels[c, stride * p + dilation * k - padding].

    `geometry` holds stride, padding, dilation (one number per axis), groups, transposed. A transposed convolution sends
    input p to the outputs stride * p + dilation * k - padding, so the two tensors change places.
    """
    if geometry["transposed"]:
        pixels, gradient = gradient, pixels
    pixels, gradient = pixels.astype(np.float64), gradient.astype(np.float64)
    batch, channels = pixels.shape[:2]
    outputs = gradient.shape[1]
    within, per_group = channels // geometry["groups"], outputs // geometry["groups"]
    result = np.zeros((batch, *weight_shape))
    for tap in itertools.product(*map(range, weight_shape[2:])):
        for place in itertools.product(*map(range, gradient.shape[2:])):
            read = tuple(
                s * p + d * k - a
                for s, p, d, k, a in zip(
                    geometry["stride"], place, geometry["dilation"], tap, geometry["padding"], strict=True
                )
            )
            if any(not 0 <= r < size for r, size in zip(read, pixels.shape[2:], strict=True)):
                continue
            seen = pixels[(slice(None), slice(None), *read)].reshape(batch, -1, within)
            sent = gradient[(slice(None), slice(None), *place)].reshape(batch, -1, per_group)
            product = np.einsum("bgo,bgc->bgoc", sent, seen).reshape(batch, outputs, within)
            result[(slice(None), slice(None), slice(None), *tap)] += product
    return result
