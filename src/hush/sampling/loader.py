"""Indices -> tensors: the only room that touches examples before the model does.

Which examples make up a batch is decided by the lot alone, since that is what was accounted. Whatever brings its own
order (a DataLoader, a sampler, a stream of examples) is refused by name.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

from hush.sampling.batches import Handed
from hush.sampling.lots import Lot

Collate = Callable[[list[Any]], Any]


class LoadedBatch(NamedTuple):
    """A batch of fixed shape; rows whose mask is False repeat another row and must not count."""

    data: Any
    mask: Tensor


class Loader:
    """Reads the batches of a lot from arrays, memory maps, or any map-style dataset.

    `data` is an array or tensor, a tuple, list or dict of them, or an object with __len__ and __getitem__ (then
    `collate` joins the examples of a batch, by default torch's own rule, and `workers` processes may do the reading).
    A batch has the structure of the data: tuple for tuple, dict for dict.

    Guarantee: every example of the lot is read once, and none other. DataLoader, samplers and iterable datasets are
    refused, because a different order is a different privacy guarantee.

    >>> loader = Loader((torch.arange(10.0), torch.arange(10)))
    >>> [y.tolist() for x, y in loader.batches(Lot(0, np.array([2, 3, 5])), 2)]
    [[2, 3], [5]]
    """

    def __init__(self, data: Any, *, collate: Collate | None = None, workers: int = 0) -> None:
        _refuse_foreign_order(data)
        if type(data) is TensorDataset and collate is None:
            data = data.tensors
        self._arrays = _arrays(data)
        if self._arrays is not None and (collate is not None or workers):
            raise ValueError("arrays are read by indexing; collate and workers are for datasets of single examples")
        self.examples = len(data) if self._arrays is None else len(leaves_of(self._arrays)[0])
        self._order = _GivenBatches()
        self._reader: DataLoader[Any] | None = None
        if self._arrays is None:
            self._reader = DataLoader(
                data,
                batch_sampler=self._order,
                collate_fn=collate,
                num_workers=workers,
                persistent_workers=workers > 0,
            )

    @property
    def in_memory(self) -> bool:
        """Whether the data is arrays (or memory maps) that are read by indexing."""
        return self._arrays is not None

    @property
    def arrays(self) -> Any:
        """The arrays behind the loader, in the structure of the data; None for a dataset."""
        return self._arrays

    def batches(self, lot: Lot, size: int) -> Iterator[Any]:
        """The lot's examples, at most `size` at a time; an empty lot has no batches."""
        indices = lot.split(size)
        return lot.hand_out(zip((Handed(len(index), size) for index in indices), self._read(indices), strict=True))

    def padded(self, lot: Lot, size: int) -> Iterator[LoadedBatch]:
        """The lot's examples in batches of exactly `size` rows with a mask, for code that wants fixed shapes."""
        indices = lot.split(size)
        full = (_pad(batch, len(index), size) for index, batch in zip(indices, self._read(indices), strict=True))
        alone = len(indices) == 1
        return lot.hand_out(
            (Handed(size, size, batch.mask, len(index), alone), batch)
            for index, batch in zip(indices, full, strict=True)
        )

    def _read(self, indices: Sequence[Tensor]) -> Iterator[Any]:
        if self._reader is None:
            return (map_leaves(partial(_rows, index), self._arrays) for index in indices)
        self._order.batches = [index.tolist() for index in indices]
        return iter(self._reader) if indices else iter(())


class _GivenBatches(Sampler[list[int]]):
    """Feeds the batches of the current lot to torch's reader."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def _refuse_foreign_order(data: Any) -> None:
    if isinstance(data, DataLoader):
        samplers = [data.sampler, data.batch_sampler, getattr(data.batch_sampler, "sampler", None)]
        names = dict.fromkeys(type(sampler).__name__ for sampler in samplers if sampler is not None)
        raise TypeError(
            f"expected the data itself, got a DataLoader that draws its batches with {', '.join(names)} "
            f"(batch_size={data.batch_size}, drop_last={data.drop_last}). Its order would not be the accounted one. "
            "Pass hush.Loader(dataloader.dataset, collate=dataloader.collate_fn, workers=...) and say how lots are "
            "drawn: PoissonLots, AllocatedLots, or ShuffledLots (what shuffle=True does)"
        )
    if isinstance(data, Sampler):
        raise TypeError(
            f"expected the data itself, got the sampler {type(data).__name__}; which examples make up a lot is "
            "decided by PoissonLots, AllocatedLots or ShuffledLots, whose law is accounted"
        )
    if isinstance(data, IterableDataset) or (hasattr(data, "__next__") and not hasattr(data, "__getitem__")):
        raise TypeError(
            f"expected data that can be read by index, got {type(data).__name__}, which chooses its own order; "
            "give an object with __len__ and __getitem__"
        )


def _arrays(data: Any) -> Any:
    """The data if it is arrays through and through, else None."""
    if _is_array(data):
        return data
    parts = list(data.values()) if isinstance(data, Mapping) else data if type(data) in (tuple, list) else []
    if not parts or not all(_is_array(part) for part in parts):
        if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")) or isinstance(data, Mapping):
            raise TypeError(
                f"expected arrays, or a dataset with __len__ and __getitem__ by position, got {type(data).__name__}"
            )
        return None
    lengths = {len(part) for part in parts}
    if len(lengths) > 1:
        raise ValueError(f"the arrays must have one row for each example, got lengths {sorted(lengths)}")
    return data


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray) and value.ndim > 0


def _rows(index: Tensor, array: Any) -> Tensor:
    if isinstance(array, Tensor):
        return array[index.to(array.device)]
    return torch.from_numpy(np.ascontiguousarray(array[index.numpy()]))


def _pad(batch: Any, rows: int, size: int) -> LoadedBatch:
    """Fill up by repeating the first row: a real row is valid input wherever zeros might not be."""
    for leaf in leaves_of(batch):
        if not isinstance(leaf, Tensor) or leaf.ndim == 0 or len(leaf) != rows:
            came = f"shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf).__name__
            raise TypeError(f"padding needs batches of tensors with {rows} rows each, got {came}; use batches(...)")
    if rows < size:
        order = torch.zeros(size, dtype=torch.int64)
        order[:rows] = torch.arange(rows)
        batch = map_leaves(lambda leaf: leaf[order.to(leaf.device)], batch)
    return LoadedBatch(batch, torch.arange(size) < rows)


def map_leaves(function: Callable[[Any], Any], data: Any) -> Any:
    """The same structure of dicts and tuples with the function applied to what they hold; lists become tuples."""
    if isinstance(data, Mapping):
        return {key: map_leaves(function, value) for key, value in data.items()}
    if isinstance(data, tuple | list):
        return tuple(map_leaves(function, value) for value in data)
    return function(data)


def leaves_of(data: Any) -> list[Any]:
    """What nested dicts, tuples and lists hold, in order."""
    found: list[Any] = []
    map_leaves(found.append, data)
    return found
