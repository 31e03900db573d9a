"""The way from a record to a row: `__getitem__` and `collate` are given other company, and must not notice."""

import copy
import random
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from hush.checks.passes import seed_all
from hush.errors import MixedExamples
from hush.sampling.loader import Loader, leaves_of

_ROWS = 6
_SEEDS = 24  # mixing with probability 0.1 is missed by 8 % of the checks
_MOST_BYTES = 1 << 28  # of a dataset's own arrays, which are copied once


def check_reading(loader: Loader) -> None:
    """Refuse a `collate` that mixes the items it joins, and a dataset whose item reads other records."""
    if loader.in_memory or len(loader) < 2:
        return
    count = min(_ROWS, len(loader))
    state = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        items, last = [_item(loader.data, i) for i in range(count)], _item(loader.data, len(loader) - 1)
        for data in (loader.data, *_inner(loader.data)):
            if hasattr(data, "__len__") and len(data) > 1:
                _check_items(data, min(_ROWS, len(data)))
                _check_reads(data)
        for seed, others in product(range(_SEEDS), ([1], list(range(1, count, 2)))):
            changed = [last if i in others else item for i, item in enumerate(items)]
            kept = [i for i in range(count) if i not in others]
            usual, found = (_seeded(lambda some=some: loader.collate(list(some)), seed) for some in (items, changed))
            if not _same_rows(usual, found, kept):
                raise MixedExamples(
                    "collate mixes examples: a row changes when other items of the batch are replaced. In private "
                    "training a row holds one record: no mixup or cutmix, no centring over the batch. Do such things "
                    "with the record alone, in __getitem__ or in losses_of"
                )
    finally:
        torch.set_rng_state(state[0])
        np.random.set_state(state[1])  # noqa: NPY002
        random.setstate(state[2])


def _check_items(data: Any, count: int) -> None:
    """Item i with all other records of the dataset's own arrays in other places."""
    arrays = {
        name: value
        for name, value in getattr(data, "__dict__", {}).items()
        if isinstance(value, Tensor | np.ndarray | list) and len(value) == len(data)
    }
    size = sum(value.nbytes for value in arrays.values() if not isinstance(value, list))
    if not arrays or size > _MOST_BYTES:
        return
    for place in (0, count - 1):
        other = copy.copy(data)
        order = list(range(len(data)))[::-1]
        order[len(data) - 1 - place], order[place] = order[place], place
        for name, value in arrays.items():
            setattr(other, name, [value[i] for i in order] if isinstance(value, list) else value[order])
        if any(not _equal(_item(data, place, seed), _item(other, place, seed)) for seed in range(_SEEDS)):
            raise MixedExamples(
                f"item {place} of the dataset changes when other records are moved: __getitem__(i) must read record i "
                "alone. What it adds from others (mixup, neighbours, pairs) enters more than one row"
            )


def _inner(data: Any, depth: int = 0) -> Iterator[Any]:
    """The data sets behind a data set: those that it holds as attributes."""
    for value in list(getattr(data, "__dict__", {}).values()):
        if isinstance(value, Dataset) and not isinstance(value, IterableDataset) and depth < 4:
            yield value
            yield from _inner(value, depth + 1)


def _check_reads(data: Any) -> None:
    """Which records of the data sets that it holds an item reads: none that another item reads, under any seed."""
    for name, inner in list(getattr(data, "__dict__", {}).items()):
        if not isinstance(inner, Dataset) or isinstance(inner, IterableDataset):
            continue
        read: list[Any] = []
        outer = copy.copy(data)
        outer.__dict__[name] = _noting(inner, read)
        if any(_reads_another(outer, place, read) for place in (0, len(data) - 1)):
            raise MixedExamples(
                f"an item of {type(data).__name__} reads a record that another item reads too: __getitem__(i) must "
                "read record i alone. What it adds from others (mixup, neighbours, pairs) enters more than one row"
            )


def _reads_another(data: Any, place: int, read: list[Any]) -> bool:
    """Whether item `place` reads a record that the item of that record's own number reads always."""
    found = set()
    for seed in range(_SEEDS):
        read.clear()
        _item(data, place, seed)
        found |= {number for number in read if isinstance(number, int | np.integer)}
    for other in sorted(found - {place})[:_SEEDS]:
        if not 0 <= other < len(data):
            continue
        read.clear()
        _item(data, int(other))
        if other in read:
            return True
    return False


def _noting(data: Any, read: list[Any]) -> Any:
    """The same data set, noting which of its items are read."""
    kind = type(data)

    def get(self: Any, number: Any) -> Any:
        read.append(number)
        return kind.__getitem__(self, number)

    def get_several(self: Any, numbers: Any) -> Any:
        read.extend(numbers)
        return kind.__getitems__(self, numbers)

    extra = {"__getitem__": get} | ({"__getitems__": get_several} if hasattr(kind, "__getitems__") else {})
    noting = copy.copy(data)
    noting.__class__ = type(kind.__name__, (kind,), extra)
    return noting


def _item(data: Any, place: int, seed: int = 0) -> Any:
    return _seeded(lambda: data[place], seed)


def _seeded(function: Any, seed: int) -> Any:
    seed_all(seed)
    return function()


def _same_rows(one: Any, other: Any, rows: list[int]) -> bool:
    """Whether these rows of all tensors agree, but for padding at either end where the shapes differ."""
    pairs = zip(leaves_of(one), leaves_of(other), strict=False)
    return all(
        any(_equal(a[rows], b[rows]) for a, b in _common(first, second))
        for first, second in pairs
        if isinstance(first, Tensor) and isinstance(second, Tensor) and first.ndim and len(first) == len(second)
    )


def _common(one: Tensor, other: Tensor) -> list[tuple[Tensor, Tensor]]:
    if one.shape == other.shape:
        return [(one, other)]
    if one.ndim != other.ndim:
        return []
    sizes = [min(a, b) for a, b in zip(one.shape, other.shape, strict=True)]
    front = tuple(slice(0, size) for size in sizes)
    backs = [tuple(slice(full - size, full) for full, size in zip(t.shape, sizes, strict=True)) for t in (one, other)]
    return [(one[front], other[front]), (one[backs[0]], other[backs[1]])]


def _equal(one: Any, other: Any) -> bool:
    """Bit for bit, NaN equal to NaN, at any depth."""
    ours, theirs = leaves_of(one), leaves_of(other)
    if len(ours) != len(theirs):
        return False
    for a, b in zip(ours, theirs, strict=True):
        if isinstance(a, Tensor | np.ndarray) and isinstance(b, Tensor | np.ndarray):
            a, b = torch.as_tensor(a), torch.as_tensor(b)
            same = a.shape == b.shape and torch.equal(a.nan_to_num(7e7) if a.is_floating_point() else a,
                                                      b.nan_to_num(7e7) if b.is_floating_point() else b)  # fmt: skip
        else:
            same = a is b or a == b or repr(a) == repr(b)
        if not same:
            return False
    return True
