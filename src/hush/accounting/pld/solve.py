"""Where a composition's bounds on delta reach a target: each answer was itself put to the bound."""

import math
from collections.abc import Callable

from hush.accounting.pld.compose import Tail
from hush.accounting.pld.jumps import Split


def solve_upper(tail: Tail | Split, start: float, target: float, nudge: float) -> float:
    """An epsilon at which the upper bound of delta is at most the target; infinite if none was found."""
    if tail.delta(0.0)[1] <= target:
        return 0.0
    guess = _newton(lambda at: tail.delta(at)[1:], start, target, nudge)
    step = nudge
    for _ in range(60):
        if tail.delta(guess + step)[1] <= target:
            found = _nearest(lambda at: tail.delta(at)[1] <= target, guess + step, guess, nudge)
            return found * (1 + 1e-13) + tail.blur
        guess, step = guess + step, 2 * step
    return math.inf


def solve_lower(tail: Tail | Split, start: float, target: float, nudge: float) -> float:
    """An epsilon at which the lower bound of delta is still above the target; 0 if none was found."""
    guess = _newton(lambda at: tail.delta(at)[::2], start, target, nudge)
    step = nudge
    while guess - step > 0:
        if tail.delta(guess - step)[0] > target:
            found = _nearest(lambda at: tail.delta(at)[0] > target, guess - step, guess, nudge)
            return max(0.0, found * (1 - 1e-13) - tail.blur)
        guess, step = guess - step, 2 * step
    return 0.0


def _nearest(holds: Callable[[float], bool], good: float, bad: float, nudge: float) -> float:
    """A point where the condition was seen to hold, if possible close to `bad` or to one where it fails."""
    for _ in range(16):
        if abs(good - bad) <= 1.5 * nudge:
            break
        middle = (good + bad) / 2
        good, bad = (middle, bad) if holds(middle) else (good, middle)
    return good


def _newton(bound: Callable[[float], tuple[float, float]], start: float, target: float, nudge: float) -> float:
    """Where the bound is roughly the target, by Newton's steps on its logarithm."""
    at = start
    for _ in range(8):
        value, slope = bound(at)
        if not (value > 0 and slope > 0):
            break
        move = math.log(value / target) * value / slope
        at = max(at + move, 0.0)
        if abs(move) < nudge / 2:
            break
    return at
