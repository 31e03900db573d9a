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
    forward = _epsilon(parts, delta)
    if _symmetric(parts) or _largest_reversed_loss(parts) <= forward.lower:
        return forward
    return _larger(forward, _epsilon([part.reversed() for part in parts], delta))


def delta(parts: Sequence[Part], epsilon: float) -> Interval:
    """Bounds on delta in both directions of adjacency: the larger one counts."""
    forward = _delta(parts, epsilon)
    if _symmetric(parts) or _largest_reversed_loss(parts) <= epsilon:
        return forward
    return _larger(forward, _delta([part.reversed() for part in parts], epsilon))


def _symmetric(parts: Sequence[Part]) -> bool:
    return all(part.above.symmetric and part.below.symmetric for part in parts)


def _largest_reversed_loss(parts: Sequence[Part]) -> float:
    """The reversed loss of a sampled mechanism is bounded: R >= 1 - rate. Rounded up."""
    if any(part.above.anchor >= 0 for part in parts):
        return math.inf
    return -(1 + 1e-12) * sum(part.count * part.above.anchor for part in parts)


def _larger(one: Interval, other: Interval) -> Interval:
    return Interval(max(one.lower, other.lower), max(one.upper, other.upper))


def _epsilon(parts: Sequence[Part], target: float) -> Interval:
    atoms = _atoms(parts, target)
    best = Interval(0.0, math.inf)
    for saddle in pilot.saddles_for_delta(atoms, math.log(target)):
        tolerance = 0.2 * max(RELATIVE * saddle.mean, ABSOLUTE)
        for round_ in range(_ROUNDS):
            pair = _tails(parts, atoms, saddle, _Aim(target, tolerance, 8.0 * 4**round_))
            nudge = 0.02 * max(RELATIVE * saddle.mean, ABSOLUTE)
            upper = _solve_upper(pair.above, max(saddle.mean, 0.0), target, nudge)
            lower = _solve_lower(pair.below, max(saddle.mean, 0.0), target, nudge)
            best = Interval(max(best.lower, lower), min(best.upper, upper))
            width, goal = best.upper - best.lower, 0.95 * max(RELATIVE * best.upper, ABSOLUTE)
            if best.upper < math.inf and width <= goal:
                return best
            if pair.finest:
                break
            tolerance *= min(0.4, max(0.02, 0.6 * goal / width)) if width < math.inf else 0.4
    return best


def _delta(parts: Sequence[Part], epsilon: float) -> Interval:
    target = 1e-20
    for _ in range(4):
        atoms = _atoms(parts, target)
        saddle = pilot.saddle_for_epsilon(atoms, epsilon)
        if saddle.log_delta >= math.log(target):
            break
        target = max(math.exp(max(1.1 * saddle.log_delta, -660.0)), _SMALLEST)
    target = max(min(target, 1.0), math.exp(max(min(saddle.log_delta, 0.0), -660.0)))
    tolerance = 0.1 * RELATIVE / (saddle.tilt + 1)
    best = Interval(0.0, 1.0)
    for round_ in range(_ROUNDS):
        pair = _tails(parts, atoms, saddle, _Aim(target, tolerance, 8.0 * 4**round_))
        best = Interval(max(best.lower, pair.below.delta(epsilon)[0]), min(best.upper, pair.above.delta(epsilon)[1]))
        if best.upper - best.lower <= RELATIVE * best.upper or pair.finest:
            break
        tolerance *= 0.2
    return best


def _atoms(parts: Sequence[Part], target: float) -> list[pilot.Atoms]:
    negligible = 1e-6 * target / sum(part.count for part in parts)
    return [pilot.atoms_of(part.above, part.count, negligible) for part in parts]


@dataclass(frozen=True)
class _Aim:
    """How fine a grid shall be: the delta that matters, the error of epsilon allowed, points per deviation at least."""

    target: float
    tolerance: float
    per_deviation: float


@dataclass(frozen=True)
class _Pair:
    above: Tail
    below: Tail
    finest: bool


def _tails(parts: Sequence[Part], atoms: Sequence[pilot.Atoms], saddle: pilot.Saddle, aim: _Aim) -> _Pair:
    """The composition once too large, once too small, on a grid that should keep epsilon within the tolerance."""
    share = min(max(0.02 * saddle.tilt * aim.tolerance, 1e-8), 1e-4)
    step = pilot.step_for(atoms, saddle, aim.tolerance, aim.per_deviation)
    reach = [(pilot.lowest(a, saddle), float(a.losses[-1])) for a in atoms]
    longest = max(high - low for low, high in reach)
    finest = False
    while True:
        window = pilot.window_for(atoms, saddle, outside=share * saddle.weight, step=step)
        if max(window.size, longest / step) <= pilot.LARGEST_SIZE:
            break
        step, finest = step * 1.5, True
    for lattice in [part.above.lattice for part in parts if part.above.lattice > 0][:1]:
        step = lattice / math.ceil(lattice / step)
    above: list[tuple[Grid, int]] = []
    below: list[tuple[Grid, int]] = []
    for part, (low, high) in zip(parts, reach, strict=True):
        last = max(math.ceil(high / step) + 1, 2)
        above.append((pessimistic(part.above, min(math.floor(low / step), -2), last, step), part.count))
        low = max(min(low, pilot.lowest_put(part.below)), high - step * pilot.LARGEST_SIZE)
        below.append((optimistic(part.below, min(math.floor(low / step), -2), last, step), part.count))
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
    guess = _newton(lambda at: tail.delta(at)[::2], start, target, nudge)
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
