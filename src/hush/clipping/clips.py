"""How far one example may move the sum, as values: FlatClip, PerLayerClip, AutomaticClip, QuantileClip.

A *layer* is a module: its weight and its bias are clipped together, as the paper groups them.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from hush.clipping.bounded_sum import Group
from hush.clipping.rounding import RUN_SLACK

Schedule = float | Callable[[int], float]
"""A number, or a function from the step (0, 1, ..) to one; it may not look at the data."""


class Clip(ABC):
    """A rule for clipping: which parameters are clipped together, at which bound, and by which factor."""

    @abstractmethod
    def at(self, step: int) -> "Clip":
        """The rule with the bounds of this step, schedules evaluated; the same for all batches of its lot."""

    @abstractmethod
    def groups(self, names: Iterable[str]) -> tuple[Group, ...]:
        """The parameters that are clipped together, with their bounds (real numbers, no slack)."""

    def sum_bounds(self, names: Iterable[str]) -> tuple[Group, ...]:
        """The same groups with what one example can move their sums by: rounding included, the same for every lot."""
        return tuple(replace(group, bound=group.bound * (1 + RUN_SLACK)) for group in self.groups(names))

    def factors(self, squared_norms: Tensor, bound: float) -> Tensor:
        """[batch] -> [batch]: the factor of each example, at most bound / norm; zero for what is not finite."""
        if bound == math.inf:
            return squared_norms.isfinite().to(squared_norms.dtype)
        return (bound / squared_norms.sqrt().clamp(min=bound)).nan_to_num(nan=0.0)

    def below(self, squared_norms: Tensor, bound: float) -> Tensor | None:
        """[batch]: what each example adds to the count of an adaptive bound, at most 1/2 in size."""
        return None


@dataclass(frozen=True)
class FlatClip(Clip):
    """Scales each example's whole gradient down to norm `bound` (Algorithm 1 of Abadi et al. 2016).

    >>> FlatClip(1.0).groups(["fc.weight", "fc.bias"])
    (Group(names=('fc.weight', 'fc.bias'), bound=1.0),)
    >>> FlatClip(lambda step: 1.0 / (1 + step)).at(3)
    FlatClip(bound=0.25)
    """

    bound: Schedule

    def __post_init__(self) -> None:
        _check(self.bound)

    def at(self, step: int) -> "FlatClip":
        return FlatClip(_value(self.bound, step)) if callable(self.bound) else self

    def groups(self, names: Iterable[str]) -> tuple[Group, ...]:
        return (Group(tuple(names), _constant(self.bound)),)


@dataclass(frozen=True)
class PerLayerClip(Clip):
    """Clips each layer by itself: one bound for all layers, or one for each pattern of layer names.

    A layer is a module (weight and bias together); a parameter of the root module is a layer of its own name. Of
    several patterns that fit the first counts; a layer that no pattern fits is refused.

    >>> clip = PerLayerClip({"conv*": 2.0, "*": 1.0})
    >>> [(group.names, group.bound) for group in clip.groups(["conv1.weight", "conv1.bias", "fc.weight"])]
    [(('conv1.weight', 'conv1.bias'), 2.0), (('fc.weight',), 1.0)]
    """

    bounds: Schedule | Mapping[str, Schedule]

    def __post_init__(self) -> None:
        for bound in self._patterns().values():
            _check(bound)

    def __hash__(self) -> int:
        return hash(tuple(self._patterns().items()))

    def _patterns(self) -> Mapping[str, Schedule]:
        return self.bounds if isinstance(self.bounds, Mapping) else {"*": self.bounds}

    def at(self, step: int) -> "PerLayerClip":
        if not any(map(callable, self._patterns().values())):
            return self
        return PerLayerClip({pattern: _value(bound, step) for pattern, bound in self._patterns().items()})

    def groups(self, names: Iterable[str]) -> tuple[Group, ...]:
        layers: dict[str, list[str]] = {}
        for name in names:
            layers.setdefault(layer_of(name), []).append(name)
        patterns = self._patterns()
        found: list[Group] = []
        for layer, members in layers.items():
            fitting = [pattern for pattern in patterns if fnmatchcase(layer, pattern)]
            if not fitting:
                raise ValueError(
                    f"no pattern of PerLayerClip fits the layer {layer!r} (patterns: {', '.join(patterns)}): add one, "
                    "or a last pattern '*' for all other layers"
                )
            found.append(Group(tuple(members), _constant(patterns[fitting[0]])))
        return tuple(found)


def layer_of(name: str) -> str:
    """The module that a parameter belongs to, parametrisations counted with the module that they parametrise."""
    module = name.rpartition(".")[0] or name
    return module.partition(".parametrizations")[0]


@dataclass(frozen=True)
class AutomaticClip(Clip):
    """Normalises each gradient to bound * g / (|g| + stability): no bound has to be tuned (Bu et al. 2022, AUTO-S).

    >>> AutomaticClip().factors(torch.tensor([0.99**2]), 1.0)
    tensor([1.])
    """

    bound: Schedule = 1.0
    stability: float = 0.01

    def __post_init__(self) -> None:
        _check(self.bound)
        # Squares of what is smaller vanish in float32: an example whose norm seems 0 must not be blown up.
        if not _LEAST <= self.stability < math.inf or not _largest(self.bound) < math.inf:
            raise ValueError(
                f"AutomaticClip needs a finite bound and stability, the latter at least {_LEAST}, got {self}"
            )

    def at(self, step: int) -> "AutomaticClip":
        return replace(self, bound=_value(self.bound, step)) if callable(self.bound) else self

    def groups(self, names: Iterable[str]) -> tuple[Group, ...]:
        return (Group(tuple(names), _constant(self.bound)),)

    def factors(self, squared_norms: Tensor, bound: float) -> Tensor:
        return torch.where(squared_norms.isfinite(), bound / (squared_norms.sqrt() + self.stability), 0)


@dataclass(frozen=True)
class QuantileClip(Clip):
    """A flat bound that follows a quantile of the norms (Andrew et al. 2021), by a count that is released with noise.

    The gradient sum and the count of one lot are one Gaussian release: with noise multipliers s_g for the gradient and
    s_b for the count (`count_noise`), the joint one is s with 1/s^2 = 1/s_g^2 + 1/s_b^2. The plan fixes s in advance;
    `gradient_noise(s)` is the s_g that is left. The bound is constant inside a lot.

    >>> clip = QuantileClip(initial=1.0, quantile=0.5, count_noise=20.0)
    >>> round(clip.gradient_noise(1.0), 6)
    1.001252
    >>> clip.updated(noised_count=50.0, lot_size=100).initial < 1.0      # all norms were below: the bound shrinks
    True
    """

    initial: float
    quantile: float = 0.5
    learning_rate: float = 0.2
    count_noise: float = 20.0

    def __post_init__(self) -> None:
        _check(self.initial)
        if not self.initial < math.inf or not 0 <= self.quantile <= 1 or not self.learning_rate > 0:
            raise ValueError(f"expected a finite bound, quantile in [0, 1], learning_rate > 0, got {self}")
        if not self.count_noise > 0:
            raise ValueError(f"the count needs noise: expected count_noise > 0, got {self.count_noise}")

    def at(self, step: int) -> "QuantileClip":
        return self

    def groups(self, names: Iterable[str]) -> tuple[Group, ...]:
        return (Group(tuple(names), self.initial),)

    def below(self, squared_norms: Tensor, bound: float) -> Tensor:
        signs = torch.where(squared_norms <= bound**2, 0.5, -0.5)
        return torch.where(squared_norms.isfinite(), signs, 0.0)

    def gradient_noise(self, noise_multiplier: float) -> float:
        """The noise multiplier of the gradient if gradient and count together are to have `noise_multiplier`."""
        if noise_multiplier == 0:
            return 0.0
        left = noise_multiplier**-2 - self.count_noise**-2
        if left <= 0:
            raise ValueError(f"expected count_noise > noise multiplier, got {self.count_noise}, {noise_multiplier}")
        return left**-0.5

    def updated(self, *, noised_count: float, lot_size: float) -> "QuantileClip":
        """The rule for the next lot. `noised_count` is the released count, `lot_size` the public constant L."""
        share = min(1.0, max(0.0, 0.5 + noised_count / lot_size))
        exponent = -self.learning_rate * (share - self.quantile)
        return replace(self, initial=min(1e12, max(1e-9, self.initial * math.exp(exponent))))


_LEAST = 1e-9


def _check(bound: Schedule) -> None:
    if not callable(bound) and not bound >= _LEAST:
        raise ValueError(f"a clipping bound must be a number of at least {_LEAST}, got {bound}")


def _value(bound: Schedule, step: int) -> float:
    value = float(bound(step) if callable(bound) else bound)
    _check(value)
    return value


def _constant(bound: Schedule) -> float:
    if callable(bound):
        raise ValueError("the bound is a schedule over steps: call clip.at(step) first, once for each lot")
    return float(bound)


def _largest(bound: Schedule) -> float:
    return 0.0 if callable(bound) else float(bound)
