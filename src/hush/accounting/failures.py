"""Events with a delta of their own: what of the question's delta they take before any accountant is asked.

An Approximate event fails with probability at most d, and a failure may reveal anything. Without the failures the
rest is composed as ever; with them, delta(epsilon) = d + (1 - d) delta_rest(epsilon), d = 1 - prod (1 - d_i). For
black boxes (PureDP inside) that is exact (Kairouz, Oh, Viswanath 2015, Theorem 3.3).
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import scipy

from hush.accounting.bounds import Bounds
from hush.accounting.composition import whole_number
from hush.accounting.events import Approximate, Event, Mechanism, PoissonSampled, compose, parts_of
from hush.accounting.reductions import LEAST_DELTA, require_delta, require_epsilon


def without_failures(event: Event) -> tuple[float, Event]:
    """The probability, rounded up, that one of the approximate events fails, and everything where none does."""
    failing = [(part, count) for part, count in parts_of(event) if isinstance(part, Approximate)]
    if not failing:
        return 0.0, event
    exact = compose((part.event if isinstance(part, Approximate) else part, n) for part, n in parts_of(event))
    inner, exact = without_failures(exact)
    log_none = math.fsum(n * math.log1p(-part.delta) if part.delta < 1 else -math.inf for part, n in failing)
    failure = -math.expm1(log_none) + inner
    return min(1.0, failure * (1 + 1e-13)), exact


def answers_epsilon(answer: Callable[..., Bounds]) -> Callable[..., Bounds]:
    """An accountant's answer to "which epsilon", for events that may fail: put for the delta that failures leave."""

    @functools.wraps(answer)
    def whole(event: Event, *, delta: float, **options: Any) -> Bounds:
        require_delta(delta)
        failure, exact = without_failures(event)
        if failure == 0:
            return answer(exact, delta=delta, **options)
        if delta - failure < LEAST_DELTA:
            return Bounds(math.inf if failure * (1 - 1e-12) > delta else 0.0, math.inf)
        least, most = (delta - failure) / (1 - failure), (delta - failure * (1 - 1e-12)) / (1 - failure)
        low = answer(exact, delta=min(most * (1 + 1e-12), 1 - 2**-53), **options).lower
        return Bounds(low, max(low, answer(exact, delta=least * (1 - 1e-12), **options).upper))

    return whole


def answers_delta(answer: Callable[..., Bounds]) -> Callable[..., Bounds]:
    """An accountant's answer to "which delta", for events that may fail."""

    @functools.wraps(answer)
    def whole(event: Event, *, epsilon: float, **options: Any) -> Bounds:
        require_epsilon(epsilon)
        failure, exact = without_failures(event)
        rest = answer(exact, epsilon=epsilon, **options)
        if failure == 0:
            return rest
        low = (failure + (1 - failure) * rest.lower) * (1 - 1e-12)
        return Bounds(low, min(1.0, (failure + (1 - failure) * rest.upper) * (1 + 1e-15)))

    return whole


def truncated_poisson(rate: float, event: Mechanism, *, examples: int, largest: int) -> Event:
    """Poisson lots of which at most `largest` records are kept, at random, so that a lot has room for all of it.

    Which rows are drawn does not depend on what they hold, and so neither does whether a lot was cut. Where it was not
    cut, a record is in it, given the others, with probability `rate` or not at all; by joint convexity that costs at
    most the Poisson sampled event. A cut lot, of probability P(Binomial(examples, rate) > largest), is given up.

    >>> from hush.accounting.events import Gaussian
    >>> truncated_poisson(0.01, Gaussian(4.0), examples=10_000, largest=150).delta < 1e-5
    True
    """
    sampled = PoissonSampled(rate, event)
    rows = whole_number("examples", examples, least=1)
    most = whole_number("largest", largest, least=0)
    if most >= rows or sampled.rate == 0:
        return sampled
    cut = float(scipy.special.betainc(most + 1, rows - most, sampled.rate)) * (1 + 1e-9)
    return Approximate(min(1.0, max(cut, math.ulp(0.0))), sampled)
