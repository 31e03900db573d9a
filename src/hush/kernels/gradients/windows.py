"""Norms of convolution gradients from inner products of windows, where outputs are few and kernels large.

|G_b|^2 is the sum over pairs of outputs p, q of <window_p, window_q> <gradient_p, gradient_q>.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hush.kernels.gradients.convolutions import Window, channels_last, flat, shapes_of

MOST_OUTPUTS = 64
"""Outputs of a convolution up to which one program holds the inner products of all pairs of windows."""


@triton.jit
def _window_products(  # type: ignore[no-untyped-def]
    pixels, gradient, norms, masses, outputs,
    POSITIONS: tl.constexpr, OUT_WIDTH: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, KERNEL_COLUMNS: tl.constexpr,
    STEP_ROW: tl.constexpr, STEP_COLUMN: tl.constexpr, PAD_ROW: tl.constexpr, PAD_COLUMN: tl.constexpr,
    DILATE_ROW: tl.constexpr, DILATE_COLUMN: tl.constexpr,
    BP: tl.constexpr, BK: tl.constexpr, TINY: tl.constexpr,
):  # fmt: skip
    """One program an example; [BP, BP] inner products of its windows, and of its gradient's columns."""
    example = tl.program_id(0).to(tl.int64)
    pixels += example * (HEIGHT * WIDTH * CHANNELS)
    gradient += example * POSITIONS * outputs
    p = tl.arange(0, BP)
    inside = p < POSITIONS
    k = tl.arange(0, BK)
    row_of_p = p // OUT_WIDTH * STEP_ROW - PAD_ROW
    column_of_p = p % OUT_WIDTH * STEP_COLUMN - PAD_COLUMN
    of_windows = tl.zeros([BP, BP], tl.float32)
    for tap in range(TAPS):
        row = row_of_p + tap // KERNEL_COLUMNS * DILATE_ROW
        column = column_of_p + tap % KERNEL_COLUMNS * DILATE_COLUMN
        read = inside & (row >= 0) & (row < HEIGHT) & (column >= 0) & (column < WIDTH)
        place = pixels + (row * WIDTH + column)[:, None] * CHANNELS + k[None, :]
        of_tap = tl.zeros([BP, BP], tl.float32)
        for start in tl.static_range(0, CHANNELS, BK):
            x = tl.load(place + start, mask=read[:, None] & (start + k < CHANNELS)[None, :], other=0.0)
            of_tap = tl.dot(x, tl.trans(x), of_tap, input_precision="ieee")
        of_windows += of_tap  # short chains of additions: one for the channels, one for the taps
    of_gradients = tl.zeros([BP, BP], tl.float32)
    for start in range(0, outputs, BK):
        g = tl.load(
            gradient + p[:, None] * outputs + (start + k)[None, :],
            mask=inside[:, None] & (start + k < outputs)[None, :], other=0.0,
        )  # fmt: skip
        of_gradients = tl.dot(g, tl.trans(g), of_gradients, input_precision="ieee")
    tl.store(norms + example, tl.sum(tl.sum(of_windows * of_gradients, axis=1), axis=0))
    same = (p[:, None] == p[None, :]) & inside[:, None]
    sizes = tl.sqrt((tl.maximum(of_windows, 0.0) + TINY) * (tl.maximum(of_gradients, 0.0) + TINY))
    tl.store(masses + example, tl.sum(tl.sum(tl.where(same, sizes, 0.0), axis=1), axis=0))


def window_norms(pixels: Tensor, gradient: Tensor, window: Window) -> tuple[Tensor, Tensor]:
    """[batch]: as `squared_norms`, and squared masses, from inner products of windows: at most 64 outputs."""
    if gradient.shape[2] * gradient.shape[3] > MOST_OUTPUTS:
        raise ValueError(f"expected at most {MOST_OUTPUTS} outputs, got a gradient of shape {tuple(gradient.shape)}")
    norms, masses = _window_sums(pixels, gradient, flat(window))
    return norms.clamp(min=0), masses.square()


@torch.library.custom_op("hush::window_sums", mutates_args=())
def _window_sums(pixels: Tensor, gradient: Tensor, window: list[int]) -> tuple[Tensor, Tensor]:
    norms = pixels.new_empty(len(pixels), dtype=torch.float32)
    masses = torch.empty_like(norms)
    shapes = shapes_of(pixels, gradient, window)
    size = max(16, triton.next_power_of_2(shapes["POSITIONS"]))
    _window_products[(len(pixels),)](
        channels_last(pixels), channels_last(gradient), norms, masses, gradient.shape[1], **shapes,
        BP=size, BK=64, TINY=1e-28, num_warps=4, num_stages=3,
    )  # fmt: skip
    return norms, masses


@_window_sums.register_fake
def _(pixels: Tensor, gradient: Tensor, window: list[int]) -> tuple[Tensor, Tensor]:
    return pixels.new_empty(len(pixels), dtype=torch.float32), pixels.new_empty(len(pixels), dtype=torch.float32)
