"""Where data and weights come from: equal or overlapping rows, held-out rows of the training set, earlier releases."""

import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from hush.sampling.loader import Loader, leaves_of

_COMPARED = 8  # records that are read item by item
_MOST_BYTES = 1 << 31  # of data that is hashed row by row
_RELEASED: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
"""Models that a private run of this process has released into. It is only read to say so in a later run's statement."""


def released_before(model: nn.Module) -> bool:
    """Whether an earlier run of this process has trained the model."""
    return model in _RELEASED


def note_release(model: nn.Module) -> None:
    """From now on the model holds a private release."""
    _RELEASED.add(model)


def notes_on(model: nn.Module, loader: Loader | None) -> Iterator[str]:
    """What a statement must say of the weights and the data that a run begins with."""
    if released_before(model):
        yield "The initial weights come from an earlier private run of this process: its epsilon adds to this one's."
    if loader is None:
        return
    arrays = [array for array in map(torch.as_tensor, loader.tensors) if len(array) > 1]
    if any(_overlaps(array) for array in arrays):
        yield (
            "Rows of the data overlap in memory (sliding windows, say): one record lies in several rows, and a row "
            "alone is what is protected: for a record in k rows the guarantee is that of a group of k."
        )
    most = _largest_multiplicity(loader)
    if most > 1:
        words = "twice" if most == 2 else f"up to {1 << (most - 1).bit_length()} times"
        yield (
            f"Some rows of the data are equal ({words}): if they are one record that was repeated, its guarantee is "
            "that of a group of so many, not that of one record."
        )


def shares_rows(loader: Loader, held_out: Loader) -> bool:
    """Whether held-out data has rows of the training data, as far as that can be told."""
    if _base(loader.data) is _base(held_out.data) and not isinstance(_base(loader.data), tuple | list | dict):
        return not _disjoint(loader.data, held_out.data)
    ours, theirs = _row_hashes(loader), _row_hashes(held_out)
    if ours is None or theirs is None:
        return _begin_alike(loader, held_out)
    return bool(np.isin(theirs, ours).any())


def _begin_alike(one: Loader, other: Loader) -> bool:
    """Whether the first records agree: the same data set made twice does, also where it is read item by item."""
    for place in range(min(_COMPARED, len(one), len(other))):
        ours, theirs = (leaves_of(loader.rows(torch.tensor([place]))) for loader in (one, other))
        if len(ours) != len(theirs):
            return False
        for a, b in zip(ours, theirs, strict=True):
            if isinstance(a, Tensor) and isinstance(b, Tensor) and not torch.equal(a.cpu(), b.cpu()):
                return False
    return True


def _overlaps(array: Tensor) -> bool:
    """Whether neighbouring rows share memory."""
    if array.layout != torch.strided or array.ndim < 2 or not array[0].numel():
        return False
    reach = sum((size - 1) * stride for size, stride in zip(array.shape[1:], array.stride()[1:], strict=True)) + 1
    return 0 < abs(array.stride()[0]) < reach and min(array.stride()[1:]) <= array.stride()[0] < reach


def _row_hashes(loader: Loader) -> npt.NDArray[np.uint64] | None:
    """A number for each row, of all its parts together; None where the data is not in memory, or too much."""
    leaves = [torch.as_tensor(array).detach() for array in loader.tensors]
    if not leaves or sum(leaf.numel() * leaf.element_size() for leaf in leaves) > _MOST_BYTES:
        return None
    total = np.zeros(len(leaves[0]), np.uint64)
    generator = np.random.default_rng(0)
    for leaf in leaves:
        rows = leaf.cpu().contiguous().flatten(1) if leaf.ndim > 1 else leaf.cpu().contiguous()[:, None]
        rows = torch.view_as_real(rows).flatten(1) if rows.is_complex() else rows
        words = rows.contiguous().view(torch.uint8).numpy()
        weights = generator.integers(1, 1 << 63, words.shape[1], dtype=np.uint64) | np.uint64(1)
        for start in range(0, len(words), 4096):
            part = words[start : start + 4096].astype(np.uint64)
            total[start : start + 4096] += (part * weights).sum(1, dtype=np.uint64)
        total *= np.uint64(0x9E3779B97F4A7C15)
    return total


def _largest_multiplicity(loader: Loader) -> int:
    hashes = _row_hashes(loader)
    return 1 if hashes is None or not len(hashes) else int(np.unique(hashes, return_counts=True)[1].max())


def _base(data: Any) -> Any:
    while isinstance(data, Subset):
        data = data.dataset
    return data


def _disjoint(one: Any, other: Any) -> bool:
    """Whether two parts of one dataset have no record in common."""
    if not (isinstance(one, Subset) and isinstance(other, Subset) and one.dataset is other.dataset):
        return False
    return not set(one.indices) & set(other.indices)
