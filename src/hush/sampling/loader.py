"""Indices -> tensors: the only room that touches examples before the model does.

Which examples make up a batch is decided by the lot alone, since that is what was accounted. Whatever brings its own
order (a DataLoader, a sampler, a stream of examples) is refused by name.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset, default_collate

from hush.sampling.batches import Batch

Collate = Callable[[list[Any]], Any]


class Loader:
    """Reads examples by their numbers, from arrays, memory maps, or any map-style dataset.

    `data` is an array or tensor, a tuple, list or dict of them, or an object with __len__ and __getitem__ (then
    `collate` joins the examples of a batch, by default torch's own rule, and `workers` processes read ahead). A batch
    has the structure of the data: a tuple's parts are the arguments of losses_of, a dict's its keywords. `name` is what
    a report calls the data; `fingerprint` what a ledger knows it by, where that is not the data as it is read here.

    Guarantee: every example of a lot is read once, and none other. DataLoader, samplers and iterable datasets are
    refused, because a different order is a different privacy guarantee.

    >>> Loader((torch.arange(10.0), torch.arange(10))).rows(torch.tensor([2, 3]))
    (tensor([2., 3.]), tensor([2, 3]))
    """

    def __init__(
        self,
        data: Any,
        *,
        collate: Collate | None = None,
        workers: int = 0,
        name: str = "the training set",
        fingerprint: Any = None,
    ) -> None:
        _refuse_foreign_order(data)
        if not isinstance(name, str) or not 0 < len(name) <= 10_000:
            raise ValueError(f"name must be text of 1 to 10,000 characters, got {type(name).__name__}")
        if isinstance(workers, bool) or not isinstance(workers, int) or workers < 0:
            raise ValueError(f"workers must be a whole number >= 0, got {workers!r}")
        if type(data) is TensorDataset and collate is None:
            data = data.tensors
        self.name = name
        self.data = data
        self.fingerprint = fingerprint
        self._arrays = _arrays(data)
        if self._arrays is not None and collate is not None:
            raise ValueError("arrays are read by indexing; collate is for datasets of single examples")
        self.examples = len(data) if self._arrays is None else len(leaves_of(self._arrays)[0])
        self.collate: Collate = collate or default_collate
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

    @classmethod
    def of(cls, data: Any) -> "Loader":
        """The data as a loader, if it is none already."""
        return data if isinstance(data, Loader) else cls(data)

    def __len__(self) -> int:
        return self.examples

    @property
    def in_memory(self) -> bool:
        """Whether the data is arrays (or memory maps) that are read by indexing."""
        return self._arrays is not None

    @property
    def tensors(self) -> list[Any]:
        """The arrays behind it; none where items are read one by one."""
        return [] if self._arrays is None else leaves_of(self._arrays)

    def rows(self, index: Tensor) -> Any:
        """The examples of these numbers as one batch."""
        if self._arrays is not None:
            return map_leaves(partial(_rows, index), self._arrays)
        return self.collate([self.data[i] for i in index.tolist()])

    def of_batch(self, batch: Batch) -> Any:
        """The rows of a batch, those that only fill up included."""
        if self._arrays is not None:
            return self.rows(batch.index)
        filled = len(batch) if batch.filled is None else batch.filled
        rows = self.rows(batch.index[:filled]) if batch.rows is None else batch.rows
        return rows if filled == len(batch) else _pad(rows, filled, len(batch))

    def ahead(self, pieces: Sequence[Tensor]) -> Iterator[Any]:
        """What the batches of a lot hold, in their order, read ahead by the workers; None where nothing is."""
        if self._reader is None:
            return repeat(None)
        self._order.batches = [index.tolist() for index in pieces]
        return iter(self._reader)

    def parts(self, size: int, *, most: int | None = None) -> Iterator[Any]:
        """All examples (or the first so many) in their own order, at most `size` at a time; for measurements."""
        index = torch.arange(self.examples if most is None else min(most, self.examples))
        return (self.rows(part) for part in index.split(size) if len(part))


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
        _refuse_columns(data)
        if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
            raise TypeError(
                f"expected arrays, or a dataset with __len__ and __getitem__ by position, got {type(data).__name__}"
            )
        return None
    lengths = {len(part) for part in parts}
    if len(lengths) > 1:
        raise ValueError(f"the arrays must have one row for each example, got lengths {sorted(lengths)}")
    return data


def _refuse_columns(data: Any) -> None:
    """A table that is no arrays of numbers, by its column: a dict, a data frame, a tuple with an array of text."""
    table = isinstance(data, Mapping) or hasattr(data, "columns")
    if not table and not (type(data) is tuple and any(isinstance(part, np.ndarray) for part in data)):
        return
    columns = data.items() if table else enumerate(data)
    wrong = [
        f"{name!r} is an array of {part.dtype}" if isinstance(part, np.ndarray) else f"{name!r} is a {_name(part)}"
        for name, part in columns
        if not _is_array(part)
    ]
    raise TypeError(
        f"expected tensors or arrays of numbers with one row for each example, got {_name(data)} where "
        f"{', '.join(wrong[:3]) or 'there is no column'}; give {{name: numpy.asarray(column)}}, and text as numbers"
    )


def _name(value: Any) -> str:
    return type(value).__name__


def _is_array(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim > 0 and value.dtype.kind in "biufc"  # text and objects are no numbers
    return isinstance(value, Tensor) and value.ndim > 0


def _rows(index: Tensor, array: Any) -> Tensor:
    if isinstance(array, Tensor):
        return array[index.to(array.device)]
    return torch.from_numpy(np.ascontiguousarray(array[index.numpy()]))


def _pad(batch: Any, rows: int, size: int) -> Any:
    """Fill up by repeating the first row: a real row is valid input wherever zeros might not be."""
    order = torch.zeros(size, dtype=torch.int64)
    order[:rows] = torch.arange(rows)

    def fill(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.ndim == 0 or len(leaf) != rows:
            came = f"shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf).__name__
            raise TypeError(
                f"padding needs batches of tensors with one row for each example, got {came}; take the batches of "
                "lot.batches(size, pad=False)"
            )
        return leaf[order.to(leaf.device)]

    return map_leaves(fill, batch)


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


def on_device(rows: Any, device: torch.device) -> Any:
    """The same with its tensors on the device; copies run beside other work where they can."""
    return map_leaves(lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf, rows)
