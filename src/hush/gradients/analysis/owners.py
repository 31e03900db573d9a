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

from hush.gradients.sums.per_example import Layout, wide

NOBODY, SHARED = -1, -2
Owners = list[Tensor | None]
"""For each dimension the owner of each row (NOBODY where all is zero); None where a row has several."""
_GROUP_BYTES = 1 << 28
"""Gradients that one pass hands out together."""
_HELD_GROUPS = 4
"""So many groups are held while they are looked at, and need not be computed again."""


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


def looked_up(
    losses: Tensor, edges: Sequence[GradientEdge], narrow: bool = False
) -> tuple[list[Layout | None], list[Tensor | None] | None]:
    """Where the examples lie at each edge in this very batch, and the gradients there where they fit into memory.

    A layout is None where rows have several owners, or none is known; an edge that nothing reaches has any. `narrow`
    tells that gradients are in float16, which has few exponents.
    """
    batch, base = len(losses), 8 if narrow else 32
    digits = max(1, math.ceil(math.log(batch, base) - 1e-9))
    example = torch.arange(batch, device=losses.device)
    found: list[Layout | None] = [None] * len(edges)
    grads: list[Tensor | None] | None = [None] * len(edges)
    cut = list(groups(edges))
    if len(cut) > _HELD_GROUPS:
        grads = None
    for places in cut:
        here = [edges[place] for place in places]
        plain = backward(losses, here, torch.ones_like(losses))
        rows = [None if grad is None else _RowOwners(grad, base) for grad in plain]
        for digit in range(digits):
            shift = example // base**digit % base - base // 2
            scaled = backward(losses, here, torch.exp2(shift.to(losses.dtype)))
            for one, other in zip(rows, scaled, strict=True):
                if one is not None and other is not None:
                    one.add(other, digit)
        for place, grad, one in zip(places, plain, rows, strict=True):
            found[place] = Layout(0, 1, batch, 1) if one is None else one.layout(batch)
            if grads is not None:
                grads[place] = grad
    return found, grads


class _RowOwners:
    """The owner of each row of a gradient, digit by digit, along the first dimension whose rows have one each.

    Such a row grows by one power of two, in its largest entry and in the sum of all. One that is not finite names
    nobody.
    """

    def __init__(self, grad: Tensor, base: int) -> None:
        self._grad, self._base = grad, base
        self._dim: int | None = None
        self._owners: Tensor | None = None
        self._spoiled = False

    def add(self, scaled: Tensor, digit: int) -> None:
        for dim in range(self._grad.dim()) if digit == 0 else () if self._dim is None else (self._dim,):
            owners = self._digits(scaled, dim)
            self._dim = None if owners is None else dim
            if owners is not None:
                add = torch.where(owners == NOBODY, 0, owners) * self._base**digit
                self._owners = torch.where(owners == NOBODY, NOBODY, (self._owners if digit else 0) + add)
                return

    def _digits(self, scaled: Tensor, dim: int) -> Tensor | None:
        """The power of two by which each row grew, as a digit; None if some row did not."""
        (largest, total), (new_largest, new_total) = (_sizes(grad, dim) for grad in (self._grad, scaled))
        exponent, of_total = torch.log2(new_largest / largest), torch.log2(new_total / total)
        shift = exponent.round()
        owner = shift + self._base // 2
        clear = ((exponent - shift).abs() < 1e-3) & ((of_total - shift).abs() < 1e-3)
        clear &= (owner >= 0) & (owner < self._base)
        silent = (largest == 0) & (new_largest == 0)
        spoiled = ~(largest.isfinite() & new_largest.isfinite())
        if not bool((silent | clear | spoiled).all()):
            return None
        self._spoiled = self._spoiled or bool(spoiled.any())
        return torch.where(clear, owner, NOBODY).long()

    def layout(self, batch: int) -> Layout | None:
        """A regular layout, or else an irregular one."""
        if self._dim is None or self._owners is None or bool((self._owners >= batch).any()):
            return None
        fitting = regular(self._owners, self._dim, batch)
        if self._spoiled:  # rows that name nobody may still lie where the others leave room, and in one place only
            return fitting[0] if len(fitting) == 1 else None
        return fitting[0] if fitting else table(self._owners, self._dim, batch)


def _sizes(grad: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """For each row its largest entry and the sum of its entries' sizes, neither of which squares anything."""
    dense = grad.to_dense() if grad.is_sparse else grad
    rows = dense.movedim(dim, 0).flatten(1) if dense.dim() > 1 else dense[:, None]
    if not rows.shape[1]:
        return rows.new_zeros(len(rows), dtype=torch.float64), rows.new_zeros(len(rows), dtype=torch.float64)
    sizes = wide(rows).abs()
    return sizes.amax(1).double(), sizes.sum(1).double()
