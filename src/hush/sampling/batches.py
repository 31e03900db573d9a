"""Batches as tickets: which rows of a lot are computed together, each to be added once.

A mask is a window of one strip, never built anew.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class Batch:
    """A ticket for some examples of a lot: `private.add(batch)` uses it up, once, while its lot is open.

    `index` says which examples (int64, on the CPU), `mask` which rows count; `len` is the number of rows. In a padded
    batch rows that only fill up repeat a real one; they never count, whatever is done to the mask. All three are
    private: they must not be shown or decided upon.
    """

    def __init__(self, index: Tensor, size: int, *, filled: int | None = None, alone: bool = False) -> None:
        self.index = index
        self.size = size
        """The physical batch size that was asked for: public, unlike the rows of a last batch."""
        self.filled = filled
        """Of a padded batch: how many rows are no padding, the first ones."""
        self.alone = alone
        """Whether it is the only batch of its lot."""
        self.rows: Any = None
        """What a dataset gave for it, where that is read ahead."""

    def __len__(self) -> int:
        return len(self.index)

    @property
    def mask(self) -> Tensor:
        """True for rows that count; a copy, so that writing into it changes nothing."""
        return first_rows(len(self) if self.filled is None else self.filled, len(self)).clone()

    def counting(self, device: torch.device) -> Tensor | None:
        """The mask on this device, None where all rows count."""
        return None if self.filled is None else first_rows(self.filled, len(self), device)


def whole(pieces: Sequence[Tensor], size: int) -> list[Batch]:
    """The pieces of a lot as they are."""
    return [Batch(piece, size, alone=len(pieces) == 1) for piece in pieces]


def padded(pieces: Sequence[Tensor], size: int) -> list[Batch]:
    """The pieces of a lot filled up to `size` rows by their own first example, masked."""
    batches = []
    for piece in pieces:
        index = piece[:1].repeat(size)
        index[: len(piece)] = piece
        batches.append(Batch(index, size, filled=len(piece), alone=len(pieces) == 1))
    return batches


def first_rows(filled: int, size: int, device: torch.device | str = "cpu") -> Tensor:
    """The mask of the first `filled` of `size` rows; memory shared with other masks, so it must not be written.

    >>> first_rows(2, 3).tolist()
    [True, True, False]
    """
    return _strip(size, device)[size - filled : 2 * size - filled]


@lru_cache(maxsize=64)
def _strip(size: int, device: torch.device | str) -> Tensor:
    return torch.from_numpy(_host_strip(size)).to(device)


def _host_strip(size: int) -> npt.NDArray[np.bool_]:
    return np.arange(2 * size) < size
