"""The batches of a lot, as large as the device can hold: a size that does not fit is halved and the lot begun again."""

import math
import warnings

import torch

from hush.private import Private
from hush.sampling.batches import Batch
from hush.sampling.lot import Lot
from hush.sampling.lots import Lots
from hush.training.compiling import Compile, Trial

_MOST = {"cuda": 8192}
_MOST_ELSEWHERE = 1024


def first_size(lots: Lots, device: torch.device) -> int:
    """A size to begin with: nearly every lot fills few batches, each up to what is usual for the device.

    Public numbers only. Three standard deviations of room; a lot that is larger spills into one more batch.
    """
    usual = min(lots.examples, lots.lot_size + 3 * math.isqrt(lots.lot_size))
    batches = -(-usual // _MOST.get(device.type, _MOST_ELSEWHERE))
    return 8 * math.ceil(usual / batches / 8)


class LotRunner:
    """Adds a lot batch by batch, in physical batches of `size` examples.

    Where the machine captures, some batches are timed with compile="auto", and where the plan is long enough the
    compiler fuses them; what it cannot compile goes on captured.
    """

    def __init__(self, private: Private, size: int, device: torch.device, *, padded: bool, compile: Compile) -> None:
        self.size = size
        self._private = private
        self._padded = padded
        self._compile = compile is True
        self._trial = Trial(device) if compile == "auto" and private.captured is not None else None
        self._device = device
        self._untried = False  # compiled by a decision of its own, and no lot done with it yet

    def __call__(self, lot: Lot) -> None:
        """All batches of the lot, in one size; out of memory means half the size, from the lot's beginning."""
        if self._trial is not None and self._trial.over:
            self._decide(self._trial)
        while not self._fits(lot):
            self._private.restart()
            self._capture_anew()  # what was captured holds memory
        self._untried = False

    def _decide(self, trial: Trial) -> None:
        plan, self._trial = self._private.plan, None
        per_lot = -(-plan.lots.lot_size // self.size)
        if trial.pays(batches_left=(plan.steps - self._private.steps_done) * per_lot):
            self._compile = self._untried = True
            self._capture_anew()

    def _at_once(self, batch: Batch) -> None:
        self._private.add(batch)
        if self._private.captured is not None:
            self._private.captured.compute()  # a captured batch would else wait for the step

    def _capture_anew(self) -> None:
        if self._private.captured is not None:
            self._private.captured.begin_anew(compile=self._compile)

    def _fits(self, lot: Lot) -> bool:
        try:
            for batch in lot.batches(self.size, pad=self._padded):  # one shape for all: a graph is read once
                if self._trial is None:
                    self._private.add(batch)
                else:
                    self._trial(self._at_once, batch)
        except Exception as error:
            if self._untried:
                self._compile = self._untried = False
                warnings.warn(f"the step was not compiled, and goes on without: {error}", RuntimeWarning, stacklevel=2)
                return False
            if self.size == 1 or not out_of_memory(error):
                raise
            self.size = -(-self.size // 2)
            self._trial = None if self._trial is None else Trial(self._device)
            return False
        return True


def out_of_memory(error: Exception) -> bool:
    """Whether the error says that memory ran out; torch has no class of its own for that on a CPU."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )
