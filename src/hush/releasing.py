"""The release of a lot: its sum, with noise of the scale that was paid for, becomes `p.grad`. Its only writer."""

from collections.abc import Callable, Mapping, Sequence
from os import cpu_count
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hush.accumulation import LotSum
from hush.capture import Placed
from hush.discrete import add_discrete_noise, grid_deviations
from hush.gradients.bounded import BoundedSum
from hush.gradients.clip import Clip, QuantileClip
from hush.integers import OnGrid
from hush.noise import add_noise, check_release, standard_deviations
from hush.normals import Normals
from hush.streams import Key
from hush.update import PlannedRelease, Update

_CORES = cpu_count() or 1
_WORTH_PREPARING = 20_000  # numbers; below that handing them to another thread costs more than drawing them


class Due(NamedTuple):
    """What a lot's release depends on besides its sum: `noise` is the joint multiplier that was paid for."""

    parameters: Mapping[str, nn.Parameter]
    clip: Clip
    noise: float
    step: int


class _Scaled(NamedTuple):
    """The deviations of the last step, for the next one if its reasons are the same."""

    tensors: Mapping[str, Tensor]
    reasons: tuple[Clip, float, float]
    deviations: Sequence[float] | Sequence[OnGrid]


class Releaser:
    """Noise and gradients for the lots of a run; `expected_size` is the constant that sums are divided by."""

    def __init__(self, key: Key, *, expected_size: int, discrete: bool) -> None:
        self._expected_size = expected_size
        self._discrete = discrete
        self._update = Update()
        self._scaled: _Scaled | None = None
        self._normals, self._count_normals = Normals(key), Normals(key, "count")

    def take(self, key: Key) -> None:
        """Draw all further noise from this key."""
        self._normals.close()
        self._normals, self._count_normals = Normals(key), Normals(key, "count")

    def close(self) -> None:
        """End what runs in the background, let go of what was captured."""
        self._normals.close()
        self._update = Update()

    def prepare(self, due: Due) -> None:
        """Let the noise of a lot be drawn while its gradients are computed, where a core is free for that."""
        if self._discrete or due.noise == 0 or torch.get_num_threads() >= _CORES:
            return  # without a free core both would wait for each other: benchmarks/NOTES.md
        count = sum(parameter.numel() for parameter in due.parameters.values() if parameter.device.type == "cpu")
        if count >= _WORTH_PREPARING:
            self._normals.prepare(due.step, count)

    def release(self, lot: LotSum, due: Due) -> tuple[dict[str, float], Clip | None]:
        """Write the released gradients.

        Returns the standard deviation of the noise in each, and the clip of the next lot where it is adaptive.
        """
        parameters, clip, joint, step = due
        total = lot.total(parameters, clip)
        noise = clip.gradient_noise(joint) * (1 + 1e-12) if isinstance(clip, QuantileClip) else joint
        scale = 1 / self._expected_size
        places = {name: _place(total.tensors[name], parameter) for name, parameter in parameters.items()}
        release = add_discrete_noise if self._discrete and joint else add_noise
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
        tensors, reasons = placed.total.tensors, (due.clip, due.noise, lot.slack)
        if self._scaled is None or self._scaled.tensors is not tensors or self._scaled.reasons != reasons:
            total = BoundedSum(tensors, lot.bounds(due.parameters, due.clip))
            check_release(total, due.noise, 1 / self._expected_size)
            if self._discrete:
                on_grids = grid_deviations(total, due.noise)
                self._scaled = _Scaled(tensors, reasons, [on_grids[name] for name in tensors])
            else:
                deviations = standard_deviations(total, due.noise)
                self._scaled = _Scaled(tensors, reasons, [deviations[name] for name in tensors])
        planned = PlannedRelease(
            list(tensors.values()), self._scaled.deviations, 1 / self._expected_size, self._normals, due.step
        )
        return self._update.prepare(optimizer, list(due.parameters.values()), planned, placed)


def _place(total: Tensor, parameter: Tensor) -> Tensor:
    """Where the released gradient goes: over the sum itself, where the dtypes are the same."""
    return total if total.dtype == parameter.dtype else torch.empty_like(parameter, requires_grad=False)
