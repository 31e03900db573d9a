"""From a composition to certified bounds: choose a grid, compose, solve, refine until the interval is narrow."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hush.accounting.pld import pilot
from hush.accounting.pld.compose import Tail, compose
from hush.accounting.pld.curves import Array, Curve
from hush.accounting.pld.discretise import Grid, optimistic, pessimistic
from hush.accounting.pld.jumps import Split, split
from hush.accounting.pld.solve import solve_lower, solve_upper

RELATIVE, ABSOLUTE = 1e-3, 1e-4  # the interval aimed at: 0.1 % of epsilon, or 1e-4
_SMALLEST = 1e-290
_ROUNDS = 5
_LEAST_HEIGHT, _LARGEST_LOSS = 1e-60, 1e6
_LEAST = 1 << 16
_WORK = 3 << 21  # points of all grids for one direction: some seconds, and some hundred MB


@dataclass(frozen=True)
class Part:
    """One mechanism and its count."""

    curve: Curve
    count: int

    def reversed(self) -> "Part":
        return Part(self.curve.reversed(), self.count)


@dataclass(frozen=True)
class Interval:
    lower: float
    upper: float


def epsilon(parts: Sequence[Part], delta: float) -> Interval:
    """Bounds on epsilon in both directions of adjacency: the larger one counts."""
    forward = _epsilon(parts, delta)
    if _symmetric(parts) or _largest_reversed_loss(parts) <= forward.lower:
        return forward
    return _larger(forward, _epsilon([part.reversed() for part in parts], delta, beside=forward.upper))


def delta(parts: Sequence[Part], epsilon: float) -> Interval:
    """Bounds on delta in both directions of adjacency: the larger one counts."""
    forward = _delta(parts, epsilon)
    if _symmetric(parts) or _largest_reversed_loss(parts) <= epsilon:
        return forward
    return _larger(forward, _delta([part.reversed() for part in parts], epsilon, beside=forward.upper))


def tails_at(parts: Sequence[Part], epsilons: Sequence[float]) -> Iterator[tuple[float, Tail]]:
    """The composition once too large, in one direction, tilted towards each of these epsilons: for a whole curve."""
    atoms = _atoms(parts, 1e-30)
    for epsilon in epsilons:
        saddle = pilot.saddle_for_epsilon(atoms, epsilon)
        target = math.exp(max(min(saddle.log_delta, 0.0), -660.0))
        tail = _tails(
            parts, atoms, saddle, _Aim(target, 0.1 * RELATIVE / (saddle.tilt + 1), 8.0, 1 << 18), both=False
        ).above
        assert isinstance(tail, Tail)
        yield epsilon, tail


def _symmetric(parts: Sequence[Part]) -> bool:
    return all(part.curve.symmetric for part in parts)


def _largest_reversed_loss(parts: Sequence[Part]) -> float:
    """The reversed loss of a sampled mechanism is bounded: R >= 1 - rate. Rounded up."""
    if any(part.curve.anchor >= 0 for part in parts):
        return math.inf
    return -(1 + 1e-12) * sum(part.count * part.curve.anchor for part in parts)


def _larger(one: Interval, other: Interval) -> Interval:
    return Interval(max(one.lower, other.lower), max(one.upper, other.upper))


def _epsilon(parts: Sequence[Part], target: float, *, beside: float = 0.0) -> Interval:
    """The interval of one direction; no more than a bound is needed where the other one is `beside` it and larger."""
    if not _resolved(parts):
        return Interval(0.0, math.inf)
    atoms = _atoms(parts, target)
    saddle, whole = pilot.saddle_for_delta(atoms, math.log(target))
    start = _Guess(max(saddle.mean, 0.0), saddle.tilt)

    work = _Work()

    def tilted(_: _Guess, aim: _Aim) -> _Pair:
        return _tails(parts, atoms, saddle, replace(aim, most=2 * aim.most) if whole else aim)

    def jumping(guess: _Guess, aim: _Aim) -> _Pair:
        return _splits(parts, atoms, guess, aim)

    jump = _Guess(*pilot.one_jump(atoms, math.log(target)))
    ways = [(tilted, start), (jumping, jump)] if whole or target > 1e-3 else [(jumping, jump), (tilted, start)]
    if any(part.curve.lattice > 0 for part in parts):
        ways = [(tilted, start)]  # few losses, all of one size
    best = Interval(0.0, math.inf)

    def done(found: Interval) -> bool:
        return _width_over_goal(found) <= 1 or found.upper <= beside

    for way, guess in ways:
        best = _refined(way, guess, target, best, work, done)
        if done(best):
            break
    return best


def _refined(
    way: Callable[["_Guess", "_Aim"], "_Pair"],
    guess: "_Guess",
    target: float,
    best: Interval,
    work: "_Work",
    done: Callable[[Interval], bool],
) -> Interval:
    """The interval after up to a few rounds on ever finer grids."""
    tolerance = 0.2 * max(RELATIVE * guess.epsilon, ABSOLUTE)
    for round_ in range(_ROUNDS):
        pair = work.done(way(guess, work.within(_Aim(target, tolerance, 8.0 * 4**round_))))
        nudge = 0.02 * max(RELATIVE * guess.epsilon, ABSOLUTE)
        upper = solve_upper(pair.above, guess.epsilon, target, nudge)
        lower = solve_lower(pair.below, guess.epsilon, target, nudge)
        best = Interval(max(best.lower, lower), min(best.upper, upper))
        over = _width_over_goal(best)
        if done(best) or pair.finest or work.spent(pair):
            break
        if upper < math.inf:
            guess = _Guess(upper, max(pair.above.delta(upper)[2] / target, 0.0))
        tolerance *= min(0.4, max(0.02, 0.6 / over))
    return best


def _width_over_goal(found: Interval) -> float:
    if found.upper == math.inf:
        return math.inf
    return (found.upper - found.lower) / (0.95 * max(RELATIVE * found.upper, ABSOLUTE))


def _delta(parts: Sequence[Part], epsilon: float, *, beside: float = 0.0) -> Interval:
    if not _resolved(parts):
        return Interval(0.0, 1.0)
    target = 1e-20
    for _ in range(4):
        atoms = _atoms(parts, target)
        saddle = pilot.saddle_for_epsilon(atoms, epsilon)
        if saddle.log_delta >= math.log(target):
            break
        target = max(math.exp(max(1.1 * saddle.log_delta, -660.0)), _SMALLEST)
    target = max(min(target, 1.0), math.exp(max(min(saddle.log_delta, 0.0), -660.0)))
    tolerance = 0.1 * RELATIVE / (saddle.tilt + 1)
    best, work = Interval(0.0, 1.0), _Work()
    for round_ in range(_ROUNDS):
        pair = work.done(_tails(parts, atoms, saddle, work.within(_Aim(target, tolerance, 8.0 * 4**round_))))
        best = _at(pair, epsilon, best)
        if best.upper - best.lower <= RELATIVE * best.upper or best.upper <= beside:
            return best
        if pair.finest or work.spent(pair):
            break
        tolerance *= 0.2
    if not any(part.curve.lattice > 0 for part in parts):
        for round_ in range(3):
            aim = _Aim(max(best.lower or best.upper, _SMALLEST), 0.1 * RELATIVE / (saddle.tilt + 1), 8.0 * 4**round_)
            pair = work.done(_splits(parts, atoms, _Guess(epsilon, saddle.tilt), work.within(aim)))
            best = _at(pair, epsilon, best)
            if (
                best.upper - best.lower <= RELATIVE * best.upper
                or best.upper <= beside
                or pair.finest
                or work.spent(pair)
            ):
                break
    return best


def _at(pair: "_Pair", epsilon: float, best: Interval) -> Interval:
    """The interval at this epsilon, where it is narrower than the best so far; losses are blurred by round-off."""
    low = pair.below.delta(epsilon + pair.below.blur)[0]
    high = pair.above.delta(max(0.0, epsilon - pair.above.blur))[1]
    return Interval(max(best.lower, low), min(best.upper, high))


def _resolved(parts: Sequence[Part]) -> bool:
    """Whether all losses are of sizes that a grid can hold: not all but nothing, and not beyond a million."""
    ends = [part.curve.call(np.array([0.0, _LARGEST_LOSS]))[0] for part in parts]
    return all(
        least > _LEAST_HEIGHT and most <= max(part.curve.floor, 0.5 * least)
        for part, (least, most) in zip(parts, ends, strict=True)
    )


def _atoms(parts: Sequence[Part], target: float) -> list[pilot.Atoms]:
    negligible = 1e-6 * target / sum(part.count for part in parts)
    return [pilot.atoms_of(part.curve, part.count, negligible) for part in parts]


@dataclass(frozen=True)
class _Aim:
    """How fine a grid shall be: the delta that matters, the error of epsilon allowed, points per deviation at least.

    `most` points are not exceeded; where the tilted law is in one piece, patience pays.
    """

    target: float
    tolerance: float
    per_deviation: float
    most: int = pilot.USUAL_SIZE


@dataclass(frozen=True)
class _Pair:
    above: Tail | Split
    below: Tail | Split
    finest: bool
    size: int


class _Work:
    """A bound on the time and the memory of one question: what is left of the points that all its grids may have."""

    def __init__(self) -> None:
        self._left = _WORK

    def within(self, aim: _Aim) -> _Aim:
        return replace(aim, most=max(min(aim.most, 1 << (self._left.bit_length() - 1)), _LEAST))

    def done(self, pair: _Pair) -> _Pair:
        self._left = max(self._left - pair.size, 1)
        return pair

    def spent(self, pair: _Pair) -> bool:
        """Whether a grid finer than the last one would be too much."""
        return 2 * pair.size > self._left


@dataclass(frozen=True)
class _Guess:
    """Roughly the answer, and -d(log delta)/d(epsilon) there."""

    epsilon: float
    slope: float


def _tails(
    parts: Sequence[Part], atoms: Sequence[pilot.Atoms], saddle: pilot.Saddle, aim: _Aim, *, both: bool = True
) -> _Pair:
    """The composition once too large, if `both` once too small, on a grid that should keep epsilon in the tolerance."""
    share = min(max(0.02 * saddle.tilt * aim.tolerance, 1e-8), 1e-4)
    step = pilot.step_for(atoms, saddle, aim.tolerance, aim.per_deviation, saddle.tilt)
    reach = [(pilot.lowest(a, saddle), float(a.losses[-1])) for a in atoms]
    longest = max(high - low for low, high in reach)
    finest = False
    while True:
        window = pilot.window_for(atoms, saddle, outside=share * saddle.weight, step=step)
        if max(window.size, 2 * longest / step) <= aim.most:
            break
        step, finest = step * 1.5, True
    for lattice in [part.curve.lattice for part in parts if part.curve.lattice > 0][:1]:
        step = lattice / math.ceil(lattice / step)
    above: list[tuple[Grid, int]] = []
    below: list[tuple[Grid, int]] = []
    for part, (low, high) in zip(parts, reach, strict=True):
        last = max(math.ceil(high / step) + 1, 2)
        above.append((pessimistic(part.curve, min(math.floor(low / step), -2), last, step), part.count))
        if both:
            low = max(min(low, pilot.lowest_put(part.curve.below)), high - step * aim.most)
            below.append((optimistic(part.curve.below, min(math.floor(low / step), -2), last, step), part.count))
    size = max(window.size, *(len(grid.masses) for grid, _ in above + below))
    larger = compose(above, window)
    return _Pair(larger, compose(below, window) if both else larger, finest, size)


def _splits(parts: Sequence[Part], atoms: Sequence[pilot.Atoms], guess: _Guess, aim: _Aim) -> _Pair:
    """As `_tails`, with the far losses conditioned on: fine near 0, wide steps beyond the cut."""
    goal = max(RELATIVE * guess.epsilon, ABSOLUTE)
    share = min(max(0.02 * guess.slope * goal, 1e-7), 1e-3)  # of delta
    expected = math.sqrt(2 * share * aim.target)
    cut = pilot.cut_for(atoms, expected)
    bodies = pilot.near(atoms, cut)
    calm = pilot.saddle_at(bodies, 0.0)
    saddle = pilot.saddle_against(bodies, guess.epsilon, 25 - math.log(aim.target))
    rate = saddle.tilt * guess.epsilon - saddle.cumulant
    step = pilot.step_for(bodies, calm, aim.tolerance, aim.per_deviation, guess.slope)
    if rate < 7 - math.log(aim.target):
        step = min(step, pilot.step_for(bodies, saddle, aim.tolerance, aim.per_deviation, saddle.tilt))
    reach = [
        (min(pilot.lowest(b, calm), pilot.lowest(b, saddle)), float(a.losses[-1]))
        for a, b in zip(atoms, bodies, strict=True)
    ]
    lowest = min(low for low, _ in reach)
    finest = False
    while True:
        inside = share * min(1.0, math.exp(min(rate + math.log(aim.target), 0.0)))
        body = pilot.window_for(bodies, saddle, outside=inside, step=step)
        beside = pilot.window_for(bodies, calm, outside=share * min(1.0, aim.target / expected), step=step)
        if max(body.size, beside.size, (cut - lowest) / step) <= aim.most:
            break
        step, finest = step * 1.5, True
    above: list[tuple[Grid, int]] = []
    below: list[tuple[Grid, int]] = []
    ratio = 0.032 / math.sqrt(aim.per_deviation)
    for part, (low, high) in zip(parts, reach, strict=True):
        last = max(math.ceil(min(cut, high) / step) + 1, 8)
        far = _far(last * step, high, step, ratio)
        above.append((pessimistic(part.curve, min(math.floor(low / step), -2), last, step, far), part.count))
        low = max(min(low, pilot.lowest_put(part.curve.below)), cut - step * aim.most)
        below.append((optimistic(part.curve.below, min(math.floor(low / step), -2), last, step, far), part.count))
    size = max(body.size, beside.size, *(len(grid.masses) for grid, _ in above + below))
    return _Pair(split(above, body, beside), split(below, body, beside), finest, size)


def _far(start: float, end: float, step: float, ratio: float) -> Array:
    """Losses beyond start, each larger by the ratio, or by a step where that is more."""
    losses = [start]
    while losses[-1] < end:
        losses.append(losses[-1] + max(step, ratio * losses[-1]))
    return np.array(losses[1:])
