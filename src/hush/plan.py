"""Plan: lots, steps, clip and noise bound together before training; calibrated to a budget; the event to be charged."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from hush import accounting
from hush.accounting import events
from hush.accounting.accountants import Accountant
from hush.accounting.bounds import Bounds, Budget
from hush.accounting.events import NOTHING, Event, compose
from hush.clipping.clips import AutomaticClip, Clip, FlatClip, PerLayerClip, QuantileClip
from hush.sampling.lots import Lots
from hush.sampling.lots import from_dict as lots_from_dict

TOO_SMALL = 0.01  # a noise multiplier below this protects nobody (epsilon is in the thousands): said to be infinite


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that decides the guarantee, fixed before training.

    `noise_multiplier` is joint: the noise of a step has standard deviation noise_multiplier times what one example can
    move the released sums by, over all groups (and the count of QuantileClip) together. It may be a schedule: a
    function of the step, or a tuple with a value for each of the steps + reserve steps; so may the bounds inside
    `clip`, which cost nothing. `reserve` more steps are part of the guarantee without being needed: a run that
    crashed may do again what it lost. `spent` is what the same budget has paid for already (DP-PCA, say); `event` and
    `epsilon` include both.

    A noise multiplier below 0.01 is allowed for tests and comparisons; the plan is then NOT PRIVATE and says so.

    >>> from hush.clipping.clips import FlatClip
    >>> from hush.sampling.lots import PoissonLots
    >>> plan = Plan(lots=PoissonLots(60_000, 600), steps=6_000, clip=FlatClip(1.0), noise_multiplier=1.1)
    >>> plan.units
    ((PoissonSampled(rate=0.01, event=Gaussian(noise_multiplier=1.1)), 6000),)
    """

    lots: Lots
    steps: int
    clip: Clip
    noise_multiplier: float | tuple[float, ...] | Callable[[int], float]
    reserve: int = 0
    spent: Event = NOTHING
    budget: Budget | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.lots, Lots):
            raise TypeError(f"lots must be PoissonLots, AllocatedLots or ShuffledLots, got {type(self.lots).__name__}")
        _whole("steps", self.steps, at_least=1)
        _whole("reserve", self.reserve, at_least=0)
        noise = _schedule("noise_multiplier", self.noise_multiplier, self.steps + self.reserve)
        for value in noise:
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"noise_multiplier must be a finite number >= 0, got {value!r}")
        if not isinstance(self.clip, Clip):
            raise TypeError(f"clip must be FlatClip, PerLayerClip, AutomaticClip or QuantileClip, got {self.clip!r}")
        if isinstance(self.clip, QuantileClip):
            for value in set(noise):
                self.clip.gradient_noise(value)  # refuses a joint multiplier that the count alone uses up
        object.__setattr__(self, "noise_multiplier", noise[0] if len(noise) == 1 else noise)
        object.__setattr__(self, "clip", _written_out(self.clip, self.steps))

    @classmethod
    def for_budget(
        cls,
        budget: Budget,
        *,
        lots: Lots,
        steps: int,
        clip: Clip,
        spent: Event = NOTHING,
        reserve: int = 0,
        accountant: Accountant = "pld",
    ) -> "Plan":
        """The plan with the least noise that keeps the budget over steps + reserve steps, next to what was spent.

        Guarantee: the returned plan's epsilon at the budget's delta, by the same accountant, is at most the budget's.
        """
        noise = accounting.calibrate.noise(
            lambda multiplier: compose(lots.units(steps + reserve, multiplier)),
            budget,
            spent=spent,
            accountant=accountant,
        )
        return cls(
            lots=lots, steps=steps, clip=clip, noise_multiplier=noise, reserve=reserve, spent=spent, budget=budget
        )

    @property
    def private(self) -> bool:
        """Whether every step has noise worth the name."""
        return min(self._noise()) >= TOO_SMALL

    @property
    def units(self) -> tuple[tuple[Event, int], ...]:
        """What will be charged in order, reserve included: (event of a unit, how many of them)."""
        return self._units(self.steps + self.reserve)

    @property
    def event(self) -> Event:
        """All that the plan may do to the data, with what was spent before and the reserve."""
        return compose([(self.spent, 1), *self.units])

    def event_after(self, steps: int) -> Event:
        """What was spent before and the first `steps` steps; a begun epoch of allocated lots counts whole."""
        _whole("steps", steps, at_least=0)
        if steps > self.steps + self.reserve:
            raise ValueError(f"the plan has {self.steps} steps and {self.reserve} in reserve, got {steps}")
        return compose([(self.spent, 1), *self._units(steps)])

    def epsilon(self, *, delta: float, accountant: Accountant = "pld") -> Bounds:
        """The guarantee of the whole plan, reserve included; infinite where the noise is (next to) nothing."""
        if not self.private:
            return Bounds(math.inf if min(self._noise()) == 0 else 0.0, math.inf)
        return accounting.epsilon(self.event, delta=delta, accountant=accountant)

    def noise_at(self, charged: int) -> float:
        """The joint noise multiplier of the step that is the `charged`-th to be paid for."""
        return self.noise_multiplier[charged] if isinstance(self.noise_multiplier, tuple) else self.noise_multiplier  # type: ignore[return-value]

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain JSON values, schedules written out."""
        budget = self.budget and {"epsilon": self.budget.epsilon, "delta": self.budget.delta}
        return {
            "lots": self.lots.to_dict(),
            "steps": self.steps,
            "clip": clip_to_dict(self.clip),
            "noise_multiplier": list(self._noise()),
            "reserve": self.reserve,
            "spent": events.to_dict(self.spent),
            "budget": budget,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Plan":
        """The plan that `to_dict` wrote."""
        noise = tuple(float(value) for value in values["noise_multiplier"])
        return cls(
            lots=lots_from_dict(values["lots"]),
            steps=values["steps"],
            clip=clip_from_dict(values["clip"]),
            noise_multiplier=noise[0] if len(noise) == 1 else noise,
            reserve=values["reserve"],
            spent=events.from_dict(values["spent"]),
            budget=Budget(**values["budget"]) if values["budget"] else None,
        )

    def __str__(self) -> str:
        noise = self._noise()
        amount = f"{noise[0]:.4g}" if len(noise) == 1 else f"{min(noise):.4g} to {max(noise):.4g}"
        text = f"{self.steps} steps on {self.lots}, {self.clip}, noise multiplier {amount}"
        return text if self.private else f"NOT PRIVATE (epsilon is infinite): {text}"

    def _noise(self) -> tuple[float, ...]:
        return self.noise_multiplier if isinstance(self.noise_multiplier, tuple) else (self.noise_multiplier,)  # type: ignore[return-value]

    def _units(self, steps: int) -> tuple[tuple[Event, int], ...]:
        if min(self._noise()) == 0:
            raise ValueError(
                "a plan without noise is no event that could be charged: its epsilon is infinite, NOT PRIVATE"
            )
        return self.lots.units(steps, self.noise_multiplier)  # type: ignore[arg-type]


@dataclass(frozen=True)
class ByStep:
    """A schedule that was written out: one value for each step."""

    values: tuple[float, ...]

    def __call__(self, step: int) -> float:
        return self.values[step]

    def __repr__(self) -> str:
        return f"{self.values[0]:.4g} to {self.values[-1]:.4g} by step"


def clip_to_dict(clip: Clip) -> dict[str, Any]:
    """The clip as plain JSON values; schedules as lists."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: plain(one) for key, one in value.items()}
        return list(value.values) if isinstance(value, ByStep) else value

    values = {f.name: plain(getattr(clip, f.name)) for f in fields(clip)}  # type: ignore[arg-type]
    return {"kind": type(clip).__name__} | values


def clip_from_dict(values: Mapping[str, Any]) -> Clip:
    """The clip that `clip_to_dict` wrote.

    >>> clip_from_dict(clip_to_dict(PerLayerClip({"conv*": 2.0, "*": 1.0})))
    PerLayerClip(bounds={'conv*': 2.0, '*': 1.0})
    """

    def rich(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: rich(one) for key, one in value.items()}
        return ByStep(tuple(value)) if isinstance(value, list) else value

    kinds: dict[str, Any] = {kind.__name__: kind for kind in (FlatClip, PerLayerClip, AutomaticClip, QuantileClip)}
    name = values.get("kind")
    if name not in kinds:
        raise ValueError(f"expected one of {', '.join(kinds)}; got {name!r}")
    return kinds[name](**{key: rich(value) for key, value in values.items() if key != "kind"})


def _written_out(clip: Clip, steps: int) -> Clip:
    """The clip with functions of the step replaced by their values, so that the plan can be saved and compared."""

    def write(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: write(one) for key, one in value.items()}
        if not callable(value):
            return value
        values = tuple(float(value(step)) for step in range(steps))
        return values[0] if len(set(values)) == 1 else ByStep(values)

    for step in range(steps):
        clip.at(step)  # refuses bounds that make no sense before anything is charged
        if clip.at(step) == clip:
            break
    new: Clip = replace(clip, **{f.name: write(getattr(clip, f.name)) for f in fields(clip)})  # type: ignore[type-var, arg-type]
    return new


def _schedule(name: str, value: Any, steps: int) -> tuple[float, ...]:
    """The schedule as one value, if it never changes, or as one for each step."""
    if callable(value):
        value = tuple(value(step) for step in range(steps))
    if not isinstance(value, tuple | list):
        return (float(value),)
    if len(value) != steps:
        raise ValueError(f"{name} as a schedule needs one value for each of {steps} steps, got {len(value)}")
    values = tuple(float(one) for one in value)
    return values[:1] if len(set(values)) == 1 else values


def _whole(name: str, value: Any, *, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ValueError(f"{name} must be a whole number >= {at_least}, got {value!r}")
