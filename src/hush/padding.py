"""Batches of fixed shape: rows that only fill up are masked, and a mask is a window of one strip, never built anew."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class PaddedBatch(NamedTuple):
    """A physical batch of fixed shape: where mask is False the row only fills up and must not count."""

    index: Tensor  # type: ignore[assignment]  # shadows tuple.index, which nobody needs here
    mask: Tensor


class Handed(NamedTuple):
    """A batch in the user's hands: how many rows it has, and which of them count (all, if there is no mask)."""

    rows: int
    size: int
    """The physical batch size that was asked for: public, unlike the rows of a last batch."""
    mask: Tensor | None = None
    filled: int | None = None
    """With a mask that only pads: how many rows count, the first ones."""


def first_rows(filled: int, size: int, device: torch.device | str = "cpu") -> Tensor:
    """The mask of the first `filled` of `size` rows; memory shared with other masks, so it must not be written.

    >>> first_rows(2, 3).tolist()
    [True, True, False]
    """
    return _strip(size, device)[size - filled : 2 * size - filled]


@lru_cache(maxsize=64)
def _strip(size: int, device: torch.device | str) -> Tensor:
    return (torch.arange(2 * size) < size).to(device)


def padded(index: Tensor, size: int) -> PaddedBatch:
    """The index filled up to `size` rows by example 0, masked."""
    full = np.zeros(size, np.int64)
    full[: len(index)] = index.numpy()
    return PaddedBatch(torch.from_numpy(full), first_rows(len(index), size).clone())
