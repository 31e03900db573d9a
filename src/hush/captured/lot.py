"""A run whose machine captures: batches are recorded once and replayed, a small model's whole step in one launch.

The only batch of a lot waits for `step`, where its sum, the noise and the update can be one recording.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hush.captured.batch import Placed, Region
from hush.captured.step import PlannedRelease, Update
from hush.checks.guards import Guard
from hush.clipping.bounded_sum import BoundedSum
from hush.gradients.engine import Gradients, Inputs
from hush.gradients.sums.lot_sum import LotSum
from hush.noise.float_safe import grid_deviations
from hush.noise.gaussian import check_release, standard_deviations
from hush.noise.release import Due, Releaser
from hush.sampling.batches import Batch


class CapturedRun:
    """The captured form of what `Private.add` and `Private.step` do; the same results, by the same functions."""

    def __init__(self, gradients: Gradients, guard: Guard, releaser: Releaser, *, compile: bool) -> None:
        self._gradients, self._guard, self._releaser = gradients, guard, releaser
        self._lot: LotSum | None = None
        self.begin_anew(compile=compile)

    def begin_anew(self, *, compile: bool) -> None:
        """Let go of everything that was captured, and of its memory."""
        self._region = Region(self._gradients, compile=compile)
        self._update = Update()
        self._total: BoundedSum | None = None
        self._reasons: tuple[object, ...] = ()
        self._planned: PlannedRelease
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def compute(self) -> None:
        """Queue what a batch has put off until the step; only a measurement of time needs this."""
        if self._lot is not None:
            self._lot.keep()

    def add(self, lot: LotSum, inputs: Inputs, batch: Batch, due: Due) -> None:
        """Add the batch's clipped sum to the lot's, or put that off until the step."""
        lot.keep()  # the region writes where it wrote before
        self._lot = lot
        placed, replayed = self._region.place(due.parameters, due.clip, inputs, batch, self._guard.state())
        total = self._region.run(due.parameters, due.clip, inputs, batch) if placed is None else None
        if not replayed:
            try:
                self._guard.after_forward()
            except RuntimeError:
                self._region.forget()  # a replay would not be looked at again
                raise
        if placed is not None:
            lot.add_later(placed, due.clip, now=not batch.alone)
        elif total is not None:
            lot.add(total, due.clip)

    def step(self, optimizers: Sequence[torch.optim.Optimizer], lot: LotSum, due: Due) -> Callable[[], None] | None:
        """Noise and update as one launch, where the lot's sum belongs to a captured region; None where it does not.

        A sum without noise is not captured, nor is a step of several optimizers.
        """
        placed = lot.put_off
        if not isinstance(placed, Placed) or due.noise == 0 or len(optimizers) != 1:
            return None
        reasons = due.clip, due.noise, self._releaser.normals
        if self._total is not placed.total or self._reasons != reasons:
            bounds = due.clip.sum_bounds(due.parameters)
            self._planned = self._plan(BoundedSum(placed.total.tensors, bounds), due.noise)
            self._total, self._reasons = placed.total, reasons
        return self._update.prepare(optimizers[0], self._planned, placed, due.step)

    def _plan(self, total: BoundedSum, noise: float) -> PlannedRelease:
        scale = 1 / self._releaser.lot_size
        check_release(total, noise, scale)
        deviations_of = grid_deviations if self._releaser.discrete else standard_deviations
        deviations: Mapping[str, Any] = deviations_of(total, noise)
        in_order = [deviations[name] for name in total.tensors]
        return PlannedRelease(list(total.tensors.values()), in_order, scale, self._releaser.normals)
