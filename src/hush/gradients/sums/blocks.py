"""Sums over many rows in short chains, and how far one example can move such a sum through rounding.

Bounds are in units of u C, u the unit roundoff of the sums and C the clipping bound: see `precision`.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

BLOCK = 256
"""Examples that a kernel of a GPU adds up in one chain, at most; blocks are added up afterwards."""
CHAIN = 320
"""Examples that are added up by one product; up to twice as many by two, more in blocks."""
_SHORT = 192
"""Examples of one block where there are more than two."""
_FEW = 8
"""So many blocks are added up in their own dtype, one after the other; more of them in fp64."""
_LONG_SLACK = 0.0085
"""How much of C the rounding of a block of examples with several rows may add to the sensitivity."""
_PIECE_BYTES = 1 << 26
"""Memory for the products of several blocks at a time."""
_HALF = (torch.bfloat16, torch.float16)
_WIDE = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def rho(terms: int) -> float:
    """How far the rows of one example may cancel: to 1 / rho of their mass; what cancels further is clipped as if not.

    The mass of rows that do not cancel, but are independent, is about the square root of their number times the norm.
    """
    return max(16.0, 2 * math.sqrt(terms))


def wide(tensor: Tensor) -> Tensor:
    """The tensor in the dtype in which norms and sums are taken: fp32, or fp64 if it already is; complex stays so."""
    return tensor if tensor.dtype in _WIDE else tensor.float()


def blocked_additions(batch: int, block: int) -> float:
    """As `Contribution.additions`, where blocks of at most `block` examples are added up, and then these in fp64."""
    if batch <= block:
        return batch * (batch + 2.0)
    return block * (block + 2.0) + 2.0 * batch


def chained_additions(batch: int) -> float:
    """As `Contribution.additions` for `chained`: of this batch and of every smaller one."""
    if batch <= CHAIN:
        return batch * (batch + 2.0)
    return max(blocked_additions(min(batch, 2 * CHAIN), CHAIN), blocked_additions(batch, _SHORT))


def long_block(terms: int) -> int:
    """How many examples of so many rows may be added up together, in whatever order: rounding adds 0.85 percent."""
    return max(1, min(BLOCK, int(math.sqrt(_LONG_SLACK * 2**24 / (terms * (rho(terms) + 1))))))


def long_additions(batch: int, terms: int) -> float:
    """As `blocked_additions`, for examples of several rows, whose parts may be as long as rho C; see `added`."""
    most = long_block(terms)
    if most == 1:  # each example is added up by itself
        return chained_additions(batch) + 9.0 * min(batch, _FEW * CHAIN)
    block = min(batch, most)
    return block * terms * block * (rho(terms) + 1) + (9.0 * min(batch, _FEW * block) + 2.0 * batch) * (block < batch)


def blocked_sum(factors: Tensor, values: Tensor) -> Tensor:
    """sum_i factor_i * values_i of [batch, n] values, no more than 320 examples in one chain."""
    return chained(factors[:, None], values)[0]


def chained(left: Tensor, right: Tensor) -> Tensor:
    """left.t() @ right over the rows, in fp32 or wider: in one chain, two, or blocks of at most 192 rows."""
    rows = len(left)
    if not rows:  # an expert that no example came to
        return wide(left).t() @ wide(right)
    size = even(rows, _SHORT)
    if left.is_cuda and CHAIN < rows <= _FEW * size and rows % size == 0:
        return in_blocks(left, right, size)[0].sum(0)  # side by side they take less time than one after the other
    if rows <= 2 * CHAIN:
        cuts = _cuts(rows, even(rows, CHAIN))
        return added((_one_product(left[cut], right[cut]) for cut in cuts), len(cuts))
    some = max(1, _PIECE_BYTES // (4 * left.shape[1] * right.shape[1])) * size
    total: Tensor | None = None
    for cut in _cuts(rows, some):
        for block in in_blocks(left[cut], right[cut], size):
            part = block.sum(0, dtype=torch.float64)
            total = part if total is None else total.add_(part)
    assert total is not None
    return total.to(wide(right[:0]).dtype)


def _one_product(left: Tensor, right: Tensor) -> Tensor:
    if left.is_cuda and left.dtype == right.dtype and left.dtype in _HALF:
        return product(left[None].transpose(1, 2), right[None])[0]
    return wide(left).t() @ wide(right)


def added(blocks: Iterable[Tensor], count: int) -> Tensor:
    """The sum of so many blocks; many of them in fp64, rounded once."""
    waiting = iter(blocks)
    first = next(waiting)
    total = first if count <= _FEW else first.double()
    for block in waiting:
        total += block  # the blocks are nobody else's
    return total.to(first.dtype)


def even(rows: int, longest: int) -> int:
    """The size of a block, so that all are about as long, none longer than `longest`."""
    return -(-rows // -(-rows // longest))


def _cuts(rows: int, size: int) -> list[slice]:
    return [slice(start, min(rows, start + size)) for start in range(0, rows, size)]


def in_blocks(left: Tensor, right: Tensor, size: int) -> list[Tensor]:
    """left.t() @ right for each block of `size` rows: [blocks, i, j], and the same of a last, shorter block."""
    rows = len(left)
    whole = rows // size * size
    blocks = []
    if whole:
        cut = [side[:whole].unflatten(0, (-1, size)) for side in (left, right)]
        blocks.append(product(cut[0].transpose(1, 2), cut[1]))
    if whole < rows:
        blocks.append(product(left[None, whole:].transpose(1, 2), right[None, whole:]))
    return blocks


def add_blocks(blocks: Sequence[Tensor]) -> Tensor:
    """[blocks, ..] -> [..], in fp64 and rounded once."""
    if len(blocks) == 1 == blocks[0].shape[0]:
        return blocks[0][0]
    totals = [block.sum(0, dtype=torch.float64) for block in blocks]
    return sum(totals[1:], start=totals[0]).to(blocks[0].dtype)


def product(one: Tensor, other: Tensor) -> Tensor:
    """torch.bmm in fp32 or wider; half precision factors stay what they are where the result can be fp32 at once."""
    if one.is_cuda and one.dtype == other.dtype and one.dtype in _HALF:
        return torch.bmm(one, other, out_dtype=torch.float32)
    return torch.bmm(wide(one), wide(other))
