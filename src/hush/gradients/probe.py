"""Finds where the examples lie in the output gradients of nodes, by backward passes with powers of two on the losses.

Write g(w) for the gradient at a node when example b's loss is weighted by w_b. If a row of g belongs to example b
alone, g(w) = w_b g(1) there, to the last bit since powers of two scale without rounding. So the weights 2^digit, for
each digit of b in base 4, spell the owner of each row. What sums over examples (the gradient of a weight) fails.

The probe tells where the examples are, not that they are independent: that is a matter of the forward pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from hush.gradients.site import Layout

_BASE = 4
_SIGNIFICANT, _TOLERANCE = 2.0**-6, 2.0**-13
"""Which part of the largest entry of a row counts, and how far its ratio may be off a power of two."""
_UNSTEADY = 0.25
"""How far a row as a whole may be off where gradients differ from pass to pass: rows can be sums that cancel."""
_ABOVE_UNDERFLOW = 2.0**20
"""Numbers closer than this to the smallest normal one tell nothing: near it scaling rounds."""


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
    if not edges:
        return []
    batch = losses.shape[0]
    codes = _codes(batch).to(losses.device)
    plain = _gradients(losses, edges, torch.ones_like(losses))
    unsteady = _may_differ(losses)
    again = _gradients(losses, edges, torch.ones_like(losses)) if unsteady else plain
    differs = [not _same(one, other) for one, other in zip(plain, again, strict=True)]
    strict: list[list[list[Tensor | None]]] = [[] for _ in edges]
    loose: list[list[list[Tensor | None]]] = [[] for _ in edges]
    for code in codes:
        weighted = _gradients(losses, edges, torch.exp2(code.to(losses.dtype)))
        for place, (before, after) in enumerate(zip(plain, weighted, strict=True)):
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


def _exponents_of_noisy(before: Tensor | None, after: Tensor | None) -> list[Tensor | None]:
    """As `_exponents`, for gradients with noise in the last places: a row counts as a whole, by least squares."""
    if before is None or after is None:
        return []
    found: list[Tensor | None] = []
    for dim in range(before.dim()):
        one, two = (side.movedim(dim, 0).reshape(side.shape[dim], -1).float() for side in (before, after))
        size = one.square().sum(1)
        blank = size == 0
        ratio = torch.where(blank, 1.0, (one * two).sum(1) / torch.where(blank, 1.0, size))
        exponent = torch.where(ratio > 0, ratio, 0.1).log2().round()
        near = (ratio - exponent.exp2()).abs() <= _UNSTEADY * exponent.exp2()
        off = (two - ratio[:, None] * one).square().sum(1) <= _UNSTEADY**2 * two.square().sum(1)
        fine = blank | (near & off & (exponent >= 0) & (exponent < _BASE))
        found.append(torch.where(blank, -1, exponent.long()) if bool(fine.all()) else None)
    return found


def _exponents(before: Tensor | None, after: Tensor | None) -> list[Tensor | None]:
    """For each dimension the exponent of each row, -1 where all is zero; None if a row has no single one."""
    if before is None or after is None:
        return []
    least = torch.finfo(before.dtype).tiny * (1 if before.dtype == torch.float16 else _ABOVE_UNDERFLOW)
    before, after = before.float(), after.float()
    usable = (before.abs() > least) & before.isfinite() & after.isfinite()
    ratio = torch.where(usable, after, 1) / torch.where(usable, before, 1)
    exponent = torch.where(ratio > 0, ratio, 0.1).log2().round()
    exact = (exponent >= 0) & (exponent < _BASE) & ((ratio - exponent.exp2()).abs() <= _TOLERANCE * ratio)
    magnitude = torch.where(usable, before.abs(), 0)
    found: list[Tensor | None] = []
    for dim in range(before.dim()):
        rows = magnitude.movedim(dim, 0).flatten(1) if before.dim() > 1 else magnitude[:, None]
        if rows.numel() == 0:
            found.append(torch.full((before.shape[dim],), -1, device=before.device))
            continue
        exponents = exponent.movedim(dim, 0).reshape(rows.shape)
        counts = (rows >= _SIGNIFICANT * rows.amax(1, keepdim=True)) & (rows > 0)
        high = torch.where(counts, exponents, -1).amax(1)
        low = torch.where(counts, exponents, _BASE).amin(1)
        fine = (exact.movedim(dim, 0).reshape(rows.shape) | ~counts).all(1) & ((high == low) | (high < 0))
        found.append(high.long() if bool(fine.all()) else None)
    return found


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
