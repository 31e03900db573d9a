"""Squared norms and weighted sums of stored gradients; what has no weight counts for nothing, whatever it holds."""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 128
_ROWS = 32
_PROGRAMS = 1056
"""So many programs keep a large GPU's memory busy."""
_LONG, _WIDE = 1024, 1 << 18
"""The columns of a program where there are at least so many."""
_SQUARE = (64, 128)
"""The numbers whose squares one program adds up: over the second size, then over the first."""
PIECES = 6
"""Tensors over which the columns may be spread, at most."""


@triton.jit
def _weighted(  # type: ignore[no-untyped-def]
    values0, values1, values2, values3, values4, values5, factors, out, examples, block, share, rest, columns, pieces,
    BN: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """A program's columns lie in one piece; all pieces are as wide as the first but for the last one."""
    each = tl.cdiv(share, BN)
    piece = tl.program_id(0) // each
    values = values0
    if piece == 1:
        values = values1
    elif piece == 2:
        values = values2
    elif piece == 3:
        values = values3
    elif piece == 4:
        values = values4
    elif piece == 5:
        values = values5
    width = tl.where(piece == pieces - 1, rest, share)
    n = tl.program_id(0) % each * BN + tl.arange(0, BN)
    first = tl.program_id(1) * block
    last = tl.minimum(first + block, examples)
    inside = n < width
    total = tl.zeros([BN], tl.float32)
    for start in range(first, first + block, BR):
        row = start + tl.arange(0, BR)
        factor = tl.load(factors + row, mask=row < last, other=0.0)
        counts = factor != 0.0  # the others are not even read: they may hold infinities
        place = row[:, None].to(tl.int64) * width + n[None, :]
        part = tl.load(values + place, mask=counts[:, None] & inside[None, :], other=0.0).to(tl.float32)
        total += tl.sum(part * factor[:, None], axis=0)
    tl.store(out + tl.program_id(1).to(tl.int64) * columns + piece * share + n, total, mask=inside)


@triton.jit
def _squares(values, out, columns, BH: tl.constexpr, BN: tl.constexpr):  # type: ignore[no-untyped-def]
    example, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n = part * (BH * BN) + tl.arange(0, BH)[:, None] * BN + tl.arange(0, BN)[None, :]
    some = tl.load(values + example * columns + n, mask=n < columns, other=0.0).to(tl.float32)
    tl.store(out + example * tl.num_programs(1) + part, tl.sum(tl.sum(some * some, axis=1), axis=0))


def squared_norms(values: Tensor) -> Tensor:
    """[batch]: the squared norms of [batch, n] in any dtype, taken in fp32."""
    return _stored_squares(values).sum(1)


def longest_chain(columns: int) -> int:
    """The longest chain of additions behind a norm."""
    return sum(_SQUARE) + _parts(columns)


def weighted_rows(pieces: Sequence[Tensor], factors: Tensor, block: int) -> Tensor:
    """[blocks, n]: for each block of examples the sum of factor_b * values_b, in fp32.

    Values are [batch, n], in one piece or in a few whose columns stand one after another, as many in each but the last.
    """
    return _stored_sums(list(pieces), factors.float().contiguous(), block)


def block_of(batch: int, columns: int, longest: int) -> int:
    """How many examples one chain of additions takes, at most `longest`: few columns are split over more parts."""
    parts = max(-(-batch // longest), min(-(-batch // _ROWS), -(-_PROGRAMS * _COLUMNS // columns)))
    return -(-batch // parts)


def _tile(columns: int) -> tuple[int, int]:
    """The columns of a program and the examples that it reads at once: where columns keep the GPU busy, one by one."""
    return (_LONG, 1) if columns >= _WIDE else (_COLUMNS, _ROWS)


def _parts(columns: int) -> int:
    return -(-columns // math.prod(_SQUARE))


@torch.library.custom_op("hush::stored_squares", mutates_args=())
def _stored_squares(values: Tensor) -> Tensor:
    values = values.contiguous()
    batch, columns = values.shape
    squares = values.new_empty(batch, _parts(columns), dtype=torch.float32)
    _squares[squares.shape](values, squares, columns, BH=_SQUARE[0], BN=_SQUARE[1], num_warps=8)
    return squares


@_stored_squares.register_fake
def _(values: Tensor) -> Tensor:
    return values.new_empty(values.shape[0], _parts(values.shape[1]), dtype=torch.float32)


@torch.library.custom_op("hush::stored_sums", mutates_args=())
def _stored_sums(pieces: Sequence[Tensor], factors: Tensor, block: int) -> Tensor:
    sums = _new_sums(pieces, block)
    pieces = [piece.contiguous() for piece in pieces]
    share, rest = pieces[0].shape[1], pieces[-1].shape[1]
    if len(pieces) > PIECES or any(piece.shape[1] != share for piece in pieces[:-1]) or rest > share:
        raise ValueError(f"expected at most {PIECES} pieces of one width, the last no wider")
    across, down = _tile(sums.shape[1])
    grid = (triton.cdiv(share, across) * (len(pieces) - 1) + triton.cdiv(rest, across), len(sums))
    _weighted[grid](
        *pieces, *pieces[:1] * (PIECES - len(pieces)), factors, sums, len(factors), block, share, rest, sums.shape[1],
        len(pieces), BN=across, BR=down, num_warps=4,
    )  # fmt: skip
    return sums


@_stored_sums.register_fake
def _(pieces: Sequence[Tensor], factors: Tensor, block: int) -> Tensor:
    return _new_sums(pieces, block)


def _new_sums(pieces: Sequence[Tensor], block: int) -> Tensor:
    blocks, columns = -(-len(pieces[0]) // block), sum(piece.shape[1] for piece in pieces)
    return pieces[0].new_empty(blocks, columns, dtype=torch.float32)
