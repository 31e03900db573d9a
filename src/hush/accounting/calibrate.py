"""Noise, steps or lot size for a budget; always rounded to the private side.

Every answer was itself put to the accountant and found within the budget: a search that goes wrong can only end in too
much privacy. `spent` is what the same data already gave away; it is composed with the candidate, never forgotten.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import TypeVar

from hush.accounting.accountants import NOT_VALID, Accountant, epsilon
from hush.accounting.bounds import Budget
from hush.accounting.events import NOTHING, Event

TOLERANCE = 1e-4  # a noise is at most this fraction above the smallest that fits; steps and lot sizes are exact
MOST = 10**9

T = TypeVar("T", int, float)


def noise(
    event_for: Callable[[float], Event], budget: Budget, *, spent: Event = NOTHING, accountant: Accountant = "pld"
) -> float:
    """The smallest noise multiplier, to a relative 1e-4 and never below, for which `event_for(noise)` fits the budget.

    >>> from hush.accounting.events import Gaussian
    >>> round(noise(Gaussian, Budget(epsilon=1.0, delta=1e-5), accountant="renyi"), 2)
    4.05
    """
    _require_room(budget, spent, accountant)
    start = 1.0
    if accountant == "pld":  # Renyi's answer is quick and never below what the default accountant needs
        start = smallest(_measure(event_for, budget, spent, "renyi"), budget.epsilon)
    return smallest(_measure(event_for, budget, spent, accountant), budget.epsilon, start=start)


def steps(
    event_for: Callable[[int], Event],
    budget: Budget,
    *,
    spent: Event = NOTHING,
    accountant: Accountant = "pld",
    at_most: int = MOST,
) -> int:
    """The largest number of steps, up to at_most, for which `event_for(steps)` fits the budget; 0 if not one does.

    >>> from hush.accounting.events import Gaussian
    >>> steps(lambda n: Gaussian(20.0) * n, Budget(epsilon=1.0, delta=1e-5), accountant="renyi")
    24
    """
    _require_room(budget, spent, accountant)
    start = 1
    if accountant == "pld":
        start = largest(_measure(event_for, budget, spent, "renyi"), budget.epsilon, at_most=at_most)
    return largest(_measure(event_for, budget, spent, accountant), budget.epsilon, at_most=at_most, start=start)


def lot_size(
    event_for: Callable[[int], Event],
    budget: Budget,
    *,
    examples: int,
    spent: Event = NOTHING,
    accountant: Accountant = "pld",
) -> int:
    """The largest expected lot size, up to all examples, for which `event_for(lot_size)` fits the budget.

    0 if none does.
    """
    return steps(event_for, budget, spent=spent, accountant=accountant, at_most=examples)


def smallest(measure: Callable[[float], float], target: float, *, start: float = 1.0) -> float:
    """The smallest x > 0 with measure(x) <= target for a falling measure, to TOLERANCE.

    Measure was seen to hold there.
    """
    measure = cache(measure)
    passes, fails = _bracket(measure, target, start, limits=(1e-6, 1e12), rising=False)
    if math.isnan(passes):
        raise ValueError(
            f"no noise up to 1e12 brings epsilon down to {target:g}; ask for fewer steps or a larger budget"
        )
    if math.isnan(fails):
        return passes
    return _close_in(measure, target, passes, fails, apart=TOLERANCE * fails)


def largest(measure: Callable[[int], float], target: float, *, at_most: int, start: int = 1) -> int:
    """The largest whole n in [0, at_most] with measure(n) <= target for a rising measure.

    0 if measure(1) is above it.
    """

    @cache
    def whole(x: float) -> float:
        return measure(round(x))

    passes, fails = _bracket(whole, target, min(max(start, 1), at_most), limits=(1, at_most), rising=True)
    if math.isnan(passes):
        return 0
    if math.isnan(fails):
        return round(passes)
    return round(_close_in(whole, target, passes, fails, apart=1.0, whole=True))


def _measure(
    event_for: Callable[[T], Event], budget: Budget, spent: Event, accountant: Accountant
) -> Callable[[T], float]:
    return lambda x: epsilon(spent + event_for(x), delta=budget.delta, accountant=accountant).upper


def _require_room(budget: Budget, spent: Event, accountant: Accountant) -> None:
    if accountant in NOT_VALID:
        raise ValueError(
            f"{accountant} is not a valid bound ({NOT_VALID[accountant]}); calibrate with another accountant"
        )
    if spent == NOTHING:
        return
    already = epsilon(spent, delta=budget.delta, accountant=accountant).upper
    if already > budget.epsilon:
        raise ValueError(
            f"the budget is already spent: epsilon {already:.4g} of {budget.epsilon:g} at delta {budget.delta:g}"
        )


def _bracket(
    measure: Callable[[float], float], target: float, start: float, *, limits: tuple[float, float], rising: bool
) -> tuple[float, float]:
    """Gallop from start to neighbours on both sides of the target: (passes, fails), nan where a limit came first."""
    bottom, top = limits
    passes = fails = math.nan
    x, factor = start, 1.1
    while True:
        inside = measure(x) <= target
        passes, fails = (x, fails) if inside else (passes, x)
        if not (math.isnan(passes) or math.isnan(fails)):
            return passes, fails
        upwards = inside == rising
        if x >= top if upwards else x <= bottom:
            return passes, fails
        stride = max(x * (factor - 1), 1.0) if rising else x * (factor - 1)
        x = min(x + stride, top) if upwards else max(min(x / factor, x - 1 if rising else x), bottom)
        x = float(round(x)) if rising else x
        factor = min(factor * factor, 1e3)


def _close_in(
    measure: Callable[[float], float], target: float, passes: float, fails: float, *, apart: float, whole: bool = False
) -> float:
    """Shrink the bracket until its ends are `apart` and return the passing end.

    The ITP method (Oliveira and Takahashi 2020) on logarithms: interpolation, pulled a little towards the middle so
    that both ends move, and never more than one probe beyond bisection. Each probe may cost a second.
    """

    def height(value: float) -> float:
        return math.log(max(value, 1e-12) / target)

    heights = {x: height(measure(x)) for x in (passes, fails)}
    resolution = math.log1p(apart / max(passes, fails))
    allowed = math.ceil(math.log2(max(abs(math.log(passes / fails)) / resolution, 1))) + 1
    while abs(passes - fails) > apart * (1 + 1e-12):
        start, width = math.log(passes), math.log(fails / passes)
        low, high = heights[passes], heights[fails]
        share = -low / (high - low) if high > low else 0.5
        share += math.copysign(min(0.2 * abs(width), abs(0.5 - share)), 0.5 - share)
        radius = max(resolution * 2.0**allowed / 2 / abs(width) - 0.5, 0.0)
        share = min(max(share, 0.5 - radius), 0.5 + radius)
        x = math.exp(start + share * width)
        if whole:
            x = float(min(max(round(x), min(passes, fails) + 1), max(passes, fails) - 1))
        value = measure(x)
        heights[x] = height(value)
        passes, fails = (x, fails) if value <= target else (passes, x)
        allowed -= 1
    return passes
