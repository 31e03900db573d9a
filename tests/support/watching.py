"""An audit of trainings: stands in for the one place where noise is added and checks each release against its bill."""

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import hush.noise.release
from hush.clipping.bounded_sum import BoundedSum
from hush.noise.gaussian import add_noise


@dataclass
class Watch:
    """What was released: noise multipliers, sensitivities, norms of the sums, and the noise itself in units of both."""

    multipliers: list[float] = field(default_factory=list)
    bounds: list[float] = field(default_factory=list)
    residuals: list[Tensor] = field(default_factory=list)

    def __call__(
        self, total: BoundedSum, *, noise_multiplier: float, scale: float = 1.0, **rest: Any
    ) -> dict[str, Tensor]:
        before = {name: tensor.detach().double().clone() for name, tensor in total.tensors.items()}
        released = add_noise(total, noise_multiplier=noise_multiplier, scale=scale, **rest)
        self.multipliers.append(noise_multiplier)
        self.bounds.append(total.sensitivity)
        for name, tensor in released.items():
            residual = tensor.double() / scale - before[name]
            self.residuals.append(residual.flatten() / (noise_multiplier * total.sensitivity))
        return released

    def check(self, *, steps: int, noise: float, clip: float) -> None:
        """Noise of the variance that was charged, around sums that one example moves by at most C, in every step."""
        assert len(self.multipliers) == steps, "one release for each step that was charged"
        assert all(multiplier >= noise for multiplier in self.multipliers)
        assert all(clip <= bound <= 1.05 * clip for bound in self.bounds)
        drawn = torch.cat(self.residuals)
        assert abs(drawn.std().item() - 1) < 6 / math.sqrt(2 * len(drawn))
        assert abs(drawn.mean().item()) < 6 / math.sqrt(len(drawn))
        starts = [one[:8].tolist() for one in self.residuals if len(one) >= 8]
        assert len({tuple(start) for start in starts}) == len(starts), "no two tensors or steps share their noise"


def watch(patch: pytest.MonkeyPatch) -> Watch:
    """Watch everything that Private releases until the test ends."""
    found = Watch()
    patch.setattr(hush.noise.release, "add_noise", found)
    return found
