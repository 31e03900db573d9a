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
_STEADY = 2.0**-6, 2.0**-13
"""Which part of the largest entry of a row counts, and how far its ratio may be off a power of two."""
_UNSTEADY = 0.5, 0.25
"""The same where gradients differ from one pass to the next, in half precision by whole units in the last place."""
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
    # On a GPU some kernels (attention's) add up in no fixed order: their gradients differ from one pass to the next.
    again = _gradients(losses, edges, torch.ones_like(losses)) if losses.is_cuda else plain
    steady = [_same(one, other) for one, other in zip(plain, again, strict=True)]
    seen: list[list[list[Tensor | None]]] = [[] for _ in edges]
    for code in codes:
        weighted = _gradients(losses, edges, torch.exp2(code.to(losses.dtype)))
        for place, (before, after) in enumerate(zip(plain, weighted, strict=True)):
            seen[place].append(_exponents(before, after, _STEADY if steady[place] else _UNSTEADY))
    blank = [gradient is None or not bool(gradient.any()) for gradient in plain]
    return [_finding(per_code, codes, batch, empty) for per_code, empty in zip(seen, blank, strict=True)]


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


def _exponents(before: Tensor | None, after: Tensor | None, limits: tuple[float, float]) -> list[Tensor | None]:
    """For each dimension the exponent of each row, -1 where all is zero; None if a row has no single one."""
    if before is None or after is None:
        return []
    significant, tolerance = limits
    least = torch.finfo(before.dtype).tiny * (1 if before.dtype == torch.float16 else _ABOVE_UNDERFLOW)
    before, after = before.float(), after.float()
    usable = (before.abs() > least) & before.isfinite() & after.isfinite()
    ratio = torch.where(usable, after, 1) / torch.where(usable, before, 1)
    exponent = torch.where(ratio > 0, ratio, 0.1).log2().round()
    exact = (exponent >= 0) & (exponent < _BASE) & ((ratio - exponent.exp2()).abs() <= tolerance * ratio)
    magnitude = torch.where(usable, before.abs(), 0)
    found: list[Tensor | None] = []
    for dim in range(before.dim()):
        rows = magnitude.movedim(dim, 0).flatten(1) if before.dim() > 1 else magnitude[:, None]
        if rows.numel() == 0:
            found.append(torch.full((before.shape[dim],), -1, device=before.device))
            continue
        exponents = exponent.movedim(dim, 0).reshape(rows.shape)
        counts = (rows >= significant * rows.amax(1, keepdim=True)) & (rows > 0)
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
