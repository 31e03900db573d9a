"""Whether a run on a GPU is worth compiling: decided by public numbers and by the time that one batch takes.

Compiling takes 10 to 50 seconds and saves a fifth to a half of what a captured batch takes (benchmarks/NOTES.md).
"""

import time
from collections.abc import Callable
from typing import Any, Literal

import torch

Compile = bool | Literal["auto"]

_TIMED = 5
_WORTH_IT = 180.0  # seconds of captured batches that are left: a quarter of that pays for compiling


class Trial:
    """Times some batches of one shape, after the one that was captured; what they hold does not change their time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: list[float] = []

    def __call__(self, run: Callable[..., None], *batch: Any) -> None:
        """Run a batch and note how long it took."""
        self._wait()
        began = time.perf_counter()
        run(*batch)
        self._wait()
        self._seconds.append(time.perf_counter() - began)

    @property
    def over(self) -> bool:
        """Whether enough batches were timed."""
        return len(self._seconds) > _TIMED

    def pays(self, *, batches_left: int) -> bool:
        """Whether so many batches are worth compiling for."""
        return min(self._seconds[1:]) * batches_left >= _WORTH_IT

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
