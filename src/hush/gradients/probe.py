"""Finds where the examples lie in the output gradients of nodes, by backward passes with powers of two on the losses.

Write g(w) for the gradient at a node when example b's loss is weighted by w_b. If a row of g belongs to example b
alone, g(w) = w_b g(1) there, to the last bit since powers of two scale without rounding. So the weights 2^digit, for
each digit of b in base 4, spell the owner of each row. What sums over examples (the gradient of a weight) fails.

The probe tells where the examples are, not that they are independent: that is a matter of the forward pass.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from hush.gradients.sums.per_example import Layout

_BASE = 4
_SIGNIFICANT, _TOLERANCE = 2.0**-6, 2.0**-13
"""Which part of the largest entry of a row counts, and how far its ratio may be off a power of two."""
_UNSTEADY = 0.25
"""How far a row as a whole may be off where gradients differ from pass to pass: rows can be sums that cancel."""
_ABOVE_UNDERFLOW = 2.0**20
"""Numbers closer than this to the smallest normal one tell nothing: near it scaling rounds."""
_SHARE = 1 / 8
"""The part of a GPU's free memory that the gradients of one pass may take; there are two sets of them at a time."""
_PIECE = 1 << 24
"""Numbers of a gradient that are looked at at a time."""


@dataclass(frozen=True)
class Finding:
    """Where the examples lie in one output gradient (None: nowhere), and whether no other layout would fit as well.

    A layout that is not certain is right for the values at hand (rows of zeros may go to anybody), not for others.
    """

    layout: Layout | None
    certain: bool
    blank: bool = False
    """Whether the gradient was zero or absent, so that any answer is right for now."""


def probe(losses: Tensor, edges: Sequence[GradientEdge]) -> list[Finding]:
    """One finding for each edge, from a few backward passes; the graph stays usable."""
    return [finding for group in in_groups(edges, losses.device) for finding in _probe(losses, group)]


def in_groups(edges: Sequence[GradientEdge], device: torch.device) -> Iterator[Sequence[GradientEdge]]:
    """The edges, as many at a time as there is memory for their gradients beside what a backward pass needs itself."""
    room = _SHARE * _free(device)
    first, held = 0, 0
    for place, edge in enumerate(edges):
        metadata = edge.node._input_metadata[edge.output_nr]
        size = math.prod(metadata.shape) * metadata.dtype.itemsize
        if held and held + size > room:
            yield edges[first:place]
            first, held = place, 0
        held += size
    if edges:
        yield edges[first:]


def _free(device: torch.device) -> float:
    """The bytes that this process can still have on a GPU; elsewhere nobody counts them."""
    if device.type != "cuda":
        return math.inf
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(device)
    return max(0.0, min(free, fraction * total - reserved)) + reserved - torch.cuda.memory_allocated(device)


def _probe(losses: Tensor, edges: Sequence[GradientEdge]) -> list[Finding]:
    batch = losses.shape[0]
    codes = _codes(batch).to(losses.device)
    plain = _gradients(losses, edges, torch.ones_like(losses))
    unsteady = _may_differ(losses)
    again = _gradients(losses, edges, torch.ones_like(losses)) if unsteady else plain
    differs = [not _same(one, other) for one, other in zip(plain, again, strict=True)]
    del again
    strict: list[list[list[Tensor | None]]] = [[] for _ in edges]
    loose: list[list[list[Tensor | None]]] = [[] for _ in edges]
    for code in codes:
        weighted = _gradients(losses, edges, torch.exp2(code.to(losses.dtype)))
        for place, before in enumerate(plain):
            after, weighted[place] = weighted[place], None
            strict[place].append(_exponents(before, after))
            if unsteady:
                loose[place].append(_exponents_of_noisy(before, after))
    findings = []
    for place, gradient in enumerate(plain):
        blank = gradient is None or not bool(gradient.any())
        finding = _finding(loose[place] if differs[place] else strict[place], codes, batch, blank)
        if unsteady and finding.layout is None and not (blank or differs[place]):
            # Two passes may agree by chance and a third not. Without that evidence only a clear layout is believed.
            second = _finding(loose[place], codes, batch, blank)
            if second.certain and second.layout is not None:
                finding = second
        findings.append(finding)
    return findings


def _may_differ(losses: Tensor) -> bool:
    """On a GPU some kernels (attention's) add up in no fixed order: gradients differ from one pass to the next."""
    return losses.is_cuda


def _codes(batch: int) -> Tensor:
    """[passes, batch]: the digits of each example in base 4, and one that mixes them: passes must agree."""
    example = torch.arange(batch)
    count = next(n for n in range(1, 40) if _BASE**n >= batch)
    digits = [example // _BASE**n % _BASE for n in range(count)]
    return torch.stack([*digits, (example * 7 + example // 3 + 1) % _BASE])


def _gradients(losses: Tensor, edges: Sequence[GradientEdge], weights: Tensor) -> list[Tensor | None]:
    return list(torch.autograd.grad(losses, edges, weights, retain_graph=True, allow_unused=True))


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


@dataclass(frozen=True)
class _Piece:
    """A part of a gradient: gradients are looked at piece by piece, since that takes several times their memory."""

    along: int
    start: int
    length: int

    def of(self, gradient: Tensor) -> Tensor:
        return gradient.narrow(self.along, self.start, self.length).float()

    def rows(self, values: Tensor, dim: int) -> Tensor:
        """Of values for all rows along a dimension those whose rows lie in the piece, or begin or go on there."""
        return values.narrow(0, self.start, self.length) if dim == self.along else values


def _pieces(gradient: Tensor) -> list[_Piece]:
    along = max(range(gradient.dim()), key=lambda dim: gradient.shape[dim])
    size = gradient.shape[along]
    each = max(1, _PIECE * size // gradient.numel())
    return [_Piece(along, start, min(each, size - start)) for start in range(0, size, each)]


def _matrix(values: Tensor, dim: int) -> Tensor:
    """The rows along a dimension, one below the other."""
    return values.movedim(dim, 0).reshape(values.shape[dim], -1)


def _exponents_of_noisy(before: Tensor | None, after: Tensor | None) -> list[Tensor | None]:
    """As `_exponents`, for gradients with noise in the last places: a row counts as a whole, by least squares."""
    if before is None or after is None or before.dim() == 0:
        return []
    sums = [torch.zeros(3, size, device=before.device) for size in before.shape]
    for piece in _pieces(before) if before.numel() else []:
        one, two = piece.of(before), piece.of(after)
        products = one.square(), one * two, two.square()
        for dim, found in enumerate(sums):
            for total, product in zip(found, products, strict=True):
                piece.rows(total, dim).add_(_matrix(product, dim).sum(1))
    return [_exponents_of_sums(*found) for found in sums]


def _exponents_of_sums(size: Tensor, product: Tensor, size_after: Tensor) -> Tensor | None:
    """From |one|^2, <one, two> and |two|^2 of each row."""
    blank = size == 0
    ratio = torch.where(blank, 1.0, product / torch.where(blank, 1.0, size))
    exponent = torch.where(ratio > 0, ratio, 0.1).log2().round()
    near = (ratio - exponent.exp2()).abs() <= _UNSTEADY * exponent.exp2()
    off = size_after - ratio * product <= _UNSTEADY**2 * size_after  # |two - ratio one|^2
    fine = blank | (near & off & (exponent >= 0) & (exponent < _BASE))
    return torch.where(blank, -1, exponent.long()) if bool(fine.all()) else None


def _exponents(before: Tensor | None, after: Tensor | None) -> list[Tensor | None]:
    """For each dimension the exponent of each row, -1 where all is zero; None if a row has no single one."""
    if before is None or after is None or before.dim() == 0:
        return []
    least = torch.finfo(before.dtype).tiny * (1 if before.dtype == torch.float16 else _ABOVE_UNDERFLOW)
    pieces = _pieces(before) if before.numel() else []
    largest, high, low, fine = (
        [torch.full((size,), start, device=before.device) for size in before.shape]
        for start in (0.0, -1.0, float(_BASE), True)
    )
    for piece in pieces:
        magnitude = _magnitude(piece.of(before), piece.of(after), least)
        for dim, known in enumerate(largest):
            rows = piece.rows(known, dim)
            rows.copy_(torch.maximum(rows, _matrix(magnitude, dim).amax(1)))
    for piece in pieces:
        one, two = piece.of(before), piece.of(after)
        magnitude = _magnitude(one, two, least)
        ratio = torch.where(magnitude > 0, two, 1) / torch.where(magnitude > 0, one, 1)
        exponent = torch.where(ratio > 0, ratio, 0.1).log2().round()
        exact = (exponent >= 0) & (exponent < _BASE) & ((ratio - exponent.exp2()).abs() <= _TOLERANCE * ratio)
        for dim in range(before.dim()):
            sizes, exponents = _matrix(magnitude, dim), _matrix(exponent, dim)
            counts = (sizes >= _SIGNIFICANT * piece.rows(largest[dim], dim)[:, None]) & (sizes > 0)
            some_high, some_low, all_fine = (piece.rows(known[dim], dim) for known in (high, low, fine))
            some_high.copy_(torch.maximum(some_high, torch.where(counts, exponents, -1.0).amax(1)))
            some_low.copy_(torch.minimum(some_low, torch.where(counts, exponents, float(_BASE)).amin(1)))
            all_fine &= (_matrix(exact, dim) | ~counts).all(1)
    return [
        most.long() if bool((good & ((most == least_of) | (most < 0))).all()) else None
        for most, least_of, good in zip(high, low, fine, strict=True)
    ]


def _magnitude(before: Tensor, after: Tensor, least: float) -> Tensor:
    """How large entries are, zero for those that tell nothing."""
    usable = (before.abs() > least) & before.isfinite() & after.isfinite()
    return torch.where(usable, before.abs(), 0)


def _finding(per_code: list[list[Tensor | None]], codes: Tensor, batch: int, blank: bool) -> Finding:
    """Puts the digits together: all regular layouts that fit in all dimensions, or else an irregular one."""
    regular: list[Layout] = []
    irregular: list[Layout] = []
    witnesses = 0
    for dim in range(len(per_code[0])):
        rows = [exponents[dim] for exponents in per_code]
        if any(row is None for row in rows):
            continue
        owners = _owners(torch.stack([row for row in rows if row is not None]), codes, batch)
        if owners is None:
            continue
        fitting = _regular(owners, dim, batch)
        regular += fitting
        witnesses = max(witnesses, int(owners[owners >= 0].unique().numel()))
        if not fitting and bool((owners >= 0).any()):
            irregular.append(_table(owners, dim, batch))
    if regular:
        # One example alone could own a few rows of a weight's gradient by chance; half of a batch cannot.
        return Finding(regular[0], batch == 1 or (len(regular) == 1 and 2 * witnesses >= max(4, batch)), blank)
    return Finding(irregular[0] if irregular else None, not irregular and not blank, blank)


def _owners(digits: Tensor, codes: Tensor, batch: int) -> Tensor | None:
    """[rows] the example of each row, -1 where unknown; None if the digits name nobody."""
    known = (digits >= 0).all(0)
    powers = _BASE ** torch.arange(len(codes) - 1, device=digits.device)
    owners = (digits[:-1].clamp(min=0) * powers[:, None]).sum(0)
    valid = owners < batch
    owners = owners.clamp(max=batch - 1)
    return (
        torch.where(known, owners, -1) if bool((~known | (valid & (codes[-1][owners] == digits[-1]))).all()) else None
    )


def _regular(owners: Tensor, dim: int, batch: int) -> list[Layout]:
    """All layouts outer x batch x inner of this dimension that agree with the owners that are known."""
    size = owners.shape[0]
    if size == 0 or size % batch:
        return []
    row = torch.arange(size, device=owners.device)
    repeats = size // batch
    fitting = []
    for inner in range(repeats, 0, -1):
        if repeats % inner == 0 and bool(((owners < 0) | (owners == row // inner % batch)).all()):
            fitting.append(Layout(dim, repeats // inner, batch, inner))
    return fitting[:1] if batch == 1 else fitting


def _table(owners: Tensor, dim: int, batch: int) -> Layout:
    """The rows of each example as a table; rows of nobody (all zero) are left out."""
    size = owners.shape[0]
    longest = int(torch.bincount(owners[owners >= 0], minlength=batch).max())
    order = torch.full((batch, longest), size, device=owners.device)
    used = [0] * batch
    for row, owner in enumerate(owners.tolist()):
        if owner >= 0:
            order[owner, used[owner]] = row
            used[owner] += 1
    return Layout(dim, size, batch, 1, order)
