"""Batches of fixed shape: rows that only fill up are masked, and a mask is a window of one strip, never built anew."""

from collections.abc import Sequence
from functools import lru_cache, reduce
from operator import and_
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
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
    """What the user was given as the mask of a padded batch."""
    filled: int | None = None
    """Of a padded batch: how many rows are no padding, the first ones."""
    alone: bool = False
    """Whether it is the only batch of its lot."""
    wanted: Tensor | None = None
    """A mask that the user gave back, for rows that shall count."""

    @property
    def untouched(self) -> bool:
        """Whether all rows count but the padding: the user gave no mask, or the one that was handed out."""
        return (self.wanted is None or self.wanted is self.mask) and (self.mask is None or self.mask._version == 0)


def rows_that_count(handed: Handed, device: torch.device) -> Tensor | None:
    """The mask of a batch, on this device, None where all rows count: padding never does, whatever the user says."""
    masks = [] if handed.untouched else [one.to(device) for one in (handed.wanted, handed.mask) if one is not None]
    if handed.filled is not None:
        masks.append(first_rows(handed.filled, handed.size, device))
    return reduce(and_, masks) if masks else None


def first_rows(filled: int, size: int, device: torch.device | str = "cpu") -> Tensor:
    """The mask of the first `filled` of `size` rows; memory shared with other masks, so it must not be written.

    >>> first_rows(2, 3).tolist()
    [True, True, False]
    """
    return _strip(size, device)[size - filled : 2 * size - filled]


@lru_cache(maxsize=64)
def _strip(size: int, device: torch.device | str) -> Tensor:
    return torch.from_numpy(_host_strip(size)).to(device)


@lru_cache(maxsize=64)
def _host_strip(size: int) -> npt.NDArray[np.bool_]:
    return np.arange(2 * size) < size


def padded(pieces: Sequence[npt.NDArray[np.int64]], size: int) -> list[tuple[Handed, PaddedBatch]]:
    """The pieces of a lot filled up to `size` rows by example 0, masked."""
    batches, alone = [], len(pieces) == 1
    for piece in pieces:
        filled = len(piece)
        index = np.zeros(size, np.int64)
        index[:filled] = piece
        mask = torch.from_numpy(_host_strip(size)[size - filled : 2 * size - filled].copy())  # the user may write here
        batches.append((Handed(size, size, mask, filled, alone), PaddedBatch(torch.from_numpy(index), mask)))
    return batches
