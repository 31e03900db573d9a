"""Gradients of linear layers with several rows an example, for matrices and batches of any size, never kept in memory.

For example b the gradient is G_b = sum over its rows t of gradient[b, t] inputs[b, t]^T, with half precision factors
whose products are exact in fp32, and sums in fp32. One kernel adds up the squares of its entries; another adds up
factor_b * G_b over blocks of examples. Both form the same tiles of G_b in the same order, so that the norm is that of
what is summed. `rows.py` has faster ones for wide matrices and few examples.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

LONGEST = 128
"""Examples that are added up one after another in one chain, at most."""
_PROGRAMS = 528
"""Programs that keep a large GPU busy; small weights are split over more blocks of examples to reach it."""
_PARTS = 32


@triton.jit
def _tile(  # type: ignore[no-untyped-def]
    inputs, gradient, j, i, length, width, outputs, BJ: tl.constexpr, BI: tl.constexpr, BT: tl.constexpr
):
    """[BJ, BI]: a tile of one example's gradient."""
    total = tl.zeros([BJ, BI], tl.float32)
    for start in range(0, length, BT):
        t = start + tl.arange(0, BT)
        inside = (t < length)[:, None]
        x = tl.load(inputs + t[:, None] * width + i[None, :], mask=inside & (i < width)[None, :], other=0.0)
        g = tl.load(gradient + t[:, None] * outputs + j[None, :], mask=inside & (j < outputs)[None, :], other=0.0)
        total = tl.dot(tl.trans(g), x, total, input_precision="ieee")
    return total


@triton.jit
def _norms(  # type: ignore[no-untyped-def]
    inputs, gradient, out, length, width, outputs, BJ: tl.constexpr, BI: tl.constexpr, BT: tl.constexpr
):
    example = tl.program_id(1).to(tl.int64)
    across = tl.cdiv(width, BI)
    j = (tl.program_id(0) // across) * BJ + tl.arange(0, BJ)
    i = (tl.program_id(0) % across) * BI + tl.arange(0, BI)
    values = _tile(
        inputs + example * length * width, gradient + example * length * outputs, j, i, length, width, outputs,
        BJ, BI, BT,
    )  # fmt: skip
    square = tl.sum(tl.sum(values * values, axis=1), axis=0)
    tl.store(out + example * tl.num_programs(0) + tl.program_id(0), square)


@triton.jit
def _sums(  # type: ignore[no-untyped-def]
    inputs, gradient, factors, out, examples, block, length, width, outputs,
    BJ: tl.constexpr, BI: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(1) * block
    across = tl.cdiv(width, BI)
    j = (tl.program_id(0) // across) * BJ + tl.arange(0, BJ)
    i = (tl.program_id(0) % across) * BI + tl.arange(0, BI)
    total = tl.zeros([BJ, BI], tl.float32)
    for at in range(block):
        number = tl.minimum(first + at, examples - 1)
        factor = tl.load(factors + number, mask=first + at < examples, other=0.0)
        if factor != 0.0:  # what does not count is not even read: it may hold infinities
            example = number.to(tl.int64)
            values = _tile(
                inputs + example * length * width, gradient + example * length * outputs, j, i, length, width, outputs,
                BJ, BI, BT,
            )  # fmt: skip
            total += factor * values
    place = (tl.program_id(1).to(tl.int64) * outputs + j[:, None]) * width + i[None, :]
    tl.store(out + place, total, mask=(j < outputs)[:, None] & (i < width)[None, :])


def squared_norms(inputs: Tensor, gradients: Tensor) -> Tensor:
    """[batch]: |G_b|^2 of inputs [batch, T, i] and gradients [batch, T, j]."""
    return _tile_squares(inputs, gradients).sum(1)


def weighted_sums(inputs: Tensor, gradients: Tensor, factors: Tensor, block: int) -> Tensor:
    """[blocks, j, i]: for each block of examples the sum of factor_b * G_b.

    An example with factor zero is not read, whatever it holds.
    """
    return _block_sums(inputs, gradients, factors.float().contiguous(), block)


# As operators of PyTorch, so that a step that calls them can be traced and compiled.
@torch.library.custom_op("hush::tile_squares", mutates_args=())
def _tile_squares(inputs: Tensor, gradients: Tensor) -> Tensor:
    inputs, gradients = inputs.contiguous(), gradients.contiguous()
    batch, length, width = inputs.shape
    outputs = gradients.shape[2]
    tiles = _tiles(outputs, width)
    squares = torch.empty(batch, tiles, dtype=torch.float32, device=inputs.device)
    _norms[(tiles, batch)](inputs, gradients, squares, length, width, outputs, **_blocks(outputs, width, length))
    return squares


@_tile_squares.register_fake
def _(inputs: Tensor, gradients: Tensor) -> Tensor:
    tiles = _tiles(gradients.shape[2], inputs.shape[2])
    return inputs.new_empty(inputs.shape[0], tiles, dtype=torch.float32)


@torch.library.custom_op("hush::block_sums", mutates_args=())
def _block_sums(inputs: Tensor, gradients: Tensor, factors: Tensor, block: int) -> Tensor:
    inputs, gradients = inputs.contiguous(), gradients.contiguous()
    batch, length, width = inputs.shape
    outputs = gradients.shape[2]
    parts = triton.cdiv(batch, block)
    sums = torch.empty(parts, outputs, width, dtype=torch.float32, device=inputs.device)
    _sums[(_tiles(outputs, width), parts)](
        inputs, gradients, factors, sums, batch, block, length, width, outputs, **_blocks(outputs, width, length)
    )
    return sums


@_block_sums.register_fake
def _(inputs: Tensor, gradients: Tensor, factors: Tensor, block: int) -> Tensor:
    parts = -(-inputs.shape[0] // block)
    return inputs.new_empty(parts, gradients.shape[2], inputs.shape[2], dtype=torch.float32)


def _tiles(outputs: int, width: int) -> int:
    blocks = _blocks(outputs, width, 64)
    return -(-outputs // blocks["BJ"]) * -(-width // blocks["BI"])


def block_of(batch: int, outputs: int, width: int) -> int:
    """How many examples one chain of additions takes: few enough for short chains and for a busy GPU."""
    parts = max(triton.cdiv(batch, LONGEST), min(batch, _PROGRAMS // _tiles(outputs, width), _PARTS))
    return triton.cdiv(batch, max(1, parts))


def _blocks(outputs: int, width: int, length: int) -> dict[str, int]:
    """Sizes of tiles; the same for both kernels, so that their sums over rows are the same."""
    wide = outputs >= 128 and width >= 128
    across = 128 if wide else 64 if width > 32 else 32 if width > 16 else 16
    down = 128 if wide else 64 if outputs > 32 else 32 if outputs > 16 else 16
    deep = 64 if length >= 512 or length % 64 == 0 else 32
    return {"BJ": down, "BI": across, "BT": deep, "num_warps": 8 if wide else 4, "num_stages": 3}
