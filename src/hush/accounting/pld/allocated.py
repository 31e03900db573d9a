"""One epoch of random allocation: every record joins one of t lots, uniformly.

The pair is P = 1/t sum_i (record in lot i) against Q = record in no lot (Feldman and Shenfeld, arXiv 2502.08202 and
2602.17284: it dominates the epoch, also when the lots' queries adapt), so R is the mean of t independent ratios of the
one-lot mechanism. As there, the law of R comes from a t-fold convolution. A convex order between ratios
carries over to their mean: ratios once too wide and once too narrow, on a grid of equal steps in R, bound the curve.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import scipy

from hush.accounting.events import Gaussian, Mechanism
from hush.accounting.pld import pilot
from hush.accounting.pld.compose import Tail, compose
from hush.accounting.pld.curves import UNIT, Array, Curve, Evaluated, of_mechanism
from hush.accounting.pld.discretise import Grid, settle
from hush.accounting.pld.lognormal import gaussian_mean

_MOST_POINTS = 1 << 18
_LARGEST_WINDOW = 1 << 20
_OUTSIDE = 1e-26
_MOST_SUMMANDS = 100_000  # of the laws that no grid of equal steps holds


def allocated(mechanism: Mechanism, lots: int, *, delta: float) -> Curve:
    """The epoch's curve with its error, for deltas down to about `delta`; never above the one-lot mechanism's."""
    base = of_mechanism(mechanism)
    negligible = max(1e-5 * delta, 1e-200)
    farthest = _farthest(base, negligible)
    spread = math.sqrt(lots * _variance(base, farthest))
    fine = min(0.01 * spread / math.sqrt(lots), 0.05)
    step = max(fine, (farthest + 20 * spread) / _MOST_POINTS)
    if isinstance(mechanism, Gaussian) and step > 4 * fine and lots <= _MOST_SUMMANDS:
        return replace(gaussian_mean(mechanism.noise_multiplier, lots, farthest), floor=100 * negligible)
    count = max(math.ceil(farthest / step), 8)
    above: list[_Table] = []
    below: list[_Table] = []
    for grid, tables in ((_wide(base, count, step), above), (_narrow(base, count, step), below)):
        if grid is None:
            continue
        atoms = replace(_thinned(grid), count=lots)
        levels = (math.log(1e4), -0.5 * math.log(delta), -math.log(delta))
        up = [_tilt_for(atoms, level) for level in levels]
        for tilt in (0.0, *up, -1e-12, *(-tilt for tilt in up)):
            saddle = pilot.saddle_at([atoms], tilt)
            window = pilot.window_for([atoms], saddle, outside=_OUTSIDE, step=step)
            if window.size <= _LARGEST_WINDOW:
                tables.append(_table(compose([(grid, lots)], window), lots, float(grid.losses[-1])))

    def call(epsilons: Array) -> Evaluated:
        at = np.exp(np.minimum(epsilons, 300.0))
        plain, plain_error = base.call(epsilons)
        upper = np.minimum.reduce([plain + plain_error, *(t.call(at)[1] for t in above if t.tail.tilt >= 0)])
        lower = np.maximum.reduce([np.zeros_like(at), *(t.call(at)[0] for t in below if t.tail.tilt >= 0)])
        return _middle(lower, upper)

    def put(epsilons: Array) -> Evaluated:
        at = np.exp(epsilons)
        plain, plain_error = base.put(epsilons)
        upper = np.minimum.reduce([plain + plain_error, *(t.put(at)[1] for t in above if t.tail.tilt < 0)])
        lower = np.maximum.reduce([np.zeros_like(at), *(t.put(at)[0] for t in below if t.tail.tilt < 0)])
        return _middle(lower, upper)

    return Curve(call, put, False, floor=100 * negligible)


def _middle(lower: Array, upper: Array) -> Evaluated:
    lower = np.minimum(lower, upper)
    return (lower + upper) / 2, (upper - lower) / 2 + 4 * UNIT * upper


def _values(base: Curve, ratios: Array) -> Evaluated:
    """Puts below ratio 1, calls from 1 on."""
    calls = int(np.searchsorted(ratios, 1.0))
    with np.errstate(divide="ignore"):
        logs = np.log(ratios)
    low, low_error = base.put(np.maximum(logs[:calls], -700.0))
    high, high_error = base.call(logs[calls:])
    values = np.concatenate([np.where(ratios[:calls] > 0, low, 0.0), high])
    errors = np.concatenate([low_error, high_error]) + 16 * UNIT * values
    errors[calls - 1 : calls + 1] += 4 * UNIT  # where puts turn into calls, 1 - ratio is off by a unit
    return values, errors


def _variance(base: Curve, farthest: float) -> float:
    """Roughly: a variance is twice the area under the curve."""
    ratios = np.concatenate([np.linspace(0.0, 1.0, 2000), np.geomspace(1.0, farthest, 4000)[1:]])
    return 2 * float(np.trapezoid(_values(base, ratios)[0], ratios))


def _farthest(base: Curve, negligible: float) -> float:
    """A ratio beyond which the one-lot mechanism's delta is negligible."""
    scan = np.geomspace(1e-3, 300.0, 2000)
    below = np.flatnonzero(base.call(scan)[0] <= negligible)
    return math.exp(float(scan[below[0]] if len(below) else scan[-1])) + 1.0


def _masses(values: Array, ratios: Array, step: float) -> Array:
    """Q-masses of the chords through the knots."""
    return np.diff(np.concatenate([[-1.0], _slopes(values, ratios, step), [0.0]]))


def _slopes(values: Array, ratios: Array, step: float) -> Array:
    """Slopes of the chords, between -1 and 0: each is off by at most 4 units, but for the knots around ratio 1."""
    slopes: Array = np.diff(values) / step
    calls = int(np.searchsorted(ratios, 1.0))
    slopes[calls - 1] += (ratios[calls - 1] - 1) / step  # a put becomes a call: call - put = 1 - ratio
    slopes[: calls - 1] -= 1.0
    return slopes


def _wide(base: Curve, count: int, step: float) -> Grid:
    ratios = step * np.arange(count + 1, dtype=np.float64)
    values, errors = _values(base, ratios)
    masses = _masses(values + errors, ratios, step)
    return Grid(step, 0.0, 0, np.maximum(masses + 8 * UNIT, 0.0), float(values[-1] + errors[-1]))


def _narrow(base: Curve, count: int, step: float) -> Grid | None:
    """As the optimistic grid of losses: knots lowered until their chords lie below the curve, then made convex."""
    fine = step / 2 * np.arange(2 * count + 1, dtype=np.float64)
    values, errors = _values(base, fine)
    masses = np.maximum(_masses(values, fine, step / 2), 0.0)
    both = masses[:-1] + masses[1:]
    dip = step / 2 * masses[:-1] * masses[1:] / np.where(both > 0, both, 1.0)
    # One and the same side of 1 within a cell: all values as calls.
    calls = values + np.where(fine < 1, 1 - fine, 0.0)
    sag = np.maximum((calls[:-2:2] + calls[2::2]) / 2 - calls[1::2], 0.0)
    gap = sag + np.maximum(dip[::2], dip[1::2])
    gap += 8 * np.maximum.reduce([errors[:-2:2], errors[1::2], errors[2::2]]) + 16 * UNIT * (fine[:-2:2] < 1)
    ratios = fine[::2]
    lowered = values[::2] - np.maximum(np.append(gap, 0.0), np.insert(gap, 0, 0.0))
    settled = settle(lowered, int(np.searchsorted(ratios, 1.0)))
    if settled is None:
        return None
    fitted = scipy.optimize.isotonic_regression(_slopes(settled, ratios, step))
    slope = np.concatenate([[-1.0], np.clip(fitted.x, -1.0, 0.0), [0.0]])
    # A slope is off by 4 units, a mean of pooled slopes by as many units more as it has terms.
    pooled = np.repeat(np.diff(fitted.blocks), np.diff(fitted.blocks))
    round_off = UNIT * np.concatenate([[8], 8 + 2 * pooled, [8]]) * np.where(slope < 0, np.abs(slope) + UNIT, 0.0)
    return Grid(step, 0.0, 0, np.maximum(np.diff(slope) - round_off[:-1] - round_off[1:], 0.0), 0.0)


def _thinned(grid: Grid) -> pilot.Atoms:
    """The grid in few atoms, dense near 0, for choosing windows."""
    edges = np.unique(np.geomspace(1, len(grid.masses), 1500).astype(int)) - 1
    masses = np.add.reduceat(grid.masses, edges)
    moments = np.add.reduceat(grid.masses * grid.losses, edges)
    kept = masses > 0
    return pilot.Atoms(moments[kept] / masses[kept], masses[kept], 1, 0.0)


def _tilt_for(atoms: pilot.Atoms, exponent: float) -> float:
    """The tilt at which the sum's rate function reaches the exponent."""
    low, high = 0.0, 600.0 / float(atoms.losses[-1])
    for _ in range(40):
        middle = (low + high) / 2
        saddle = pilot.saddle_at([atoms], middle)
        low, high = (middle, high) if middle * saddle.mean - saddle.cumulant < exponent else (low, middle)
    return low


@dataclass(frozen=True)
class _Table:
    """Bounds on calls (tilt >= 0) or puts (tilt <= 0) of the mean of `lots` ratios, read from running sums.

    `sums` holds, for each place, the sums beyond it of mass, mass * ratio, and weight^2 * (1, ratio, ratio^2).
    """

    ratios: Array
    sums: Array
    tail: Tail
    lots: int
    largest: float

    def call(self, at: Array) -> tuple[Array, Array]:
        sums = self.sums[:, np.searchsorted(self.ratios, at, side="right")]
        lower, upper = self._bounds(sums[1] - at * sums[0], sums, at)
        return lower, upper + self.tail.infinite / self.lots

    def put(self, at: Array) -> tuple[Array, Array]:
        sums = self.sums[:, np.searchsorted(self.ratios, at, side="left")]
        return self._bounds(at * sums[0] - sums[1], sums, at)

    def _bounds(self, value: Array, sums: Array, at: Array) -> tuple[Array, Array]:
        summing = 8 * UNIT * len(self.ratios)
        squares = np.maximum(sums[4] - 2 * at * sums[3] + at * at * sums[2], 0.0)
        norm = np.sqrt(squares + summing * (sums[4] + at * at * sums[2]))
        # Mass outside the window, and what of it was folded into it, weighs at most as much as at the point asked for.
        scale = np.exp(np.minimum(self.tail.log_scale - self.tail.tilt * at * self.lots, 600.0))
        error = norm * self.tail.noise + np.minimum(self.tail.outside * scale, 1e100) * (self.largest + at)
        error += summing * (np.abs(sums[1]) + at * np.abs(sums[0])) + self.tail.relative * np.abs(value)
        return value - error, value + error


def _table(tail: Tail, lots: int, largest: float) -> _Table:
    ratios = tail.losses / lots
    weight = np.exp(np.clip(tail.log_scale - tail.tilt * tail.losses, -700.0, 300.0))
    mass, square = weight * tail.masses, weight**2
    columns = np.stack([mass, mass * ratios, square, square * ratios, square * ratios**2])
    columns[:, ratios < 0] = 0.0  # no sum of ratios is negative: what is there was folded, and counted
    sums = np.zeros((5, len(ratios) + 1))
    if tail.tilt >= 0:
        sums[:, :-1] = np.cumsum(columns[:, ::-1], axis=1)[:, ::-1]
    else:
        sums[:, 1:] = np.cumsum(columns, axis=1)
    return _Table(ratios, sums, tail, lots, float(ratios[-1]) + largest)
