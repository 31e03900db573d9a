"""Plan: lots, steps, clip and noise bound together before training; calibrated to a budget; the event to be charged."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hush import accounting
from hush.accounting import events
from hush.accounting.accountants import Accountant
from hush.accounting.approximate_noise import SET_ASIDE
from hush.accounting.bounds import Bounds, Budget
from hush.accounting.events import NOTHING, Event, compose
from hush.clipping.clips import Clip, QuantileClip
from hush.clipping.written import clip_from_dict, clip_to_dict, written_out
from hush.sampling.lots import Lots, Sampling, lots_of, steps_of
from hush.sampling.lots import from_dict as lots_from_dict

NoiseKind = Literal["gaussian", "float_safe"]
TOO_SMALL = 0.01  # a noise multiplier below this protects nobody (epsilon is in the thousands): said to be infinite


@dataclass(frozen=True, kw_only=True)
class PrivatePreprocessing:
    """An access to the data before training, such as DP-PCA: it is charged with the account and only then done.

    `run()` does it and returns the event that it was, which must be the declared one. It may fill buffers of the
    model; they travel in checkpoints, so a resumed run does not do it again.
    """

    name: str
    event: Event
    run: Callable[[], Event]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that decides the guarantee, fixed before training.

    `noise_multiplier` is joint: the noise of a step has standard deviation noise_multiplier times what one example can
    move the released sums by, over all groups (and the count of QuantileClip) together. It may be a schedule: a
    function of the step, or a tuple with a value for each of the steps + reserve steps; so may the bounds inside
    `clip`, which cost nothing. `reserve` more steps are part of the guarantee without being needed: a run that
    crashed may do again what it lost. `preprocessing` is what the same budget has paid for already (DP-PCA, say);
    `event` and `epsilon` include both. With noise="float_safe" sums are released as integers on a fixed grid, safe
    against attacks on floating point.

    A noise multiplier below 0.01 is allowed for tests and comparisons; the plan is then NOT PRIVATE and says so.

    >>> import hush
    >>> lots = hush.PoissonLots(examples=60_000, lot_size=600)
    >>> plan = Plan(lots=lots, steps=6_000, clip=hush.FlatClip(1.0), noise_multiplier=1.1)
    >>> plan.units
    ((PoissonSampled(rate=0.01, event=Gaussian(noise_multiplier=1.1)), 6000),)
    """

    lots: Lots
    steps: int
    clip: Clip
    noise_multiplier: float | tuple[float, ...] | Callable[[int], float]
    noise: NoiseKind = "gaussian"
    reserve: int = 0
    preprocessing: Event = NOTHING
    budget: Budget | None = None
    accountant: Accountant = "pld"
    cut_short: bool = False  # whether the budget allowed fewer steps than were asked for
    access: PrivatePreprocessing | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.lots, Lots):
            raise TypeError(f"lots must be PoissonLots, AllocatedLots or ShuffledLots, got {type(self.lots).__name__}")
        _whole("steps", self.steps, at_least=1)
        _whole("reserve", self.reserve, at_least=0)
        if self.noise not in ("gaussian", "float_safe"):
            raise ValueError(f"noise must be one of 'gaussian', 'float_safe'; got {str(self.noise)[:50]!r}")
        _valid_accountant(self.accountant)
        if self.access is not None and self.access.event != self.preprocessing:
            raise ValueError(f"preprocessing {self.access.name!r} has another event than the plan was made for")
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
        object.__setattr__(self, "clip", written_out(self.clip, self.steps))

    @classmethod
    def for_budget(
        cls,
        budget: Budget,
        *,
        examples: int,
        lot_size: int,
        clip: Clip,
        epochs: float | None = None,
        steps: int | None = None,
        sampling: Sampling = "poisson",
        noise: NoiseKind = "gaussian",
        noise_multiplier: float | None = None,
        noise_schedule: Callable[[int], float] | None = None,
        preprocessing: "Event | PrivatePreprocessing | None" = None,
        reserve: int = 0,
        accountant: Accountant = "pld",
    ) -> "Plan":
        """The plan with the least noise that keeps the budget over all its steps, next to the preprocessing.

        Guarantee: the returned plan's epsilon at the budget's delta, by the same accountant, is at most the budget's.
        `examples` is the number of records, which is public; give `epochs` or `steps`. `noise_schedule` is the shape of
        the noise over time, a function of the charged step: only its ratios matter. With a `noise_multiplier` the plan
        instead has the most steps that the budget allows, at most those asked for (the paper's "while within limit").

        >>> import hush
        >>> budget, clip = Budget(epsilon=2.0, delta=1e-5), hush.FlatClip(1.0)
        >>> plan = Plan.for_budget(budget, examples=60_000, lot_size=600, epochs=60, clip=clip)
        >>> plan.steps, plan.epsilon(delta=1e-5).upper <= 2.0
        (6000, True)
        """
        if not isinstance(budget, Budget):
            raise TypeError(f"expected budget=hush.Budget(epsilon=..., delta=...), got {budget!r}")
        _whole("reserve", reserve, at_least=0)
        _valid_accountant(accountant)
        lots = lots_of(sampling, examples, lot_size)
        wanted, access, cut_short = steps_of(lots, epochs, steps), None, False
        if isinstance(preprocessing, PrivatePreprocessing):
            access, preprocessing = preprocessing, preprocessing.event
        before, target = preprocessing or NOTHING, budget
        if noise == "float_safe":  # room for what inexact integers add to delta
            target = Budget(epsilon=budget.epsilon, delta=budget.delta * (1 - 2 * SET_ASIDE))
        found: float | tuple[float, ...]
        if noise_multiplier is None:
            shape = _shape(noise_schedule, wanted + reserve)

            def of_plan(multiplier: float) -> Event:
                noises = multiplier if len(shape) == 1 else [multiplier * share for share in shape]
                return compose(lots.units(wanted + reserve, noises))

            found = accounting.calibrate.noise(of_plan, target, spent=before, accountant=accountant)
            found = found if len(shape) == 1 else tuple(found * share for share in shape)
        elif noise_schedule is not None:
            raise ValueError("noise_schedule is a shape for the noise that is found; leave noise_multiplier out")
        else:
            found = noise_multiplier
            asked, wanted = wanted, _most_steps(lots, found, wanted, reserve, target, before, accountant)
            cut_short = wanted < asked
        return cls(
            lots=lots,
            steps=wanted,
            clip=clip,
            noise_multiplier=found,
            noise=noise,
            reserve=reserve,
            preprocessing=before,
            budget=budget,
            accountant=accountant,
            cut_short=cut_short,
            access=access,
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
        """All that the plan may do to the data, with the preprocessing and the reserve."""
        return compose([(self.preprocessing, 1), *self.units])

    def event_after(self, steps: int) -> Event:
        """The preprocessing and the first `steps` steps; a begun epoch of allocated lots counts whole."""
        _whole("steps", steps, at_least=0)
        if steps > self.steps + self.reserve:
            raise ValueError(f"the plan has {self.steps} steps and {self.reserve} in reserve, got {steps}")
        return compose([(self.preprocessing, 1), *self._units(steps)])

    def epsilon(self, *, delta: float, accountant: Accountant | None = None) -> Bounds:
        """The guarantee of the whole plan, reserve included; infinite where the noise is (next to) nothing."""
        if not self.private:
            return Bounds(math.inf if min(self._noise()) == 0 else 0.0, math.inf)
        return accounting.epsilon(self.event, delta=delta, accountant=accountant or self.accountant)

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
            "noise": self.noise,
            "preprocessing": events.to_dict(self.preprocessing),
            "budget": budget,
            "accountant": self.accountant,
            "cut_short": self.cut_short,
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
            noise=values["noise"],
            preprocessing=events.from_dict(values["preprocessing"]),
            budget=Budget(**values["budget"]) if values["budget"] else None,
            accountant=values["accountant"],
            cut_short=values["cut_short"],
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


def _valid_accountant(accountant: str) -> None:
    valid = [name for name in accounting.ACCOUNTANTS if name not in accounting.NOT_VALID]
    if accountant not in valid:
        raise ValueError(f"accountant must be one of {', '.join(valid)}; got {str(accountant)[:50]!r}")


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


def _shape(schedule: Callable[[int], float] | None, steps: int) -> tuple[float, ...]:
    """The shares of a noise schedule, the smallest 1; one share where it never changes."""
    if schedule is None:
        return (1.0,)
    values = [float(schedule(step)) for step in range(steps)]
    if not all(value > 0 and math.isfinite(value) for value in values):
        raise ValueError("noise_schedule must give a finite number > 0 for each charged step, reserve included")
    return _schedule("noise_schedule", [value / min(values) for value in values], steps)


def _most_steps(
    lots: Lots, noise: float, wanted: int, reserve: int, budget: Budget, before: Event, accountant: Accountant
) -> int:
    """The most steps, in whole units and up to those wanted, that the budget allows at this noise."""
    if not TOO_SMALL <= noise <= 1e6:
        raise ValueError(
            f"noise_multiplier must be a number from {TOO_SMALL} to 1e6, got {noise!r}: less protects nobody"
        )
    unit = lots.steps_per_unit
    units = accounting.calibrate.steps(
        lambda count: compose(lots.units(count * unit, noise)),
        budget,
        spent=before,
        accountant=accountant,
        at_most=-(-(wanted + reserve) // unit),
    )
    steps = min(wanted, units * unit - reserve)
    if steps < 1:
        raise ValueError(
            f"the budget, epsilon {budget.epsilon:g} at delta {budget.delta:g}, does not allow one step at noise "
            f"multiplier {noise:g} with {reserve} in reserve: add noise, or leave noise_multiplier out to have it found"
        )
    return steps


def _whole(name: str, value: Any, *, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ValueError(f"{name} must be a whole number >= {at_least}, got {value!r}")
