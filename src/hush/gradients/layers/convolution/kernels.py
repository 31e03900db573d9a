"""The kernel gradient of a convolution for each example.

Either the windows that each tap reads are laid out (a strided view, then one copy, a chunk of the examples at a time)
and multiplied with the output gradient; or PyTorch is asked for one kernel gradient with as many groups as there are
examples.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from hush.gradients.layers.convolution.geometry import Geometry
from hush.gradients.sums.blocks import product
from hush.gradients.sums.per_example import wide

# Elements of the windows that are alive at a time. Measured, see benchmarks/NOTES.md.
_CHUNK = {"cpu": 1 << 20, "other": 1 << 26}
# Below this many channels the windows are laid out; from it on, a grouped convolution is faster on a CPU.
_FEW_CHANNELS = 8


def kernel_gradients(pixels: Tensor, gradient: Tensor, geometry: Geometry) -> Tensor:
    """[batch, groups, channels * taps, outputs]: the gradient of each example, fp32 or wider, maybe a transposed view.

    `pixels` is [batch, T, channels, *sizes], `gradient` [batch, T, outputs, *output sizes]; the T rows add up.
    """
    outputs = tuple(gradient.shape[3:])
    fits = geometry.axes <= 3 and geometry.outputs(pixels.shape[3:]) == outputs
    if pixels.device.type == "cpu" and pixels.shape[2] >= _FEW_CHANNELS and fits:
        return _grouped_gradients(pixels, gradient, geometry)
    return torch.cat(list(_window_gradients(pixels, gradient, geometry)))


def kernel_norms(pixels: Tensor, gradient: Tensor, geometry: Geometry) -> Tensor:
    """[batch]: the squared norms of `kernel_gradients`, of which only a chunk exists at a time."""
    return torch.cat([squared_norms(part) for part in _window_gradients(pixels, gradient, geometry)])


def _grouped_gradients(pixels: Tensor, gradient: Tensor, geometry: Geometry) -> Tensor:
    batch, _, outputs = gradient.shape[:3]
    groups = batch * geometry.groups
    kernels = kernel_gradient(
        wide(pixels).transpose(0, 1).flatten(1, 2),
        wide(gradient).transpose(0, 1).flatten(1, 2),
        replace(geometry, weight_shape=(batch * outputs, *geometry.weight_shape[1:]), groups=groups),
    )
    return kernels.view(batch, geometry.groups, outputs // geometry.groups, -1).transpose(2, 3)


def kernel_gradient(pixels: Tensor, gradient: Tensor, geometry: Geometry) -> Tensor:
    """The ordinary kernel gradient of [rows, channels, *sizes] and [rows, outputs, *output sizes], summed over rows."""
    padding = list(geometry.padding)
    # Zeros are written out where an output padding exceeds its stride (some pixels are read by no tap), and for three
    # axes: there oneDNN's kernel (torch 2.13, CPU) is wrong for some paddings, such as 3 with stride 2 and 4 taps.
    misread = geometry.axes == 3 and any(padding) and pixels.device.type == "cpu"
    if misread or geometry.outputs(pixels.shape[2:]) != tuple(gradient.shape[2:]):
        pixels, padding = geometry.padded(pixels, gradient.shape[2:]), [0] * geometry.axes
    kernel = pixels.new_empty(1).expand(geometry.weight_shape)  # only its shape is read
    total: Tensor = torch.ops.aten.convolution_backward(
        gradient,
        pixels,
        kernel,
        None,
        list(geometry.stride),
        padding,
        list(geometry.dilation),
        False,
        [0] * geometry.axes,
        geometry.groups,
        [False, True, False],
    )[1]
    return total


def _window_gradients(pixels: Tensor, gradient: Tensor, geometry: Geometry) -> Iterator[Tensor]:
    batch, rows, channels = pixels.shape[:3]
    outputs = tuple(gradient.shape[3:])
    groups, taps = geometry.groups, math.prod(geometry.kernel)
    positions = rows * math.prod(outputs)
    limit = _CHUNK.get(pixels.device.type, _CHUNK["other"])
    size = max(1, limit // (channels * taps * positions))
    if not (pixels.is_cuda and pixels.dtype == gradient.dtype):  # a GPU multiplies half precision as it is
        pixels, gradient = wide(pixels), wide(gradient)
    for start in range(0, batch, size):
        windows = _windows(geometry.padded(pixels[start : start + size], outputs), geometry, outputs)
        windows = windows.reshape(-1, channels // groups * taps, positions)
        part = gradient[start : start + size].unflatten(2, (groups, -1)).movedim(1, 3).flatten(3)
        yield product(windows, part.flatten(0, 1).transpose(1, 2)).unflatten(0, (-1, groups))


def squared_norms(values: Tensor) -> Tensor:
    """[batch, ..] -> [batch], one dimension after another: errors grow with the sum of the sizes, not the product."""
    squares = torch.linalg.vector_norm(values, dim=-1).square()
    while squares.dim() > 1:
        squares = squares.sum(-1)
    return squares


def _windows(padded: Tensor, geometry: Geometry, outputs: tuple[int, ...]) -> Tensor:
    """A view [batch, groups, channels, *kernel, rows, *outputs] of padded pixels [batch, rows, channels, *sizes]."""
    batch, rows, channels = padded.shape[:3]
    steps = padded.stride()
    within = channels // geometry.groups
    shape = (batch, geometry.groups, within, *geometry.kernel, rows, *outputs)
    taps = [dilation * step for dilation, step in zip(geometry.dilation, steps[3:], strict=True)]
    moves = [stride * step for stride, step in zip(geometry.stride, steps[3:], strict=True)]
    return padded.as_strided(
        shape, (steps[0], within * steps[2], steps[2], *taps, steps[1], *moves), padded.storage_offset()
    )
