"""Noise whose law is not quite the one that is accounted: what that costs, taken out of delta."""

import math
from collections.abc import Callable

from hush.accounting.bounds import Bounds

SET_ASIDE = 2.0**-30
"""The part of delta that is enough for every ordinary run."""
_SHARES = (SET_ASIDE, 2.0**-20, 2.0**-10, 2.0**-3)
"""Parts of delta that may be set aside, the smallest that is enough."""


def added_delta(distance: float, epsilon: float) -> float:
    """What to add to delta at this epsilon where everything released lies within `distance` of the accounted law.

    Two laws within t (in total variation) of laws that are (epsilon, delta) close are (epsilon, delta + (1 + e^epsilon)
    t) close.

    >>> f"{added_delta(1e14 * 2.0**-112, 8.0):.1e}"
    '5.7e-17'
    """
    return (1 + math.exp(epsilon)) * distance if epsilon < 700 else math.inf


def epsilon_of_inexact(epsilon_at: Callable[[float], Bounds], *, delta: float, distance: float) -> Bounds:
    """Epsilon at `delta` of a run within `distance` of the exact one, whose epsilon at any delta `epsilon_at` knows.

    Guarantee: the upper bound u satisfies delta(u) + added_delta(distance, u) <= delta; it is infinite where not even
    an eighth of delta is enough to set aside.

    >>> exact = lambda delta: Bounds(-math.log(delta), -math.log(delta))
    >>> epsilon_of_inexact(exact, delta=1e-5, distance=0.0) == exact(1e-5)
    True
    >>> epsilon_of_inexact(exact, delta=1e-5, distance=1e-20).upper > exact(1e-5).upper
    True
    """
    if distance == 0:
        return epsilon_at(delta)
    for share in _SHARES:
        upper = epsilon_at(delta * (1 - share)).upper
        if added_delta(distance, upper) <= share * delta:
            return Bounds(min(upper, epsilon_at(min(delta * (1 + share), 0.5 + delta / 2)).lower), upper)
    return Bounds(0.0, math.inf)
