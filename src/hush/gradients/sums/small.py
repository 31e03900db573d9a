"""Small stored gradients (biases, affine parts of norm layers) side by side in one matrix: one norm, one sum for all.

A network has a few of them for each layer, and each would cost several operations of its own on a few numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hush.gradients.sums.per_example import Contribution, Stored, Weights, wide

_SMALL = 4096
"""Numbers of one example that count as small."""
_WIDEST = 8192
"""Numbers of one example in one matrix: norms are summed along it, and the bound on rounding grows with its width."""
_FEWEST = 3
"""So many are worth a copy into one matrix."""
_PART = 128
"""Rows that one thread of a GPU adds up where there are few sums: they would leave most of it idle."""
_MANY = 1 << 15
"""So many sums keep it busy; then the compiler takes each along with what writes its rows."""


@dataclass(frozen=True)
class Parts(Contribution):
    """Stored gradients as sums over parts of the rows, not added up yet: that is done for all of a bundle at once."""

    values: Tensor
    """[batch, parts, *shape], in fp32 or wider."""

    @cached_property
    def _added(self) -> Stored:
        return Stored(self.values.sum(1))

    def additions(self, batch: int) -> float:
        return self._added.additions(batch)

    def squared_norms(self) -> Tensor:
        return self._added.squared_norms()

    def weighted_sum(self, weights: Weights) -> Tensor:
        return self._added.weighted_sum(weights)

    def per_example(self) -> Tensor:
        return self._added.values


def added_up(rows: Tensor) -> Contribution:
    """Per-example sums of [batch, T, *shape] over the rows, in fp32 or wider; on a GPU long ones in parts."""
    if rows.shape[1] == 1:
        return Stored(wide(rows[:, 0]))
    kind = wide(rows[:0]).dtype
    if _in_parts(rows):
        return Parts(rows.unflatten(1, (-1, _PART)).sum(2, dtype=kind))
    return Stored(rows.sum(1, dtype=kind))


def _in_parts(rows: Tensor) -> bool:
    few = rows[:, :1].numel() < _MANY and rows.shape[1] > _PART
    return few and rows.is_cuda and rows.shape[1] % _PART == 0


@dataclass(frozen=True)
class Bundle:
    """What the examples add to one parameter, or to several small ones."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    contribution: Contribution

    @property
    def shape(self) -> tuple[int, ...]:
        return self.shapes[0] if len(self.names) == 1 else (sum(map(_size, self.shapes)),)

    def sums(self, weights: Weights) -> dict[str, Tensor]:
        """The weighted sum for each name, in the shape of the parameter."""
        total = self.contribution.weighted_sum(weights)
        if len(self.names) == 1:
            return {self.names[0]: total}
        pieces = total.split([_size(shape) for shape in self.shapes])
        return {name: piece.reshape(shape) for name, piece, shape in zip(self.names, pieces, self.shapes, strict=True)}


def bundled(found: Mapping[str, Contribution], shapes: Mapping[str, tuple[int, ...]]) -> list[Bundle]:
    """All contributions, the small stored ones together where there are several."""
    waiting: dict[object, list[str]] = {}
    widths: dict[object, int] = {}
    bundles: list[Bundle] = []
    for name, part in found.items():
        size = _size(shapes[name])
        if size <= _SMALL and (isinstance(part, Parts) or (isinstance(part, Stored) and part.known is None)):
            kind = part.values.dtype, part.values.shape[1] if isinstance(part, Parts) else None
            names = waiting.setdefault(kind, [])
            if widths.get(kind, 0) + size > _WIDEST:
                bundles += _together(names, found, shapes)
                names.clear()
                widths[kind] = 0
            names.append(name)
            widths[kind] = widths.get(kind, 0) + size
        else:
            bundles.append(Bundle((name,), (shapes[name],), part))
    for names in waiting.values():
        bundles += _together(names, found, shapes)
    return bundles


def _together(
    names: Sequence[str], found: Mapping[str, Contribution], shapes: Mapping[str, tuple[int, ...]]
) -> list[Bundle]:
    if len(names) < _FEWEST:
        return [Bundle((name,), (shapes[name],), found[name]) for name in names]
    parts = [part for part in map(found.get, names) if isinstance(part, Stored | Parts)]
    if isinstance(parts[0], Parts):
        values = torch.cat([part.values.flatten(2) for part in parts], 2).sum(1)
    else:
        values = torch.cat([part.values.reshape(len(part.values), -1) for part in parts], 1)
    return [Bundle(tuple(names), tuple(shapes[name] for name in names), Stored(values))]


def _size(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
