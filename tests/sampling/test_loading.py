"""Indices become batches of the data's own structure; whatever brings its own order is refused by name."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from hush.sampling.loader import Loader
from hush.sampling.lot import Lot

X, Y = torch.arange(40.0).view(20, 2), torch.arange(20)
INDICES = np.array([1, 4, 5, 11, 19])


class Words(Dataset[dict[str, object]]):
    """A dataset of dicts with sequences of different lengths, so that the collate function matters."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: int) -> dict[str, object]:
        return {"tokens": torch.full((1 + i % 3,), i), "label": i}


def pad_words(examples: list[dict[str, object]]) -> dict[str, torch.Tensor]:
    tokens = torch.nn.utils.rnn.pad_sequence([e["tokens"] for e in examples], batch_first=True)  # type: ignore[misc]
    return {"tokens": tokens, "label": torch.tensor([e["label"] for e in examples])}


class Squares(Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return X[i], i


def memory_map(folder: Path) -> np.ndarray:
    path = folder / "x.npy"
    np.save(path, X.numpy())
    return np.load(path, mmap_mode="r")


def loaded(loader: Loader, indices: np.ndarray, size: int, *, pad: bool = False) -> list[object]:
    """What the batches of a lot hold."""
    lot = Lot(0, indices)
    lot.read_with(loader, pad=pad)
    return [loader.of_batch(batch) for batch in lot.batches(size)]


def test_tuples_dicts_and_single_arrays_keep_their_structure(tmp_path: Path) -> None:
    for x in (X, X.numpy(), memory_map(tmp_path)):
        batches = loaded(Loader((x, Y.numpy())), INDICES, 2)
        assert [len(b[0]) for b in batches] == [2, 2, 1]
        assert torch.equal(torch.cat([b[0] for b in batches]), X[INDICES])
        assert torch.equal(torch.cat([b[1] for b in batches]), Y[INDICES])
    (batch,) = loaded(Loader({"x": X, "y": Y}), INDICES, 5)
    assert torch.equal(batch["x"], X[INDICES]) and torch.equal(batch["y"], Y[INDICES])
    (alone,) = loaded(Loader(X), INDICES, 5)
    assert torch.equal(alone, X[INDICES])
    (pair,) = loaded(Loader(TensorDataset(X, Y), workers=2), INDICES, 5)
    assert torch.equal(pair[1], Y[INDICES])


@pytest.mark.parametrize("workers", [0, 2])
def test_datasets_are_collated_in_the_order_of_the_lot(workers: int) -> None:
    loader = Loader(Words(), collate=pad_words, workers=workers)
    for step in range(3):  # the same processes serve one lot after another
        seen = loaded(loader, INDICES + step - 1, 2)
        assert torch.cat([b["label"] for b in seen]).tolist() == (INDICES + step - 1).tolist()
    assert loaded(loader, INDICES[:0], 2) == []
    lot = Lot(4, INDICES)
    lot.read_with(loader, pad=False)
    for batch in lot.batches(2):  # a loop left early leaves nothing behind for the next lot
        assert loader.of_batch(batch)["label"].tolist() == [1, 4]
        break
    assert [b["label"].tolist() for b in loaded(loader, INDICES[2:], 3)] == [[5, 11, 19]]
    lot = Lot(5, INDICES)
    lot.read_with(loader, pad=False)
    kept = list(lot.batches(2))  # what was read ahead is gone by now, and read again
    assert [loader.of_batch(batch)["label"].tolist() for batch in kept] == [[1, 4], [5, 11], [19]]


def test_padding_has_fixed_shape_and_repeats_a_real_row() -> None:
    for loader in (Loader((X, Y)), Loader(Squares())):
        seen = loaded(loader, INDICES, 4, pad=True)
        assert all(x.shape == (4, 2) for x, _ in seen)
        assert torch.cat([y for _, y in seen]).tolist() == [1, 4, 5, 11, 19, 19, 19, 19]
        assert loaded(loader, INDICES[:0], 4, pad=True) == []
    words = Loader([{"text": "a"}, {"text": "b"}])
    with pytest.raises(TypeError, match="padding needs batches of tensors with one row for each example, got str"):
        loaded(words, np.array([0, 1]), 4, pad=True)


DATA = TensorDataset(X, Y)


@pytest.mark.parametrize(
    ("loader", "named"),
    [
        (DataLoader(DATA, batch_size=4, shuffle=True), "RandomSampler"),
        (DataLoader(DATA, batch_size=4), "BatchSampler"),
        (DataLoader(DATA, batch_size=4, drop_last=True), "drop_last=True"),
        (DataLoader(DATA, sampler=WeightedRandomSampler([1.0] * 20, 20)), "WeightedRandomSampler"),
        (DataLoader(DATA, sampler=SubsetRandomSampler([1, 2])), "SubsetRandomSampler"),
        (DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 4, True)), "RandomSampler"),
        (DataLoader(DATA, batch_size=None), "Sampler"),
    ],
)
def test_hazard_04_foreign_samplers_are_refused_by_name(loader: DataLoader, named: str) -> None:
    with pytest.raises(TypeError, match=named) as error:
        Loader(loader)
    assert "ShuffledLots" in str(error.value) and "dataloader.dataset" in str(error.value)


def test_hazard_04_samplers_and_streams_are_refused_by_name() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    with pytest.raises(TypeError, match="SequentialSampler"):
        Loader(SequentialSampler(DATA))
    with pytest.raises(TypeError, match="Stream, which chooses its own order"):
        Loader(Stream())
    with pytest.raises(TypeError, match="generator"):
        Loader(x for x in range(3))
    with pytest.raises(TypeError, match="got set"):
        Loader({1, 2})
    with pytest.raises(ValueError, match=r"lengths \[3, 20\]"):
        Loader((X, Y[:3]))
    with pytest.raises(ValueError, match="collate is for datasets of single examples"):
        Loader(X, collate=pad_words)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"x": torch.zeros(3), "y": [1, 2, 3]}, "'y' is a list"),
        ({"x": torch.zeros(3), "city": np.array(["a", "b", "c"])}, "'city' is an array of <U1"),
        ((torch.zeros(3), np.array([None] * 3)), "1 is an array of object"),
        ({}, "there is no column"),
    ],
)
def test_a_column_that_holds_no_numbers_is_named(data: object, said: str) -> None:
    with pytest.raises(TypeError, match=re.escape(said)):
        Loader(data)


def test_a_data_frame_is_refused_with_the_remedy() -> None:
    class Frame(dict):  # as much of one as matters: columns, a length, items by name
        columns = ("age",)

    with pytest.raises(TypeError, match=r"numpy\.asarray\(column\)"):
        Loader(Frame(age=range(3)))
