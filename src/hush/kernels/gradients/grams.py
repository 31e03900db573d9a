"""Norms of the gradients of matrix products from inner products of rows, which are never written to memory.

|sum_t gradient_t input_t^T|^2 = sum over pairs of rows s, t of <input_s, input_t> <gradient_s, gradient_t>. Pairs come
in tiles; those below the diagonal count through their mirror images. The second inner product is a sum over columns, so
wide gradients are cut into parts of columns, each with a program of its own: more programs, and shorter chains.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from hush.kernels.gradients.rows import ANY_LAYOUT, readable

_TINY = 1e-28
_DEEP = 64
"""Columns that are read at once."""


@triton.jit
def _gram(  # type: ignore[no-untyped-def]
    rows, example, above, below, start, stop, BT: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr
):
    """[BT, BT]: the inner products over the columns from start to stop of the rows from `above` and from `below` on."""
    total = tl.zeros([BT, BT], tl.float32)
    if above == below:
        for k in tl.range(start, stop, BK, num_stages=STAGES):
            one = rows.load([example, above, k]).reshape(BT, BK)
            total = tl.dot(one, tl.trans(one), total)
    else:
        for k in tl.range(start, stop, BK, num_stages=STAGES):
            one = rows.load([example, above, k]).reshape(BT, BK)
            two = rows.load([example, below, k]).reshape(BT, BK)
            total = tl.dot(one, tl.trans(two), total)
    return total


@triton.jit
def _pairs_of_rows(  # type: ignore[no-untyped-def]
    inputs, gradients, sums, sizes, length, width, outputs, columns, tiles,
    BT: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One pair of tiles, one part of the columns of the gradients, one example."""
    pair = tl.program_id(0)
    part = tl.program_id(1)
    example = tl.program_id(2)
    above = 0
    left = pair
    while left >= tiles - above:  # the pairs of the first tile with all tiles come first, then those of the second ..
        left -= tiles - above
        above += 1
    below = above + left
    start = part * columns
    of_inputs = _gram(inputs, example, above * BT, below * BT, 0, width, BT, BK, STAGES)
    of_gradients = _gram(
        gradients, example, above * BT, below * BT, start, tl.minimum(start + columns, outputs), BT, BK, STAGES
    )
    total = tl.sum(tl.sum(of_inputs * of_gradients, axis=1), axis=0)
    place = (example * tl.num_programs(1) + part) * tl.num_programs(0) + pair
    tl.store(sums + place, tl.where(above == below, total, 2.0 * total))
    if above == below:
        t = tl.arange(0, BT)
        same = t[:, None] == t[None, :]
        row = above * BT + t
        at = sizes + (example * (tl.num_programs(1) + 1) + part) * length + row
        tl.store(at, tl.sum(tl.where(same, of_gradients, 0.0), axis=1), mask=row < length)
        if part == 0:
            at = sizes + (example * (tl.num_programs(1) + 1) + tl.num_programs(1)) * length + row
            tl.store(at, tl.sum(tl.where(same, of_inputs, 0.0), axis=1), mask=row < length)


def row_norms(inputs: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """[batch] squared norms of the products of [batch, T, i] and [batch, T, j], and the squares of their masses.

    Both tensors must be `aligned`.
    """
    sums, sizes = _pair_sums(inputs, gradients)
    of_inputs, of_gradients = sizes[:, -1] + _TINY, sizes[:, :-1].sum(1) + _TINY
    return sums.sum(2).sum(1).clamp(min=0), (of_inputs * of_gradients).sqrt().sum(1).square()


@torch.library.custom_op("hush::pair_sums", mutates_args=(), tags=ANY_LAYOUT)
def _pair_sums(inputs: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """[batch, parts, pairs] sums of products; [batch, parts + 1, T] squared norms of rows, the inputs' last."""
    inputs, gradients = readable(inputs), readable(gradients)
    batch, length, width = inputs.shape
    outputs = gradients.shape[2]
    size, pairs, parts, columns = _cut(batch, length, width, outputs)
    sums = torch.empty(batch, parts, pairs, dtype=torch.float32, device=inputs.device)
    sizes = torch.empty(batch, parts + 1, length, dtype=torch.float32, device=inputs.device)
    _pairs_of_rows[(pairs, parts, batch)](
        TensorDescriptor.from_tensor(inputs, [1, size, _DEEP]),
        TensorDescriptor.from_tensor(gradients, [1, size, _DEEP]),
        sums, sizes, length, width, outputs, columns, -(-length // size),
        BT=size, BK=_DEEP, STAGES=4, num_warps=8 if size == 128 else 4,
    )  # fmt: skip
    return sums, sizes


@_pair_sums.register_fake
def _(inputs: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    batch, length, width = inputs.shape
    _, pairs, parts, _ = _cut(batch, length, width, gradients.shape[2])
    kind = torch.float32
    return inputs.new_empty(batch, parts, pairs, dtype=kind), inputs.new_empty(batch, parts + 1, length, dtype=kind)


def _cut(batch: int, length: int, width: int, outputs: int) -> tuple[int, int, int, int]:
    """The rows of a tile, how many pairs of tiles, into how many parts the columns are cut, and columns of a part."""
    size = 128 if length > 64 else 64 if length > 32 else 32
    tiles = -(-length // size)
    pairs = tiles * (tiles + 1) // 2
    # Each part forms the inner products of the inputs again, so it is not made narrower than them.
    columns = min(outputs, max(width, 2048))
    columns = -(-columns // _DEEP) * _DEEP
    return size, pairs, -(-outputs // columns), columns


def longest_chain(batch: int, length: int, width: int, outputs: int) -> int:
    """The longest chain of additions behind a norm from pairs of rows."""
    size, pairs, parts, columns = _cut(batch, length, width, outputs)
    return width + min(columns, outputs) + 2 * size + pairs + parts
