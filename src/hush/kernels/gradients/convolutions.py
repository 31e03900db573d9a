"""Convolution gradients of examples on the matrix units: kept, taken for their norms, or added up with factors.

For example b the gradient is G_b[j, tap, c] = sum over outputs p of gradient[b, j, p] * pixels[b, c, p moved by tap].
Factors are in half precision, so products are exact in fp32, and sums are in fp32. Taps and channels are one axis of
columns n = tap * channels + c. Positions are added up in the same order by all kernels: the norm is that of what is
summed.

Tensors are read in channels-last memory; other layouts are copied for the time of a call.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hush.kernels.gradients.products import LONGEST

_PROGRAMS = 396
"""Programs of the sum that run at a time on a large GPU."""
_MULTIPLICATIONS = 4e11
"""In one second, of one of them."""
_PIECE = 1 << 24
"""Bytes of gradients that are kept in one piece, at most."""
_BYTES = 4e12
"""To and from memory, in one second."""


class Window(NamedTuple):
    """Which pixel an output reads at a tap: (row * stride + tap * dilation - padding) along each of two axes."""

    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)


@triton.jit
def _part(  # type: ignore[no-untyped-def]
    pixels, gradient, start, j, n, positions, outputs,
    OUT_WIDTH: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, KERNEL_COLUMNS: tl.constexpr,
    STEP_ROW: tl.constexpr, STEP_COLUMN: tl.constexpr, PAD_ROW: tl.constexpr, PAD_COLUMN: tl.constexpr,
    DILATE_ROW: tl.constexpr, DILATE_COLUMN: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """[BP, BJ] of the gradient and [BP, BN] of the windows, for outputs `start` .. `start + BP` of one example."""
    p = start + tl.arange(0, BP)
    inside = p < positions
    g = tl.load(gradient + p[:, None] * outputs + j[None, :], mask=inside[:, None] & (j < outputs)[None, :], other=0.0)
    tap = n // CHANNELS
    row_of_tap = tap // KERNEL_COLUMNS * DILATE_ROW - PAD_ROW
    column_of_tap = tap % KERNEL_COLUMNS * DILATE_COLUMN - PAD_COLUMN
    row_of_p = p // OUT_WIDTH * STEP_ROW
    column_of_p = p % OUT_WIDTH * STEP_COLUMN
    place = (row_of_p * WIDTH + column_of_p)[:, None] * CHANNELS
    place += ((row_of_tap * WIDTH + column_of_tap) * CHANNELS + n % CHANNELS)[None, :]
    row = row_of_p[:, None] + row_of_tap[None, :]
    column = column_of_p[:, None] + column_of_tap[None, :]
    read = inside[:, None] & (n < TAPS * CHANNELS)[None, :]
    read = read & (row >= 0) & (row < HEIGHT) & (column >= 0) & (column < WIDTH)
    x = tl.load(pixels + place, mask=read, other=0.0)
    return g, x


@triton.jit
def _gradients(  # type: ignore[no-untyped-def]
    pixels, gradient, kept, squares, outputs, KEEP: tl.constexpr,
    POSITIONS: tl.constexpr, OUT_WIDTH: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, KERNEL_COLUMNS: tl.constexpr,
    STEP_ROW: tl.constexpr, STEP_COLUMN: tl.constexpr, PAD_ROW: tl.constexpr, PAD_COLUMN: tl.constexpr,
    DILATE_ROW: tl.constexpr, DILATE_COLUMN: tl.constexpr,
    BJ: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    columns: tl.constexpr = TAPS * CHANNELS
    tile = tl.program_id(0)
    across = (columns + BN - 1) // BN
    example = tl.program_id(1).to(tl.int64)
    j = tile // across * BJ + tl.arange(0, BJ)
    n = tile % across * BN + tl.arange(0, BN)
    pixels += example * (HEIGHT * WIDTH * CHANNELS)
    gradient += example * POSITIONS * outputs
    total = tl.zeros([BJ, BN], tl.float32)
    for start in range(0, POSITIONS, BP):
        g, x = _part(
            pixels, gradient, start, j, n, POSITIONS, outputs, OUT_WIDTH, HEIGHT, WIDTH, CHANNELS, TAPS,
            KERNEL_COLUMNS, STEP_ROW, STEP_COLUMN, PAD_ROW, PAD_COLUMN, DILATE_ROW, DILATE_COLUMN, BP,
        )  # fmt: skip
        total = tl.dot(tl.trans(g), x, total, input_precision="ieee")
    square = tl.sum(tl.sum(total * total, axis=1), axis=0)
    tl.store(squares + example * tl.num_programs(0) + tile, square)
    if KEEP:
        place = j[:, None] * columns + n[None, :]
        tl.store(
            kept + example * outputs * columns + place, total, mask=(j < outputs)[:, None] & (n < columns)[None, :]
        )


@triton.jit
def _sums(  # type: ignore[no-untyped-def]
    pixels, gradient, factors, out, examples, block, outputs,
    POSITIONS: tl.constexpr, OUT_WIDTH: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, KERNEL_COLUMNS: tl.constexpr,
    STEP_ROW: tl.constexpr, STEP_COLUMN: tl.constexpr, PAD_ROW: tl.constexpr, PAD_COLUMN: tl.constexpr,
    DILATE_ROW: tl.constexpr, DILATE_COLUMN: tl.constexpr,
    BJ: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    columns: tl.constexpr = TAPS * CHANNELS
    tile = tl.program_id(0)
    first = tl.program_id(1) * block
    across = (columns + BN - 1) // BN
    j = tile // across * BJ + tl.arange(0, BJ)
    n = tile % across * BN + tl.arange(0, BN)
    steps: tl.constexpr = (POSITIONS + BP - 1) // BP
    total = tl.zeros([BJ, BN], tl.float32)
    values = tl.zeros([BJ, BN], tl.float32)
    # One loop over the parts of all examples: loads go on while an example is added up.
    for at in range(block * steps):
        number = first + at // steps
        example = tl.minimum(number, examples - 1).to(tl.int64)
        g, x = _part(
            pixels + example * (HEIGHT * WIDTH * CHANNELS), gradient + example * POSITIONS * outputs,
            at % steps * BP, j, n, POSITIONS, outputs, OUT_WIDTH, HEIGHT, WIDTH, CHANNELS, TAPS,
            KERNEL_COLUMNS, STEP_ROW, STEP_COLUMN, PAD_ROW, PAD_COLUMN, DILATE_ROW, DILATE_COLUMN, BP,
        )  # fmt: skip
        values = tl.dot(tl.trans(g), x, values, input_precision="ieee")
        if at % steps == steps - 1:
            factor = tl.load(factors + example, mask=number < examples, other=0.0)
            total += tl.where(factor != 0.0, values, 0.0) * factor  # what does not count may hold infinities
            values = tl.zeros([BJ, BN], tl.float32)
    place = j[:, None].to(tl.int64) * columns + n[None, :]
    out += tl.program_id(1).to(tl.int64) * outputs * columns
    tl.store(out + place, total, mask=(j < outputs)[:, None] & (n < columns)[None, :])


def squared_norms(pixels: Tensor, gradient: Tensor, window: Window) -> Tensor:
    """[batch]: |G_b|^2 of pixels [batch, channels, height, width] and gradient [batch, outputs, rows, columns]."""
    return _convolution_squares(pixels, gradient, flat(window)).sum(1)


def gradients(pixels: Tensor, gradient: Tensor, window: Window) -> tuple[tuple[Tensor, ...], Tensor]:
    """[some, outputs, taps * channels]: the G_b themselves, so many examples after so many; and all squared norms.

    They come in pieces that fit where activations of common sizes have been: a tensor that is a little larger than what
    is let go at that time would need fresh memory, and a CUDA graph keeps all that it ever took.
    """
    squares, *kept = _convolution_gradients(pixels, gradient, flat(window))
    return tuple(kept), squares.sum(1)


def weighted_sums(pixels: Tensor, gradient: Tensor, factors: Tensor, window: Window, block: int) -> Tensor:
    """[blocks, outputs, taps * channels]: for each block of examples the sum of factor_b * G_b.

    An example with factor zero is not read, whatever it holds.
    """
    return _convolution_sums(pixels, gradient, factors.float().contiguous(), flat(window), block)


def flat(window: Window) -> list[int]:
    return [*window.kernel, *window.stride, *window.padding, *window.dilation]


def channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


def shapes_of(pixels: Tensor, gradient: Tensor, window: list[int]) -> dict[str, int]:
    return {
        "POSITIONS": gradient.shape[2] * gradient.shape[3], "OUT_WIDTH": gradient.shape[3],
        "HEIGHT": pixels.shape[2], "WIDTH": pixels.shape[3], "CHANNELS": pixels.shape[1],
        "TAPS": window[0] * window[1], "KERNEL_COLUMNS": window[1], "STEP_ROW": window[2], "STEP_COLUMN": window[3],
        "PAD_ROW": window[4], "PAD_COLUMN": window[5], "DILATE_ROW": window[6], "DILATE_COLUMN": window[7],
    }  # fmt: skip


def _blocks(outputs: int, columns: int, positions: int, summed: bool = False) -> dict[str, int]:
    """Sizes of tiles. All kernels read the positions in the same order, so their gradients are the same numbers."""
    down = 128 if outputs > 64 and not summed else 64
    across = 128 if columns > 64 else 64 if columns > 32 else 32
    deep = 64 if outputs > 64 and positions == 64 else 32
    warps = 8 if down == 128 and deep == 32 else 4
    return {"BJ": down, "BN": across, "BP": deep, "num_warps": warps, "num_stages": 3 if deep == 64 else 4}


def _tiles(outputs: int, columns: int, summed: bool = False) -> int:
    blocks = _blocks(outputs, columns, 64, summed)
    return -(-outputs // blocks["BJ"]) * -(-columns // blocks["BN"])


def block_of(batch: int, outputs: int, columns: int, positions: int) -> int:
    """How many examples one chain of additions takes: many parts keep a GPU busy, but all of them are written."""
    blocks, tiles = _blocks(outputs, columns, positions, summed=True), _tiles(outputs, columns, summed=True)

    def seconds(block: int) -> float:
        parts = -(-batch // block)
        rounds = -(-tiles * parts // _PROGRAMS)
        multiplications = rounds * block * -(-positions // blocks["BP"]) * blocks["BP"] * blocks["BJ"] * blocks["BN"]
        return multiplications / _MULTIPLICATIONS + parts * outputs * columns * 8 / _BYTES

    return min(range(1, min(batch, LONGEST) + 1), key=seconds)


def _columns(pixels: Tensor, window: list[int]) -> int:
    return pixels.shape[1] * window[0] * window[1]


def _run_gradients(
    pixels: Tensor, gradient: Tensor, window: list[int], squares: Tensor, kept: Tensor | None = None
) -> None:
    outputs, columns, shapes = gradient.shape[1], _columns(pixels, window), shapes_of(pixels, gradient, window)
    _gradients[(squares.shape[1], len(pixels))](
        pixels, gradient, squares if kept is None else kept, squares, outputs, KEEP=kept is not None, **shapes,
        **_blocks(outputs, columns, shapes["POSITIONS"]),
    )  # fmt: skip


def _new_squares(pixels: Tensor, gradient: Tensor, window: list[int]) -> Tensor:
    return pixels.new_empty(len(pixels), _tiles(gradient.shape[1], _columns(pixels, window)), dtype=torch.float32)


def _new_gradients(pixels: Tensor, gradient: Tensor, window: list[int]) -> list[Tensor]:
    batch, outputs, columns = len(pixels), gradient.shape[1], _columns(pixels, window)
    size = -(-batch // -(-4 * batch * outputs * columns // _PIECE))
    sizes = [min(size, batch - start) for start in range(0, batch, size)]
    return [pixels.new_empty(some, outputs, columns, dtype=torch.float32) for some in sizes]


@torch.library.custom_op("hush::convolution_squares", mutates_args=())
def _convolution_squares(pixels: Tensor, gradient: Tensor, window: list[int]) -> Tensor:
    squares = _new_squares(pixels, gradient, window)
    _run_gradients(channels_last(pixels), channels_last(gradient), window, squares)
    return squares


@_convolution_squares.register_fake
def _(pixels: Tensor, gradient: Tensor, window: list[int]) -> Tensor:
    return _new_squares(pixels, gradient, window)


@torch.library.custom_op("hush::convolution_gradients", mutates_args=())
def _convolution_gradients(pixels: Tensor, gradient: Tensor, window: list[int]) -> list[Tensor]:
    pixels, gradient = channels_last(pixels), channels_last(gradient)
    squares, pieces, start = _new_squares(pixels, gradient, window), _new_gradients(pixels, gradient, window), 0
    for kept in pieces:
        here = slice(start, start + len(kept))
        _run_gradients(pixels[here], gradient[here], window, squares[here], kept)
        start += len(kept)
    return [squares, *pieces]


@_convolution_gradients.register_fake
def _(pixels: Tensor, gradient: Tensor, window: list[int]) -> list[Tensor]:
    return [_new_squares(pixels, gradient, window), *_new_gradients(pixels, gradient, window)]


@torch.library.custom_op("hush::convolution_sums", mutates_args=())
def _convolution_sums(pixels: Tensor, gradient: Tensor, factors: Tensor, window: list[int], block: int) -> Tensor:
    batch, outputs, columns = len(pixels), gradient.shape[1], _columns(pixels, window)
    parts = -(-batch // block)
    sums = pixels.new_empty(parts, outputs, columns, dtype=torch.float32)
    shapes = shapes_of(pixels, gradient, window)
    _sums[(_tiles(outputs, columns, summed=True), parts)](
        channels_last(pixels), channels_last(gradient), factors, sums, batch, block, outputs,
        **shapes, **_blocks(outputs, columns, shapes["POSITIONS"], summed=True),
    )  # fmt: skip
    return sums


@_convolution_sums.register_fake
def _(pixels: Tensor, gradient: Tensor, factors: Tensor, window: list[int], block: int) -> Tensor:
    return pixels.new_empty(-(-len(pixels) // block), gradient.shape[1], _columns(pixels, window), dtype=torch.float32)
