"""The release of a lot: its sum, with noise of the scale that was paid for, becomes `p.grad`. Its only writer."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hush.clipping.clips import Clip, QuantileClip
from hush.gradients.sums.lot_sum import LotSum
from hush.noise.float_safe import add_float_safe_noise, distance_over
from hush.noise.gaussian import add_noise, standard_deviations
from hush.randomness.gaussian_samples import Normals
from hush.randomness.streams import Key


class Due(NamedTuple):
    """What a lot's release depends on besides its sum: `noise` is the joint multiplier that was paid for."""

    parameters: Mapping[str, nn.Parameter]
    clip: Clip
    noise: float
    step: int


class Releaser:
    """Noise and gradients for the lots of a run; `lot_size` is the constant that sums are divided by."""

    def __init__(self, key: Key, *, lot_size: int, discrete: bool) -> None:
        self.lot_size = lot_size
        self.discrete = discrete
        self.normals, self._count_normals = Normals(key), Normals(key, "count")

    def take(self, key: Key) -> None:
        """Draw all further noise from this key."""
        self.normals, self._count_normals = Normals(key), Normals(key, "count")

    def release(self, lot: LotSum, due: Due) -> tuple[dict[str, float], Clip | None]:
        """Write the released gradients.

        Returns the standard deviation of the noise in each, and the clip of the next lot where it is adaptive.
        """
        parameters, clip, joint, step = due
        total = lot.total(parameters, clip)
        noise = clip.gradient_noise(joint) * (1 + 1e-12) if isinstance(clip, QuantileClip) else joint
        scale = 1 / self.lot_size
        places = {name: _place(total.tensors[name], parameter) for name, parameter in parameters.items()}
        release = add_float_safe_noise if self.discrete and joint else add_noise
        release(total, noise_multiplier=noise, normals=self.normals, step=step, scale=scale, out=places)
        for name, parameter in parameters.items():
            parameter.grad = places[name]
        following: Clip | None = None
        if isinstance(clip, QuantileClip) and total.count is not None:
            alone = clip.count_noise if joint else 0.0
            noised = release(total.count, noise_multiplier=alone, normals=self._count_normals, step=step)
            following = clip.updated(noised_count=noised["count"].item(), lot_size=self.lot_size)
        return {name: deviation * scale for name, deviation in standard_deviations(total, noise).items()}, following


def tell_noise(optimizer: object, parameters: Mapping[str, Tensor], deviations: Mapping[str, float]) -> None:
    """Tell an optimizer that wants to know (a NoiseAware) which noise is in each gradient."""
    expect_noise = getattr(optimizer, "expect_noise", None)  # to ask for the protocol takes long
    if expect_noise is not None:
        expect_noise({parameters[name]: deviation for name, deviation in deviations.items()})


def distance_of_run(steps: int, parameters: Mapping[str, Tensor]) -> float:
    """How far the float-safe noise of so many steps may lie from its exact law.

    `parameters` are all that the model has, since frozen ones may be trained later; a step may release the
    count of an adaptive clip beside them.
    """
    return distance_over(steps * (1 + sum(parameter.numel() for parameter in parameters.values())))


def _place(total: Tensor, parameter: Tensor) -> Tensor:
    """Where the released gradient goes: over the sum itself, where the dtypes are the same."""
    return total if total.dtype == parameter.dtype else torch.empty_like(parameter, requires_grad=False)
