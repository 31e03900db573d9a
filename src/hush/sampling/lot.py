"""One lot: its batches are tickets, each handed out once and used once."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from hush.sampling.batches import Batch, padded, whole
from hush.sampling.draws import Indices


class Reader(Protocol):
    """Reads what a lot's batches hold, in their order; it may read ahead."""

    def ahead(self, pieces: Sequence[torch.Tensor]) -> Iterator[Any]: ...


class Lot:
    """The examples of one step. Its indices and its size are private: they must not be shown or decided upon.

    Guarantee: `batches` hands out a ticket for each example once; asking again raises, since an example that is used
    twice in a step would move it by 2C. `take` uses a ticket up, and refuses those of other lots.
    """

    def __init__(self, step: int, indices: Indices) -> None:
        self.step = step
        self.indices = indices
        self._reader: Reader | None = None
        self._pad = False
        self._waiting: dict[Batch, None] | None = None

    def read_with(self, reader: Reader | None, *, pad: bool) -> None:
        """Who reads its rows ahead, and whether its batches are padded by default."""
        self._reader, self._pad = reader, pad

    def batches(self, size: int, *, pad: bool | None = None) -> Iterator[Batch]:
        """Tickets for all examples of the lot, at most `size` in each; an empty lot has none.

        What is left after full batches comes as up to two smaller ones, so that few different shapes occur in a run.
        Padded batches have exactly `size` rows; by default that is so where the machine captures the step, which
        wants fixed shapes. A lot that is larger than expected spills into one more batch; nothing is ever cut off.
        """
        if self._waiting is not None:
            raise RuntimeError(
                f"the batches of lot {self.step} were already handed out; an example may be used once in a step. "
                "Keep the batches of the first call, or call private.restart() to begin this lot again"
            )
        pad = self._pad if pad is None else pad
        pieces = self._cut(size) if pad else self._pieces(size)
        batches = padded(pieces, size) if pad else whole(pieces, size)
        self._waiting = dict.fromkeys(batches)
        return self._hand_out(batches, pieces)

    def take(self, batch: Batch) -> None:
        """Use a ticket up."""
        if not isinstance(batch, Batch):
            raise TypeError(
                f"expected a batch of lot.batches(size), got {type(batch).__name__}: `for batch in lot.batches(size): "
                "private.add(batch, ...)`"
            )
        if self._waiting is None or batch not in self._waiting:
            raise RuntimeError(
                f"this batch is no unused ticket of lot {self.step}: each batch of lot.batches(size) is added once, "
                "while its lot is open. A second time would count its examples twice; add several losses of an "
                "example up in losses_of instead"
            )
        del self._waiting[batch]

    def give_back(self, batch: Batch) -> None:
        """Nothing was added for this ticket after all."""
        assert self._waiting is not None
        self._waiting[batch] = None

    def must_be_used_up(self) -> None:
        """Refuse a lot some of whose examples were not added."""
        if self._waiting if self._waiting is not None else len(self.indices):
            raise RuntimeError(
                f"lot {self.step} has batches that were not added: one that is dropped because of what is in it takes "
                "its other examples along. Add each batch of lot.batches(size) (an example whose gradient is not "
                "finite counts as zero), say private.skip(batch) where it was meant, or give the lot up with "
                "private.restart() or private.abandon()"
            )

    def _restart(self) -> None:
        """Let all tickets be handed out again; only right when nothing of them is kept (see Private.restart)."""
        self._waiting = None

    def _hand_out(self, batches: list[Batch], pieces: list[torch.Tensor]) -> Iterator[Batch]:
        rows = None if self._reader is None or not batches else self._reader.ahead(pieces)
        for batch in batches:
            batch.rows = None if rows is None else next(rows)
            yield batch
            batch.rows = None

    def _cut(self, size: int) -> list[torch.Tensor]:
        """The indices, `size` at a time."""
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"a physical batch holds a whole number of examples >= 1, got {size!r}")
        return list(torch.from_numpy(self.indices).split(size)) if len(self.indices) else []

    def _pieces(self, size: int) -> list[torch.Tensor]:
        """The same with the last batch cut at a multiple of sqrt(size): then it has few sizes, not up to `size`."""
        pieces = self._cut(size)
        unit = math.isqrt(size - 1) + 1
        if pieces and len(pieces[-1]) < size and len(pieces[-1]) % unit and len(pieces[-1]) > unit:
            rest = pieces.pop()
            pieces += torch.split(rest, len(rest) // unit * unit)
        return pieces
