"""One mechanism used once: the curve itself answers, only its round-off is to be counted."""

import math
from collections.abc import Callable

import numpy as np

from hush.accounting.pld.query import Interval, Part


def delta(part: Part, epsilon: float) -> Interval:
    """Bounds on delta at this epsilon, the larger of both directions."""
    lows, highs = [], []
    for direction in (part, part.reversed()):
        at = np.array([epsilon])
        (value,), (error,) = direction.curve.call(at)
        (low,), (low_error,) = direction.curve.below.call(at)
        lows.append(low - low_error)
        highs.append(value + error)
    return Interval(max(0.0, float(max(lows))), min(1.0, float(max(highs))))


def epsilon(part: Part, delta_: float) -> Interval:
    """Bounds on epsilon at this delta: delta falls in epsilon, so both ends are bisected."""
    upper = _crossing(lambda at: delta(part, at).upper <= delta_)
    lower = _crossing(lambda at: delta(part, at).lower <= delta_)
    # A knot of the bisection is a rounded number; a Gaussian's mean is one too.
    return Interval(lower[0] * (1 - 1e-12), upper[1] * (1 + 1e-12))


def _crossing(small_enough: Callable[[float], bool]) -> tuple[float, float]:
    """Neighbouring epsilons (not yet, yes) around the first at which the predicate holds."""
    if small_enough(0.0):
        return 0.0, 0.0
    high = 1.0
    while not small_enough(high):
        high *= 2
        if high > 1e300:
            return 0.0, math.inf
    low = 0.0
    for _ in range(1100):
        middle = (low + high) / 2
        if not low < middle < high or high - low < 1e-13 * high:
            break
        if small_enough(middle):
            high = middle
        else:
            low = middle
    return low, high
