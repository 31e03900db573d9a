"""Gradients of matrix products and convolutions, example by example, on the matrix units and never written to memory.

For example b the gradient is G_b[j, tap, c] = sum over positions p of gradient[b, p, j] * pixels[b, p moved by tap, c],
with half precision factors whose products are exact in fp32, and sums in fp32. One kernel adds up the squares of its
entries; another adds up factor_b * G_b over blocks of examples. Both form the same tiles of G_b in the same order, so
that the norm is that of what is summed. A linear layer is a convolution of one line of positions with one tap.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LONGEST = 128
"""Examples that are added up one after another in one chain, at most."""
_PROGRAMS = 528
"""Programs that keep a large GPU busy; small weights are split over more blocks of examples to reach it."""


_PARTS = 32


class Window(NamedTuple):
    """Which pixel an output reads at a tap: (row * stride + tap * dilation - padding) along each of two axes."""

    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)


@triton.jit
def _tile(  # type: ignore[no-untyped-def]
    pixels, gradient, j, c, tap_row, tap_column, height, width, channels, outputs, out_width, positions,
    step_row, step_column,
    MOVES: tl.constexpr, BJ: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """[BJ, BC]: a tile of one example's gradient for one tap."""
    total = tl.zeros([BJ, BC], tl.float32)
    for start in range(0, positions, BP):
        p = start + tl.arange(0, BP)
        inside = p < positions
        if MOVES:
            row = (p // out_width) * step_row + tap_row
            column = (p % out_width) * step_column + tap_column
            read = inside & (row >= 0) & (row < height) & (column >= 0) & (column < width)
            place = row * width + column
        else:
            read = inside
            place = p
        x = tl.load(
            pixels + place[:, None] * channels + c[None, :], mask=read[:, None] & (c < channels)[None, :], other=0.0
        )
        g = tl.load(
            gradient + p[:, None] * outputs + j[None, :], mask=inside[:, None] & (j < outputs)[None, :], other=0.0
        )
        total = tl.dot(tl.trans(g), x, total, input_precision="ieee")
    return total


@triton.jit
def _norms(  # type: ignore[no-untyped-def]
    pixels, gradient, out, height, width, channels, outputs, out_width, positions,
    kernel_columns, step_row, step_column, pad_row, pad_column, dilate_row, dilate_column,
    MOVES: tl.constexpr, BJ: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    example = tl.program_id(1).to(tl.int64)
    across = tl.cdiv(channels, BC)
    down = tl.cdiv(outputs, BJ)
    tap = tile // (across * down)
    j = (tile // across % down) * BJ + tl.arange(0, BJ)
    c = (tile % across) * BC + tl.arange(0, BC)
    values = _tile(
        pixels + example * height * width * channels, gradient + example * positions * outputs, j, c,
        (tap // kernel_columns) * dilate_row - pad_row, (tap % kernel_columns) * dilate_column - pad_column,
        height, width, channels, outputs, out_width, positions, step_row, step_column, MOVES, BJ, BC, BP,
    )  # fmt: skip
    square = tl.sum(tl.sum(values * values, axis=1), axis=0)
    tl.store(out + example * tl.num_programs(0) + tile, square)


@triton.jit
def _sums(  # type: ignore[no-untyped-def]
    pixels, gradient, factors, out, examples, block, height, width, channels, outputs, out_width, positions,
    taps, kernel_columns, step_row, step_column, pad_row, pad_column, dilate_row, dilate_column,
    MOVES: tl.constexpr, BJ: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    first = tl.program_id(1) * block
    across = tl.cdiv(channels, BC)
    down = tl.cdiv(outputs, BJ)
    tap = tile // (across * down)
    j = (tile // across % down) * BJ + tl.arange(0, BJ)
    c = (tile % across) * BC + tl.arange(0, BC)
    total = tl.zeros([BJ, BC], tl.float32)
    for at in range(block):
        number = tl.minimum(first + at, examples - 1)
        factor = tl.load(factors + number, mask=first + at < examples, other=0.0)
        if factor != 0.0:  # what does not count is not even read: it may hold infinities
            example = number.to(tl.int64)
            values = _tile(
                pixels + example * height * width * channels, gradient + example * positions * outputs, j, c,
                (tap // kernel_columns) * dilate_row - pad_row, (tap % kernel_columns) * dilate_column - pad_column,
                height, width, channels, outputs, out_width, positions, step_row, step_column, MOVES, BJ, BC, BP,
            )  # fmt: skip
            total += factor * values
    start = out + tl.program_id(1).to(tl.int64) * outputs * taps * channels
    place = (j[:, None].to(tl.int64) * taps + tap) * channels + c[None, :]
    tl.store(start + place, total, mask=(j < outputs)[:, None] & (c < channels)[None, :])


def squared_norms(pixels: Tensor, gradient: Tensor, window: Window) -> Tensor:
    """[batch]: |G_b|^2 of pixels [batch, height, width, channels] and gradient [batch, rows, columns, outputs].

    Both tensors must be `aligned`.
    """
    return _tile_squares(pixels, gradient, _flat(window)).sum(1)


def weighted_sums(pixels: Tensor, gradient: Tensor, factors: Tensor, window: Window, block: int) -> Tensor:
    """[blocks, outputs, taps, channels]: for each block of examples the sum of factor_b * G_b.

    Both tensors must be `aligned`. An example with factor zero is not read, whatever it holds.
    """
    return _block_sums(pixels, gradient, factors.float().contiguous(), _flat(window), block)


def _flat(window: Window) -> list[int]:
    return [*window.kernel, *window.stride, *window.padding, *window.dilation]


# As operators of PyTorch, so that a step that calls them can be traced and compiled.
@torch.library.custom_op("hush::tile_squares", mutates_args=())
def _tile_squares(pixels: Tensor, gradient: Tensor, window: list[int]) -> Tensor:
    pixels, gradient = pixels.contiguous(), gradient.contiguous()
    batch, height, width, channels = pixels.shape
    _, rows, columns, outputs = gradient.shape
    tiles = _tiles(outputs, channels, window[0] * window[1])
    squares = torch.empty(batch, tiles, dtype=torch.float32, device=pixels.device)
    _norms[(tiles, batch)](
        pixels, gradient, squares, height, width, channels, outputs, columns, rows * columns, *window[1:],
        MOVES=_moves(window), **_blocks(outputs, channels, rows * columns),
    )  # fmt: skip
    return squares


@_tile_squares.register_fake
def _(pixels: Tensor, gradient: Tensor, window: list[int]) -> Tensor:
    tiles = _tiles(gradient.shape[3], pixels.shape[3], window[0] * window[1])
    return pixels.new_empty(pixels.shape[0], tiles, dtype=torch.float32)


@torch.library.custom_op("hush::block_sums", mutates_args=())
def _block_sums(pixels: Tensor, gradient: Tensor, factors: Tensor, window: list[int], block: int) -> Tensor:
    pixels, gradient = pixels.contiguous(), gradient.contiguous()
    batch, height, width, channels = pixels.shape
    _, rows, columns, outputs = gradient.shape
    taps = window[0] * window[1]
    parts = triton.cdiv(batch, block)
    sums = torch.empty(parts, outputs, taps, channels, dtype=torch.float32, device=pixels.device)
    _sums[(_tiles(outputs, channels, taps), parts)](
        pixels, gradient, factors, sums, batch, block, height, width, channels, outputs, columns, rows * columns,
        taps, *window[1:], MOVES=_moves(window), **_blocks(outputs, channels, rows * columns),
    )  # fmt: skip
    return sums


@_block_sums.register_fake
def _(pixels: Tensor, gradient: Tensor, factors: Tensor, window: list[int], block: int) -> Tensor:
    parts, taps = -(-pixels.shape[0] // block), window[0] * window[1]
    return pixels.new_empty(parts, gradient.shape[3], taps, pixels.shape[3], dtype=torch.float32)


def _moves(window: list[int]) -> bool:
    return window != _flat(Window())


def _tiles(outputs: int, channels: int, taps: int) -> int:
    blocks = _blocks(outputs, channels, 64)
    down, across = -(-outputs // blocks["BJ"]), -(-channels // blocks["BC"])
    return taps * down * across


def block_of(batch: int, outputs: int, channels: int, taps: int) -> int:
    """How many examples one chain of additions takes: few enough for short chains and for a busy GPU."""
    tiles = _tiles(outputs, channels, taps)
    parts = max(triton.cdiv(batch, LONGEST), min(batch, _PROGRAMS // tiles, _PARTS))
    return triton.cdiv(batch, max(1, parts))


def aligned(tensor: Tensor) -> Tensor:
    """Contiguous, rows padded with zeros so that all of them start where wide loads can."""
    over = -tensor.shape[-1] % 16
    if over and tensor.shape[-1] > 64:
        tensor = torch.nn.functional.pad(tensor, (0, over))
    return tensor.contiguous()


def _blocks(outputs: int, channels: int, positions: int) -> dict[str, int]:
    """Sizes of tiles; the same for both kernels, so that their sums over positions are the same."""
    wide = outputs >= 128 and channels >= 128
    across = 128 if wide else 64 if channels > 32 else 32 if channels > 16 else 16
    down = 128 if wide else 64 if outputs > 32 else 32 if outputs > 16 else 16
    deep = 64 if positions >= 512 or positions % 64 == 0 else 32
    return {"BJ": down, "BC": across, "BP": deep, "num_warps": 8 if wide else 4, "num_stages": 3}
