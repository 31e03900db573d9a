"""Norms of the gradients of matrix products from inner products of rows, which are never written to memory.

|sum_t gradient_t input_t^T|^2 = sum over pairs of rows s, t of <input_s, input_t> <gradient_s, gradient_t>. Pairs come
in tiles; those below the diagonal count through their mirror images.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TINY = tl.constexpr(1e-28)


@triton.jit
def _gram(rows, first, second, length, width, BT: tl.constexpr, BK: tl.constexpr):  # type: ignore[no-untyped-def]
    """[BT, BT]: the inner products of the rows `first` with the rows `second`."""
    total = tl.zeros([BT, BT], tl.float32)
    for start in range(0, width, BK):
        k = start + tl.arange(0, BK)
        one = tl.load(
            rows + first[:, None] * width + k[None, :], mask=(first < length)[:, None] & (k < width)[None, :], other=0.0
        )
        two = tl.load(
            rows + second[:, None] * width + k[None, :],
            mask=(second < length)[:, None] & (k < width)[None, :],
            other=0.0,
        )
        total = tl.dot(one, tl.trans(two), total, input_precision="ieee")
    return total


@triton.jit
def _row_norms(  # type: ignore[no-untyped-def]
    inputs, gradients, norms, masses, length, width, outputs, BT: tl.constexpr, BK: tl.constexpr
):
    tiles = tl.cdiv(length, BT)
    above = tl.program_id(0) // tiles
    below = tl.program_id(0) % tiles
    example = tl.program_id(1).to(tl.int64)
    place = norms + example * tl.num_programs(0) + tl.program_id(0)
    if above > below:
        tl.store(place, 0.0)
    else:
        first = above * BT + tl.arange(0, BT)
        second = below * BT + tl.arange(0, BT)
        of_inputs = _gram(inputs + example * length * width, first, second, length, width, BT, BK)
        of_gradients = _gram(gradients + example * length * outputs, first, second, length, outputs, BT, BK)
        total = tl.sum(tl.sum(of_inputs * of_gradients, axis=1), axis=0)
        tl.store(place, tl.where(above == below, total, 2.0 * total))
        if above == below:
            same = (first[:, None] == second[None, :]) & (first < length)[:, None]
            sizes = tl.sqrt((tl.maximum(of_inputs, 0.0) + _TINY) * (tl.maximum(of_gradients, 0.0) + _TINY))
            mass = tl.sum(tl.sum(tl.where(same, sizes, 0.0), axis=1), axis=0)
            tl.store(masses + example * tiles + above, mass)


def row_norms(inputs: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """[batch] squared norms of the products of [batch, T, i] and [batch, T, j], and the squares of their masses.

    Both tensors must be `aligned`.
    """
    norms, masses = _pair_sums(inputs, gradients)
    return norms.sum(1).clamp(min=0), masses.sum(1).square()


@torch.library.custom_op("hush::pair_sums", mutates_args=())
def _pair_sums(inputs: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    inputs, gradients = inputs.contiguous(), gradients.contiguous()
    batch, length, width = inputs.shape
    size = _tile_size(length)
    tiles = -(-length // size)
    norms = torch.empty(batch, tiles * tiles, dtype=torch.float32, device=inputs.device)
    masses = torch.empty(batch, tiles, dtype=torch.float32, device=inputs.device)
    _row_norms[(tiles * tiles, batch)](
        inputs, gradients, norms, masses, length, width, gradients.shape[2],
        BT=size, BK=64, num_warps=8 if size == 128 else 4, num_stages=3,
    )  # fmt: skip
    return norms, masses


@_pair_sums.register_fake
def _(inputs: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    tiles = -(-inputs.shape[1] // _tile_size(inputs.shape[1]))
    shape = inputs.shape[0], tiles * tiles
    return inputs.new_empty(shape, dtype=torch.float32), inputs.new_empty(shape[0], tiles, dtype=torch.float32)


def _tile_size(length: int) -> int:
    return 128 if length >= 512 else 64 if length > 32 else 32
