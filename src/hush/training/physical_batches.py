"""The batches of a lot, as large as the device can hold: a size that does not fit is halved and the lot begun again."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hush.private import Private
from hush.sampling.loader import Loader
from hush.sampling.lots import Lot, Lots
from hush.training.compiling import Compile, Trial
from hush.training.evaluation import on_device
from hush.training.options import Conduct

_MOST = {"cuda": 8192}
_MOST_ELSEWHERE = 1024


def first_size(lots: Lots, device: torch.device) -> int:
    """A size to begin with: nearly every lot fills few batches, each up to what is usual for the device.

    Public numbers only. Three standard deviations of room; a lot that is larger spills into one more batch.
    """
    usual = min(lots.examples, lots.expected_size + 3 * math.isqrt(lots.expected_size))
    batches = -(-usual // _MOST.get(device.type, _MOST_ELSEWHERE))
    return 8 * math.ceil(usual / batches / 8)


def make_runner(
    private: Private,
    loader: Loader,
    losses_of: Callable[..., Tensor],
    conduct: Conduct,
    device: torch.device,
    size: int,
) -> "LotRunner":
    """The runner that a conduct asks for; what it leaves open is chosen by the device, the data and the clip."""
    clip, steps = private.plan.clip, private.plan.steps
    steady = clip.at(0) == clip.at(steps - 1)  # a captured graph has one bound
    fixed = steady if device.type == "cuda" else loader.in_memory
    padded = fixed if conduct.padded is None else conduct.padded
    unrepeatable = conduct.compile == "auto" and conduct.seed is not None
    compile = False if unrepeatable else conduct.compile
    return LotRunner(private, loader, losses_of, size=size, device=device, padded=padded, compile=compile)


class LotRunner:
    """Computes the clipped sums of a lot in physical batches of `size` examples.

    On a GPU padded batches are captured once and replayed. With compile="auto" some of them are timed, and where the
    plan is long enough the compiler fuses them; what it cannot compile goes on captured.
    """

    def __init__(
        self,
        private: Private,
        loader: Loader,
        losses_of: Callable[..., Tensor],
        *,
        size: int,
        device: torch.device,
        padded: bool,
        compile: Compile = False,
    ) -> None:
        self.size = size
        self._private, self._loader, self._losses_of = private, loader, losses_of
        self._device, self._padded = device, padded
        self._compile = compile is True
        self._trial = Trial(device) if compile == "auto" and padded and device.type == "cuda" else None
        self._untried = False  # compiled by a decision of its own, and no lot done with it yet
        self._begin()

    def __call__(self, lot: Lot) -> None:
        """All batches of the lot, in one size; out of memory means half the size, from the lot's beginning."""
        if self._trial is not None and self._trial.over:
            self._decide(self._trial)
        while not self._fits(lot):
            self._private.restart()
            self._begin()
        self._untried = False

    def _begin(self) -> None:
        self._run = self._private.capture(self._losses_of, compile=self._compile)  # what was captured holds memory
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _decide(self, trial: Trial) -> None:
        plan, self._trial = self._private.plan, None
        per_lot = -(-plan.lots.expected_size // self.size)
        if trial.pays(batches_left=(plan.steps - self._private.steps_done) * per_lot):
            self._compile = self._untried = True
            self._begin()

    def _fits(self, lot: Lot) -> bool:
        try:
            if self._padded:  # one shape for all: the engine reads a graph once, and a GPU replays it
                for data, _ in self._loader.padded(lot, self.size):
                    self._one(on_device(data, self._device))
            else:
                for batch in self._loader.batches(lot, self.size):
                    self._one(on_device(batch, self._device))
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

    def _one(self, batch: Any) -> None:
        parts = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
        if self._trial is None:
            self._run(*parts)
        else:
            self._trial(self._at_once, *parts)

    def _at_once(self, *parts: Any) -> None:
        self._run(*parts)
        self._run.finish()  # a captured batch would else wait for the step


def out_of_memory(error: Exception) -> bool:
    """Whether the error says that memory ran out; torch has no class of its own for that on a CPU."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )
