"""Privacy loss distributions with certified two-sided bounds.

Discretisation, truncation and the round-off of the Fourier transform are all counted, in both directions of adjacency:
the true value lies between `lower` and `upper`.
"""

import math
from collections.abc import Callable

from hush.accounting import renyi
from hush.accounting.bounds import Bounds
from hush.accounting.events import Event
from hush.accounting.failures import answers_delta, answers_epsilon
from hush.accounting.pld import exact, query
from hush.accounting.pld.parts import parts_of_event
from hush.accounting.reductions import at_least, at_most, pure_total

__all__ = ["delta", "epsilon"]

_ALLOCATION_DELTA = 1e-8  # how far out an allocation is resolved when delta is what is asked for


@answers_epsilon
def epsilon(event: Event, *, delta: float) -> Bounds:
    """The smallest epsilon at this delta, between two certified bounds.

    The interval is aimed at 0.1 % of epsilon or 1e-4, whichever is wider; where that cannot be reached it is wider and
    still valid. It is never above the Renyi accountant's answer.

    >>> from hush.accounting.events import Gaussian, PoissonSampled
    >>> bounds = epsilon(PoissonSampled(0.01, Gaussian(4.0)) * 10_000, delta=1e-5)
    >>> 0.9463 < bounds.lower <= bounds.upper < 0.9473
    True
    """

    def ask(certain: Event) -> query.Interval:
        parts = parts_of_event(certain, delta=delta)
        if not parts:
            return query.Interval(0.0, 0.0)
        single = len(parts) == 1 and parts[0].count == 1
        return exact.epsilon(parts[0], delta) if single else query.epsilon(parts, delta)

    found = _both_sides(event, ask)
    upper = found.upper
    if upper == math.inf or upper - found.lower > max(query.RELATIVE * upper, query.ABSOLUTE):
        upper = min(upper, renyi.epsilon(event, delta=delta).upper)
    return Bounds(found.lower, max(found.lower, upper))


@answers_delta
def delta(event: Event, *, epsilon: float) -> Bounds:
    """The smallest delta at this epsilon, between two certified bounds.

    >>> from hush.accounting.events import Gaussian
    >>> bounds = delta(Gaussian(1.0), epsilon=1.0)
    >>> 0.12693 < bounds.lower <= bounds.upper < 0.12694
    True
    """

    def ask(certain: Event) -> query.Interval:
        parts = parts_of_event(certain, delta=_ALLOCATION_DELTA)
        if pure_total(certain) <= epsilon:
            return query.Interval(0.0, 0.0)
        single = len(parts) == 1 and parts[0].count == 1
        return exact.delta(parts[0], epsilon) if single else query.delta(parts, epsilon)

    found = _both_sides(event, ask)
    upper = found.upper
    if upper - found.lower > query.RELATIVE * upper:
        upper = min(upper, renyi.delta(event, epsilon=epsilon).upper)
    if upper == 0 and pure_total(event) > epsilon:
        upper = math.ulp(0.0)  # the truth is positive, and smaller than any float
    return Bounds(found.lower, max(found.lower, upper))


def _both_sides(event: Event, ask: Callable[[Event], query.Interval]) -> query.Interval:
    """The event's upper bound, and a lower bound that holds for the event itself and not only for its upper bound's."""
    most, least = at_most(event), at_least(event)
    above = ask(most)
    return above if least == most else query.Interval(min(ask(least).lower, above.upper), above.upper)
