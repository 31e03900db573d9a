"""The batches of a lot, as large as the device can hold: a size that does not fit is halved and the lot begun again."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hush.fitting.evaluation import on_device
from hush.loading import Loader
from hush.lots import Lot, Lots
from hush.private import Private

_MOST = {"cuda": 8192}
_MOST_ELSEWHERE = 1024


def first_size(lots: Lots, device: torch.device) -> int:
    """A size to begin with: nearly every lot fills few batches, each up to what is usual for the device.

    Public numbers only. Three standard deviations of room; a lot that is larger spills into one more batch.
    """
    usual = min(lots.examples, lots.expected_size + 3 * math.isqrt(lots.expected_size))
    batches = -(-usual // _MOST.get(device.type, _MOST_ELSEWHERE))
    return 8 * math.ceil(usual / batches / 8)


class LotRunner:
    """Computes the clipped sums of a lot in physical batches of `size` examples."""

    def __init__(
        self,
        private: Private,
        loader: Loader,
        losses_of: Callable[..., Tensor],
        *,
        size: int,
        device: torch.device,
        padded: bool,
    ) -> None:
        self.size = size
        self._private, self._loader, self._losses_of = private, loader, losses_of
        self._device, self._padded = device, padded
        self._run = private.capture(losses_of)

    def __call__(self, lot: Lot) -> None:
        """All batches of the lot, in one size; out of memory means half the size, from the lot's beginning."""
        while not self._fits(lot):
            self._private.restart()
            self.size = -(-self.size // 2)
            self._run = self._private.capture(self._losses_of)  # what was captured holds memory of its own
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def _fits(self, lot: Lot) -> bool:
        try:
            if self._padded:  # one shape for all: the engine reads a graph once, and a GPU replays it
                for data, _ in self._loader.padded(lot, self.size):
                    self._run(*_parts(on_device(data, self._device)))
            else:
                for batch in self._loader.batches(lot, self.size):
                    self._run(*_parts(on_device(batch, self._device)))
        except RuntimeError as error:
            if self.size == 1 or not out_of_memory(error):
                raise
            return False
        return True


def out_of_memory(error: RuntimeError) -> bool:
    """Whether the error says that memory ran out; torch has no class of its own for that on a CPU."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _parts(batch: Any) -> tuple[Any, ...]:
    return tuple(batch) if isinstance(batch, tuple | list) else (batch,)
