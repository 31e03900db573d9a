"""Privacy loss distributions with certified two-sided bounds.

Discretisation, truncation and the round-off of the Fourier transform are all counted, in both directions of adjacency:
the true value lies between `lower` and `upper`.
"""

import math

from hush.accounting import renyi
from hush.accounting.bounds import Bounds
from hush.accounting.events import Event
from hush.accounting.pld import exact, query
from hush.accounting.pld.parts import parts_of_event
from hush.accounting.reductions import require_delta, require_epsilon

__all__ = ["delta", "epsilon"]

_ALLOCATION_DELTA = 1e-8  # how far out an allocation is resolved when delta is what is asked for


def epsilon(event: Event, *, delta: float) -> Bounds:
    """The smallest epsilon at this delta, between two certified bounds.

    The interval is aimed at 0.1 % of epsilon or 1e-4, whichever is wider; where that cannot be reached it is wider and
    still valid. It is never above the Renyi accountant's answer.

    >>> from hush.accounting.events import Gaussian, PoissonSampled
    >>> bounds = epsilon(PoissonSampled(0.01, Gaussian(4.0)) * 10_000, delta=1e-5)
    >>> 0.9463 < bounds.lower <= bounds.upper < 0.9473
    True
    """
    require_delta(delta)
    parts = parts_of_event(event, delta=delta)
    if not parts:
        return Bounds(0.0, 0.0)
    single = len(parts) == 1 and parts[0].count == 1
    found = exact.epsilon(parts[0], delta) if single else query.epsilon(parts, delta)
    upper = found.upper
    if upper == math.inf or upper - found.lower > max(query.RELATIVE * upper, query.ABSOLUTE):
        upper = min(upper, renyi.epsilon(event, delta=delta).upper)
    return Bounds(found.lower, max(found.lower, upper))


def delta(event: Event, *, epsilon: float) -> Bounds:
    """The smallest delta at this epsilon, between two certified bounds.

    >>> from hush.accounting.events import Gaussian
    >>> bounds = delta(Gaussian(1.0), epsilon=1.0)
    >>> 0.12693 < bounds.lower <= bounds.upper < 0.12694
    True
    """
    require_epsilon(epsilon)
    parts = parts_of_event(event, delta=_ALLOCATION_DELTA)
    if not parts:
        return Bounds(0.0, 0.0)
    single = len(parts) == 1 and parts[0].count == 1
    found = exact.delta(parts[0], epsilon) if single else query.delta(parts, epsilon)
    upper = found.upper
    if upper - found.lower > query.RELATIVE * upper:
        upper = min(upper, renyi.delta(event, epsilon=epsilon).upper)
    return Bounds(found.lower, max(found.lower, upper))
