"""A batch with some rows replaced: by other records, and by rows that bite.

Those are zeros, a thousand times the range, the ends of the dtype, NaN, infinite: rows that no record looks like, so
that a branch on a maximum or on isfinite(...).all() is taken.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hush.gradients.analysis.function import is_real
from hush.gradients.inputs import Inputs

Replace = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Variant:
    """Inputs in which rows are replaced, and which rows are not."""

    kept: Tensor
    """[rows], bool."""
    inputs: Inputs


def ordinary(few: Inputs, others: Inputs) -> Iterator[Variant]:
    """Each row in turn kept, and all others from other records."""
    for keep in range(few.rows):
        yield _replaced(few, others, _only(keep, few.rows), None)


def variants(few: Inputs, others: Inputs, keep: int | None = None) -> Iterator[Variant]:
    """Other records, then rows that bite: all the others at once, and one at a time."""
    count = few.rows
    yield from ordinary(few, others) if keep is None else [_replaced(few, others, _only(keep, count), None)]
    for number, (bite, alone) in enumerate(_BITES):
        kept = number % count if keep is None else keep
        yield _replaced(few, others, _only(kept, count), bite)
        if alone and count > 1:
            yield _replaced(few, few, ~_only((kept + 1) % count, count), bite)


def halves(inputs: Inputs, draw: int = 0) -> Iterator[Variant]:
    """The whole batch with a drawn half of its rows kept: what no three rows show, at any distance, is met here."""
    generator = torch.Generator().manual_seed(draw)
    for bite in (None, _filled(0.0), None, _times(1000.0), None, _filled(float("nan"))):
        order, others = (torch.randperm(inputs.rows, generator=generator) for _ in range(2))
        kept = torch.zeros(inputs.rows, dtype=torch.bool)
        kept[order[: (inputs.rows + 1) // 2]] = True
        yield _replaced(inputs, inputs.take(others), kept, bite)


def _only(row: int, count: int) -> Tensor:
    return torch.arange(count) == row


def _replaced(few: Inputs, others: Inputs, kept: Tensor, bite: Replace | None) -> Variant:
    """All rows but the kept ones from the others; floats of records a little larger, or as `bite` says."""
    rest = iter([tensor for _, tensor in others.tensors()])

    def replace(tensor: Tensor) -> Tensor:
        other = next(rest)
        if not tensor.dim():
            return tensor
        if bite is not None:
            places = tensor.is_cuda and is_real(tensor) and bool((tensor == tensor.round()).all())
            # Whole numbers may be places in a table: on a GPU one outside of it ends the process.
            other = _most(tensor) if places else bite(tensor)
        elif is_real(tensor):
            other = other * 3 + 1
        stays = kept.to(tensor.device).view(-1, *[1] * (tensor.dim() - 1))
        return torch.where(stays, tensor, other.to(tensor.dtype))

    return Variant(kept, few.map_tensors(replace))


def _filled(value: float) -> Replace:
    """Floats all of this value; whole numbers of the least that occurs, which is a valid one."""
    return lambda tensor: torch.full_like(tensor, value) if is_real(tensor) else _least(tensor)


def _least(tensor: Tensor) -> Tensor:
    return (
        torch.zeros_like(tensor)
        if tensor.dtype == torch.bool or not tensor.numel()
        else tensor.amin().expand_as(tensor)
    )


def _most(tensor: Tensor) -> Tensor:
    if tensor.dtype == torch.bool or not tensor.numel():
        return torch.ones_like(tensor)
    return tensor.amax().expand_as(tensor)


def _times(factor: float) -> Replace:
    return lambda tensor: tensor * factor if is_real(tensor) else _most(tensor)


def _extreme(sign: int) -> Replace:
    def fill(tensor: Tensor) -> Tensor:
        return torch.full_like(tensor, sign * torch.finfo(tensor.dtype).max) if is_real(tensor) else _most(tensor)

    return fill


_BITES: tuple[tuple[Replace, bool], ...] = (
    *((_filled(0.0), False), (_times(1000.0), True), (_times(-1000.0), False), (_filled(float("nan")), True)),
    *((_filled(float("inf")), True), (_filled(float("-inf")), False), (_extreme(1), False), (_extreme(-1), False)),
    (_times(1e-6), False),
)
"""Rows that no record looks like, and whether one of them among ordinary ones is tried as well."""
