"""Which example owns which row of an output gradient, by backward passes with chosen weights on the losses.

On a slice of two or three examples each loss is taken back by itself: rows of the others are zero, exactly, in every
dtype and at every depth. On a whole batch the losses carry powers of two, which scale without rounding, so that the
exponent by which a row grew names its owner. No tolerance decides what belongs to whom, and only a finite number that
is not zero is evidence: 0 x inf is NaN in rows that nobody reaches.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from hush.gradients.sums.per_example import Layout

NOBODY, SHARED = -1, -2
Owners = list[Tensor | None]
"""For each dimension the owner of each row (NOBODY where all is zero); None where a row has several."""
_GROUP_BYTES = 1 << 28
"""Gradients that one pass on a slice hands out together."""


def one_hot(losses: Tensor, edges: Sequence[GradientEdge]) -> list[Owners | None]:
    """The owners of rows of each edge, for up to three losses; None for an edge that no gradient reaches."""
    seen: list[list[Tensor] | None] = [None] * len(edges)
    for places in groups(edges):
        for example in range(len(losses)):
            for place, grad in zip(places, _backward(losses, example, [edges[p] for p in places]), strict=True):
                if grad is None:
                    continue
                bits = [some.long() << example for some in some_in_rows(present(grad))]
                before = seen[place]
                seen[place] = bits if before is None else [a | b for a, b in zip(before, bits, strict=True)]
    table = torch.tensor([NOBODY, 0, 1, SHARED, 2, SHARED, SHARED, SHARED])
    found: list[Owners | None] = []
    for dims in seen:
        named = None if dims is None else [table.to(bits.device)[bits] for bits in dims]
        found.append(None if named is None else [None if bool((o == SHARED).any()) else o for o in named])
    return found


def shared_entries(losses: Tensor, edges: Sequence[GradientEdge]) -> list[bool | None]:
    """Whether several losses reach the same entry of each edge; None where none reaches any."""
    counts: list[Tensor | None] = [None] * len(edges)
    for places in groups(edges):
        for example in range(len(losses)):
            for place, grad in zip(places, _backward(losses, example, [edges[p] for p in places]), strict=True):
                if grad is not None:
                    here, before = present(grad).to(torch.int8), counts[place]
                    counts[place] = here if before is None else before + here
    return [None if c is None or not bool(c.any()) else bool((c > 1).any()) for c in counts]


def _backward(losses: Tensor, example: int, edges: list[GradientEdge]) -> Sequence[Tensor | None]:
    weights = torch.zeros_like(losses)
    weights[example] = 1
    return backward(losses, edges, weights)


def backward(losses: Tensor, edges: list[GradientEdge], weights: Tensor) -> Sequence[Tensor | None]:
    """Output gradients at the edges for these weights on the losses; the graph stays."""
    return torch.autograd.grad(losses, edges, weights, retain_graph=True, allow_unused=True)


def groups(edges: Sequence[GradientEdge]) -> Iterator[list[int]]:
    """The places of edges whose gradients fit into memory together."""
    here: list[int] = []
    size = 0
    for place, edge in enumerate(edges):
        data = edge.node._input_metadata[edge.output_nr]
        more = math.prod(data.shape) * data.dtype.itemsize
        if here and size + more > _GROUP_BYTES:
            yield here
            here, size = [], 0
        here.append(place)
        size += more
    if here:
        yield here


def present(grad: Tensor) -> Tensor:
    """Where a gradient is finite and not zero."""
    dense = grad.to_dense() if grad.is_sparse else grad
    return (dense != 0) & dense.isfinite()


def some_in_rows(marks: Tensor) -> list[Tensor]:
    """For each dimension which rows hold a mark."""
    found, left = [], marks
    for dim in range(marks.dim()):
        found.append(left.flatten(1).any(1) if left.dim() > 1 else left)
        if dim + 1 < marks.dim():
            left = left.any(0)
    return found


def follows(owners: Tensor, inner: int, batch: int) -> bool:
    """Whether rows belong to the examples in turn, `inner` at a time."""
    turn = torch.arange(len(owners), device=owners.device) // inner % batch
    return bool(((owners == NOBODY) | (owners == turn)).all())


def regular(owners: Tensor, dim: int, batch: int) -> list[Layout]:
    """All layouts outer x batch x inner along a dimension that agree with the owners of its rows."""
    size = len(owners)
    if size == 0 or size % batch:
        return []
    each = size // batch
    inners = [inner for inner in range(each, 0, -1) if each % inner == 0 and follows(owners, inner, batch)]
    return [Layout(dim, each // inner, batch, inner) for inner in inners]


def table(owners: Tensor, dim: int, batch: int) -> Layout:
    """An irregular layout: the rows of each example as a table; rows of nobody (all zero) are left out."""
    size = len(owners)
    rows = (owners >= 0).nonzero()[:, 0]
    order = torch.argsort(owners[rows], stable=True)
    rows, who = rows[order], owners[rows][order]
    counts = torch.bincount(who, minlength=batch)
    starts = counts.cumsum(0) - counts
    filled = torch.full((batch, max(1, int(counts.max()))), size, device=owners.device)
    filled[who, torch.arange(len(rows), device=owners.device) - starts[who]] = rows
    return Layout(dim, size, batch, 1, filled)


# The whole batch ------------------------------------------------------------------------------------------------------


def looked_up(losses: Tensor, edges: Sequence[GradientEdge], narrow: bool = False) -> list[Layout | None]:
    """Where the examples lie at each edge in this very batch; None where rows have several owners, or none is known.

    `narrow` tells that gradients are in float16, which has few exponents. An edge that nothing reaches has any layout.
    """
    batch, base = len(losses), 8 if narrow else 32
    digits = max(1, math.ceil(math.log(batch, base) - 1e-9))
    example = torch.arange(batch, device=losses.device)
    found: list[Layout | None] = [None] * len(edges)
    for places in groups(edges):
        here = [edges[place] for place in places]
        plain = backward(losses, here, torch.ones_like(losses))
        names = [[_NoOwner(grad) for _ in range(grad.dim())] if grad is not None else [] for grad in plain]
        for digit in range(digits):
            shift = example // base**digit % base - base // 2
            scaled = backward(losses, here, torch.exp2(shift.to(losses.dtype)))
            for grad, other, dims in zip(plain, scaled, names, strict=True):
                if grad is not None and other is not None:
                    for dim, owners in enumerate(dims):
                        owners.add(dim, grad, other, base, digit)
                        if dim == 0 and owners.clear:
                            del dims[1:]
        for place, grad, dims in zip(places, plain, names, strict=True):
            found[place] = Layout(0, 1, batch, 1) if grad is None else _layout(dims, batch)
    return found


class _NoOwner:
    """The owner of each row of one dimension, digit by digit."""

    def __init__(self, grad: Tensor) -> None:
        self.owners: Tensor | None = None
        self.known: Tensor | None = None
        self.clear = True

    def add(self, dim: int, grad: Tensor, scaled: Tensor, base: int, digit: int) -> None:
        if not self.clear:
            return
        one, two = (_by_row(g, dim) for g in (grad, scaled))
        sizes, others = one.amax(1), two.amax(1)
        silent = (sizes == 0) & (others == 0)
        exponent = torch.log2(others / sizes)
        shift = exponent.round()
        owner = (shift + base // 2).nan_to_num(-1, -1, -1)
        clear = ((exponent - shift).abs() < 0.01) & (owner >= 0) & (owner < base)
        apart = (two - torch.ldexp(one, shift.nan_to_num(0, 0, 0)[:, None])).abs().amax(1)
        clear &= apart <= 1e-3 * others
        self.clear = bool((silent | clear).all())
        value = torch.where(clear, owner, 0).long() * base**digit
        self.owners = value if self.owners is None else self.owners + value
        self.known = clear if self.known is None else self.known & clear


def _by_row(grad: Tensor, dim: int) -> Tensor:
    """[rows, all else] as sizes, in fp64 so that no exponent is lost; non-finite rows are clear for nobody."""
    dense = grad.to_dense() if grad.is_sparse else grad
    rows = dense.movedim(dim, 0).flatten(1) if dense.dim() > 1 else dense[:, None]
    rows = rows.abs().double()
    return rows if rows.shape[1] else rows.new_zeros(len(rows), 1)


def _layout(dims: list[_NoOwner], batch: int) -> Layout | None:
    """A regular layout along any dimension, or else an irregular one."""
    irregular: Layout | None = None
    for dim, one in enumerate(dims):
        if not one.clear or one.owners is None or one.known is None:
            continue
        owners = torch.where(one.known, one.owners, NOBODY)
        if bool((owners >= batch).any()):
            continue
        fitting = regular(owners, dim, batch)
        if fitting:
            return fitting[0]
        if irregular is None:
            irregular = table(owners, dim, batch)
    return irregular
