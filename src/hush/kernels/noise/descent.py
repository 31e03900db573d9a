"""Plain SGD as numbers: what a kernel must know to take the optimizer's step itself, beside the release.

The kernel then reads each sum once and writes gradient and parameter, and learning rates that change from step to step
are numbers in a table, not another recording.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

NUMBERS = ("lr", "weight_decay", "momentum", "dampening")
"""Settings of a group that may change without another kernel."""
_NUMBER = {int, float}


class Pace(NamedTuple):
    """How one tensor is released, and how far its parameter then goes: p <- p - rate * (momentum, decay and gradient).

    `fresh` is the share of the gradient that enters the velocity, 1 - dampening.
    """

    deviation: float
    rate: float
    decay: float
    momentum: float
    fresh: float


class Descent(NamedTuple):
    """A step of SGD on some parameters, in their order."""

    groups: list[int]
    """Whose settings each parameter has."""
    velocities: list[Tensor]
    """Momentum buffers; none where there is no momentum."""
    nesterov: bool
    decays: bool

    def paces(self, deviations: Sequence[float], numbers: Sequence[float]) -> list[Pace]:
        """The settings of every tensor; `numbers` are those of `numbers_of`, when the step is taken."""
        of_group = [numbers[at : at + len(NUMBERS)] for at in range(0, len(numbers), len(NUMBERS))]
        return [
            Pace(deviation, rate, decay, momentum, 1 - dampening)
            for deviation, (rate, decay, momentum, dampening) in zip(
                deviations, (of_group[group] for group in self.groups), strict=True
            )
        ]


def numbers_of(optimizer: torch.optim.Optimizer) -> list[float]:
    """The settings that may change, four for each group; empty where one of them is no number of the host."""
    found = [group[name] for group in optimizer.param_groups for name in NUMBERS]
    return found if _NUMBER.issuperset(map(type, found)) else []


def descent_of(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> Descent | None:
    """The step of SGD as a kernel can take it; None where it would do more or less than `optimizer.step()`."""
    kinds = {_kind(group) for group in optimizer.param_groups}
    owners = {p: number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    if len(kinds) != 1 or not owners.keys() >= set(parameters):
        return None  # others have no gradient (guards.check_optimizer), so that `optimizer.step()` passes them over
    kind = kinds.pop()
    if kind is None:
        return None
    velocities = [optimizer.state[p].get("momentum_buffer") for p in parameters] if kind.momentum else []
    simple = all(_is_simple(place) for place in (*parameters, *velocities))
    return Descent([owners[p] for p in parameters], velocities, kind.nesterov, kind.decays) if simple else None


class _Kind(NamedTuple):
    momentum: bool
    nesterov: bool
    decays: bool


def _kind(group: dict[str, Any]) -> _Kind | None:
    if group["maximize"] or group["differentiable"] or group["fused"]:
        return None
    return _Kind(group["momentum"] != 0, group["nesterov"], group["weight_decay"] != 0)


def _is_simple(place: Tensor | None) -> bool:
    return place is not None and place.dtype == torch.float32 and place.is_contiguous()
