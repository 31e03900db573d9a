"""From a composition to certified bounds: choose a grid, compose, solve, refine until the interval is narrow."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hush.accounting.pld import pilot
from hush.accounting.pld.compose import Tail, compose
from hush.accounting.pld.curves import Curve
from hush.accounting.pld.discretise import Grid, optimistic, pessimistic

RELATIVE, ABSOLUTE = 1e-3, 1e-4  # the interval aimed at: 0.1 % of epsilon, or 1e-4
_SMALLEST = 1e-290
_ROUNDS = 5


@dataclass(frozen=True)
class Part:
    """One mechanism and its count; where a curve is itself only bounded, above and below differ."""

    above: Curve
    below: Curve
    count: int

    def reversed(self) -> "Part":
        return Part(self.above.reversed(), self.below.reversed(), self.count)


@dataclass(frozen=True)
class Interval:
    lower: float
    upper: float


def epsilon(parts: Sequence[Part], delta: float) -> Interval:
    """Bounds on epsilon in both directions of adjacency: the larger one counts."""
    return _both(parts, lambda direction: _epsilon(direction, delta))


def delta(parts: Sequence[Part], epsilon: float) -> Interval:
    return _both(parts, lambda direction: _delta(direction, epsilon))


def _both(parts: Sequence[Part], ask: Callable[[Sequence[Part]], Interval]) -> Interval:
    forward = ask(parts)
    if all(part.above.symmetric and part.below.symmetric for part in parts):
        return forward
    backward = ask([part.reversed() for part in parts])
    return Interval(max(forward.lower, backward.lower), max(forward.upper, backward.upper))


def _epsilon(parts: Sequence[Part], target: float) -> Interval:
    atoms = _atoms(parts, target)
    saddle = pilot.saddle_for(atoms, log_delta=math.log(target))
    tolerance = 0.2 * max(RELATIVE * saddle.mean, ABSOLUTE)
    best = Interval(0.0, math.inf)
    for _ in range(_ROUNDS):
        pair = _tails(parts, atoms, saddle, tolerance, target)
        nudge = 0.02 * max(RELATIVE * saddle.mean, ABSOLUTE)
        upper = _solve_upper(pair.above, max(saddle.mean, 0.0), target, nudge)
        lower = _solve_lower(pair.below, max(saddle.mean, 0.0), target, nudge)
        best = Interval(max(best.lower, lower), min(best.upper, upper))
        width, goal = best.upper - best.lower, 0.9 * max(RELATIVE * best.upper, ABSOLUTE)
        if width <= goal or pair.finest:
            break
        tolerance *= min(0.4, max(0.02, 0.6 * goal / width))
    return best


def _delta(parts: Sequence[Part], epsilon: float) -> Interval:
    target = 1e-20
    for _ in range(4):
        atoms = _atoms(parts, target)
        saddle = pilot.saddle_for(atoms, epsilon=epsilon)
        if saddle.log_delta >= math.log(target):
            break
        target = max(math.exp(max(1.1 * saddle.log_delta, -660.0)), _SMALLEST)
    target = max(min(target, 1.0), math.exp(max(min(saddle.log_delta, 0.0), -660.0)))
    tolerance = 0.1 * RELATIVE / (saddle.tilt + 1)
    best = Interval(0.0, 1.0)
    for _ in range(_ROUNDS):
        pair = _tails(parts, atoms, saddle, tolerance, target)
        best = Interval(max(best.lower, pair.below.delta(epsilon)[0]), min(best.upper, pair.above.delta(epsilon)[1]))
        if best.upper - best.lower <= RELATIVE * best.upper or pair.finest:
            break
        tolerance *= 0.2
    return best


def _atoms(parts: Sequence[Part], target: float) -> list[pilot.Atoms]:
    negligible = 1e-6 * target / sum(part.count for part in parts)
    return [pilot.atoms_of(part.above, part.count, negligible) for part in parts]


@dataclass(frozen=True)
class _Pair:
    above: Tail
    below: Tail
    finest: bool


def _tails(
    parts: Sequence[Part], atoms: Sequence[pilot.Atoms], saddle: pilot.Saddle, tolerance: float, target: float
) -> _Pair:
    """The composition once too large, once too small, on a grid that should keep epsilon within the tolerance."""
    share = min(max(0.02 * saddle.tilt * tolerance, 1e-8), 1e-4)
    negligible = max(share * target / sum(part.count for part in parts), 1e-300)
    ends = [
        pilot.extent(a, p.above, saddle, negligible=negligible) for a, p in zip(atoms, parts, strict=True)
    ]
    step = pilot.step_for(atoms, saddle, tolerance)
    longest = max(high - low for low, high in ends)
    finest = False
    while True:
        window = pilot.window_for(atoms, saddle, outside=share * saddle.weight, step=step)
        excess = max(window.size, longest / step) / pilot.LARGEST_SIZE
        if excess <= 1:
            break
        step, finest = step * 1.5, True
    above: list[tuple[Grid, int]] = []
    below: list[tuple[Grid, int]] = []
    for part, (low, high) in zip(parts, ends, strict=True):
        first, last = min(math.floor(low / step), -1), max(math.ceil(high / step), 1)
        above.append((pessimistic(part.above, first, last, step), part.count))
        below.append((optimistic(part.below, first, last, step), part.count))
    return _Pair(compose(above, window), compose(below, window), finest)


def _solve_upper(tail: Tail, start: float, target: float, nudge: float) -> float:
    """An epsilon at which the upper bound of delta is at most the target; infinite if none was found."""
    if tail.delta(0.0)[1] <= target:
        return 0.0
    guess = _newton(lambda at: tail.delta(at)[1:], start, target, nudge)
    for _ in range(60):
        guess += nudge
        if tail.delta(guess)[1] <= target:
            return guess * (1 + 1e-13)
        nudge *= 2
    return math.inf


def _solve_lower(tail: Tail, start: float, target: float, nudge: float) -> float:
    """An epsilon at which the lower bound of delta is still above the target; 0 if none was found."""
    guess = _newton(lambda at: (tail.delta(at)[0], tail.delta(at)[2]), start, target, nudge)
    for _ in range(60):
        guess -= nudge
        if guess <= 0:
            return 0.0
        if tail.delta(guess)[0] > target:
            return guess * (1 - 1e-13)
        nudge *= 2
    return 0.0


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
