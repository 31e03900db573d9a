"""The way from a record to a row: `__getitem__` and `collate` are given other company, and must not notice."""

import copy
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hush.errors import MixedExamples
from hush.sampling.loader import Loader, leaves_of

_ROWS = 6
_MOST_BYTES = 1 << 28  # of a dataset's own arrays, which are copied once


def check_reading(loader: Loader) -> None:
    """Refuse a `collate` that mixes the items it joins, and a dataset whose item reads other records."""
    if loader.in_memory or len(loader) < 2:
        return
    count = min(_ROWS, len(loader))
    state = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        items, last = [_item(loader.data, i) for i in range(count)], _item(loader.data, len(loader) - 1)
        _check_items(loader.data, count, items)
        usual = _seeded(lambda: loader.collate(list(items)))
        for others in ([1], list(range(1, count, 2))):
            changed = [last if i in others else item for i, item in enumerate(items)]
            kept = [i for i in range(count) if i not in others]
            if not _same_rows(usual, _seeded(lambda changed=changed: loader.collate(list(changed))), kept):
                raise MixedExamples(
                    "collate mixes examples: a row changes when other items of the batch are replaced. In private "
                    "training a row holds one record: no mixup or cutmix, no centring over the batch. Do such things "
                    "with the record alone, in __getitem__ or in losses_of"
                )
    finally:
        torch.set_rng_state(state[0])
        np.random.set_state(state[1])  # noqa: NPY002
        random.setstate(state[2])


def _check_items(data: Any, count: int, items: list[Any]) -> None:
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
        if not _equal(items[place], _item(other, place)):
            raise MixedExamples(
                f"item {place} of the dataset changes when other records are moved: __getitem__(i) must read record i "
                "alone. What it adds from others (mixup, neighbours, pairs) enters more than one row"
            )


def _item(data: Any, place: int) -> Any:
    return _seeded(lambda: data[place])


def _seeded(function: Any) -> Any:
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    random.seed(0)
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
