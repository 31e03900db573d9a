"""The release of a lot: its sum, with noise of the scale that was paid for, becomes `p.grad`. Its only writer."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hush.captured.batch import Placed
from hush.captured.step import PlannedRelease, Update
from hush.clipping.bounded_sum import BoundedSum
from hush.clipping.clips import Clip, QuantileClip
from hush.gradients.sums.lot_sum import LotSum
from hush.noise.float_safe import add_float_safe_noise, distance_over, grid_deviations
from hush.noise.gaussian import add_noise, check_release, standard_deviations
from hush.randomness.gaussian_samples import Normals
from hush.randomness.streams import Key


class Due(NamedTuple):
    """What a lot's release depends on besides its sum: `noise` is the joint multiplier that was paid for."""

    parameters: Mapping[str, nn.Parameter]
    clip: Clip
    noise: float
    step: int


class Releaser:
    """Noise and gradients for the lots of a run; `expected_size` is the constant that sums are divided by."""

    def __init__(self, key: Key, *, expected_size: int, discrete: bool) -> None:
        self._expected_size = expected_size
        self._discrete = discrete
        self._update = Update()
        self._total: BoundedSum | None = None
        self._reasons: tuple[object, ...] = ()
        self._planned: PlannedRelease
        self._normals, self._count_normals = Normals(key), Normals(key, "count")

    def take(self, key: Key) -> None:
        """Draw all further noise from this key."""
        self._normals, self._count_normals = Normals(key), Normals(key, "count")

    def close(self) -> None:
        """Let go of what was captured."""
        self._update = Update()

    def release(self, lot: LotSum, due: Due) -> tuple[dict[str, float], Clip | None]:
        """Write the released gradients.

        Returns the standard deviation of the noise in each, and the clip of the next lot where it is adaptive.
        """
        parameters, clip, joint, step = due
        total = lot.total(parameters, clip)
        noise = clip.gradient_noise(joint) * (1 + 1e-12) if isinstance(clip, QuantileClip) else joint
        scale = 1 / self._expected_size
        places = {name: _place(total.tensors[name], parameter) for name, parameter in parameters.items()}
        release = add_float_safe_noise if self._discrete and joint else add_noise
        release(total, noise_multiplier=noise, normals=self._normals, step=step, scale=scale, out=places)
        for name, parameter in parameters.items():
            parameter.grad = places[name]
        following: Clip | None = None
        if isinstance(clip, QuantileClip) and total.count is not None:
            alone = clip.count_noise if joint else 0.0
            noised = release(total.count, noise_multiplier=alone, normals=self._count_normals, step=step)
            following = clip.updated(noised_count=noised["count"].item(), expected_size=self._expected_size)
        return {name: deviation * scale for name, deviation in standard_deviations(total, noise).items()}, following

    def captured(self, optimizer: torch.optim.Optimizer, lot: LotSum, due: Due) -> Callable[[], None] | None:
        """Noise and update as one launch, where the lot's sum belongs to a captured region; None where it does not.

        A sum without noise is not captured.
        """
        placed = lot.put_off
        if not isinstance(placed, Placed) or due.noise == 0:
            return None
        reasons = due.clip, due.noise, self._normals
        if self._total is not placed.total or self._reasons != reasons:
            self._planned = self._plan(BoundedSum(placed.total.tensors, due.clip.sum_bounds(due.parameters)), due.noise)
            self._total, self._reasons = placed.total, reasons
        return self._update.prepare(optimizer, self._planned, placed, due.step)

    def _plan(self, total: BoundedSum, noise: float) -> PlannedRelease:
        scale = 1 / self._expected_size
        check_release(total, noise, scale)
        deviations: Mapping[str, Any] = (grid_deviations if self._discrete else standard_deviations)(total, noise)
        in_order = [deviations[name] for name in total.tensors]
        return PlannedRelease(list(total.tensors.values()), in_order, scale, self._normals)


def distance_of_run(steps: int, parameters: Mapping[str, Tensor]) -> float:
    """How far the float-safe noise of so many steps may lie from its exact law.

    `parameters` are all that the model has, since frozen ones may be trained later; a step may release the
    count of an adaptive clip beside them.
    """
    return distance_over(steps * (1 + sum(parameter.numel() for parameter in parameters.values())))


def _place(total: Tensor, parameter: Tensor) -> Tensor:
    """Where the released gradient goes: over the sum itself, where the dtypes are the same."""
    return total if total.dtype == parameter.dtype else torch.empty_like(parameter, requires_grad=False)
