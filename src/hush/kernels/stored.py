"""Weighted sums of stored gradients; what has no weight counts for nothing, whatever it holds."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 128
_ROWS = 32
_PROGRAMS = 1056
"""So many programs keep a large GPU's memory busy."""


@triton.jit
def _weighted(  # type: ignore[no-untyped-def]
    values, factors, out, examples, block, columns, BN: tl.constexpr, BR: tl.constexpr
):
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    first = tl.program_id(1) * block
    last = tl.minimum(first + block, examples)
    inside = n < columns
    total = tl.zeros([BN], tl.float32)
    for start in range(first, first + block, BR):
        row = start + tl.arange(0, BR)
        factor = tl.load(factors + row, mask=row < last, other=0.0)
        counts = factor != 0.0  # the others are not even read: they may hold infinities
        place = row[:, None].to(tl.int64) * columns + n[None, :]
        part = tl.load(values + place, mask=counts[:, None] & inside[None, :], other=0.0)
        total += tl.sum(part * factor[:, None], axis=0)
    tl.store(out + tl.program_id(1).to(tl.int64) * columns + n, total, mask=inside)


def weighted_rows(values: Tensor, factors: Tensor, block: int) -> Tensor:
    """[blocks, n]: for each block of examples the sum of factor_b * values_b of [batch, n] in fp32."""
    return _stored_sums(values, factors.float().contiguous(), block)


def block_of(batch: int, columns: int, longest: int) -> int:
    """How many examples one chain of additions takes, at most `longest`: few columns are split over more parts."""
    parts = max(-(-batch // longest), min(-(-batch // _ROWS), -(-_PROGRAMS * _COLUMNS // columns)))
    return -(-batch // parts)


def _tile(block: int, columns: int) -> tuple[int, int]:
    """The columns of a program and the examples that it reads at once: few examples are read in long pieces."""
    if block > _ROWS // 2 or columns < _PROGRAMS * 4 * _COLUMNS:
        return _COLUMNS, _ROWS
    rows = triton.next_power_of_2(block)
    return min(2048, 2 * _ROWS * _COLUMNS // rows), rows


@torch.library.custom_op("hush::stored_sums", mutates_args=())
def _stored_sums(values: Tensor, factors: Tensor, block: int) -> Tensor:
    values = values.contiguous()
    batch, columns = values.shape
    sums = values.new_empty(-(-batch // block), columns)
    across, down = _tile(block, columns)
    _weighted[(triton.cdiv(columns, across), len(sums))](
        values, factors, sums, batch, block, columns, BN=across, BR=down, num_warps=4
    )
    return sums


@_stored_sums.register_fake
def _(values: Tensor, factors: Tensor, block: int) -> Tensor:
    return values.new_empty(-(-values.shape[0] // block), values.shape[1])
