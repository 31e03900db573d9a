"""A rough picture of a composition, from which tilt, window and grid step are chosen; nothing here is certified.

Few atoms, placed densely near 0 and widely in the tails, give the cumulant function K of the total loss. A saddle
point then says roughly where delta(epsilon) takes its value.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import scipy

from hush.accounting.pld.compose import Window
from hush.accounting.pld.curves import Array, Curve

Parts = Sequence[tuple[Curve, int]]
_SCAN = np.geomspace(1e-18, 1e6, 800)
_LARGEST_TILT = 1e9
USUAL_SIZE, LARGEST_SIZE = 1 << 21, 1 << 22


@dataclass(frozen=True)
class Atoms:
    losses: Array
    masses: Array
    count: int
    anchor: float

    def log_mgf(self, tilts: Array) -> Array:
        exponents = np.multiply.outer(tilts, self.losses)
        most = exponents.max(axis=1)
        return np.log(np.exp(exponents - most[:, None]) @ self.masses) + most

    def tilted(self, tilt: float) -> Array:
        exponents = tilt * self.losses
        weighted = self.masses * np.exp(exponents - exponents.max())
        return weighted / weighted.sum()


@dataclass(frozen=True)
class Saddle:
    """The tilt whose mean is the epsilon of interest."""

    tilt: float
    cumulant: float
    mean: float
    deviation: float

    @property
    def weight(self) -> float:
        """E[e^(-tilt X) (1 - e^-X)+] for a centred normal X of the saddle's deviation."""
        scale = max(self.deviation, 1e-300) / math.sqrt(2)
        return max(
            0.5 * float(scipy.special.erfcx(self.tilt * scale) - scipy.special.erfcx((self.tilt + 1) * scale)), 1e-300
        )

    @property
    def log_delta(self) -> float:
        return self.cumulant - self.tilt * self.mean + math.log(self.weight)


def atoms_of(curve: Curve, count: int, negligible: float) -> Atoms:
    """Connected dots on a sinh grid that ends where call (put) is negligible."""
    middle = float(curve.call(np.zeros(1))[0][0])
    high = _first_below(curve.call(_SCAN)[0], max(negligible, curve.floor))
    low = _first_below(curve.put(-_SCAN)[0], 1e-18 * middle / count)
    right = _spread(middle, high, 500)
    left = -_spread(middle, low, 300)[::-1]
    losses = np.concatenate([left, right[1:]])
    value = np.concatenate([curve.put(left[:-1])[0], curve.call(right)[0]])
    rise, gaps = np.diff(value), np.diff(losses)
    masses = np.concatenate([rise / np.expm1(gaps), [0.0]]) - np.concatenate([[value[0]], rise / -np.expm1(-gaps)])
    masses[len(left) - 1] += 1.0
    return Atoms(losses[masses > 0], masses[masses > 0], count, curve.anchor)


def _first_below(values: Array, level: float) -> float:
    """The first scanned loss where the values are below the level, or as good as constant if they stay above it."""
    return float(_SCAN[np.flatnonzero(values <= max(level, 1.01 * float(values[-1])))[0]])


def _spread(scale: float, end: float, points: int) -> Array:
    unit = max(0.05 * scale, 1e-9 * end)
    grid = unit * np.sinh(np.linspace(0.0, math.asinh(end / unit), points))
    return grid


def saddle_at(atoms: Sequence[Atoms], tilt: float) -> Saddle:
    cumulant = mean = variance = 0.0
    for part in atoms:
        shares = part.tilted(tilt)
        centre = float(shares @ part.losses)
        cumulant += part.count * float(part.log_mgf(np.array([tilt]))[0])
        mean += part.count * centre
        variance += part.count * float(shares @ (part.losses - centre) ** 2)
    return Saddle(tilt, cumulant, mean, math.sqrt(variance))


def saddle_for_delta(atoms: Sequence[Atoms], log_delta: float) -> tuple[Saddle, bool]:
    """The saddle at which delta is roughly e^log_delta, tilt >= 0, and whether the tilted law is in one piece there."""
    smooth = _bisected(atoms, lambda saddle: saddle.log_delta > log_delta)
    whole = smooth.tilt * smooth.deviation < 2 * math.sqrt(2 * max(1.0, -log_delta))
    return smooth, whole and abs(smooth.log_delta - log_delta) < 2


def one_jump(atoms: Sequence[Atoms], log_delta: float) -> tuple[float, float]:
    """The epsilon at which one large loss alone gives e^log_delta, and -d(log delta)/d(epsilon) there."""
    low, high = 0.0, max(float(part.losses[-1]) for part in atoms)
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if _log_union(atoms, middle) > log_delta else (low, middle)
    width = 1e-3 * low + 1e-12
    return low, max((_log_union(atoms, low) - _log_union(atoms, low + width)) / width, 1.0)


def cut_for(atoms: Sequence[Atoms], expected: float) -> float:
    """The loss that the whole composition is expected to exceed `expected` times in a single mechanism."""
    losses = np.concatenate([part.losses for part in atoms])
    masses = np.concatenate([part.count * part.masses for part in atoms])
    order = np.argsort(losses)[::-1]
    beyond = np.cumsum(masses[order])
    place = int(np.searchsorted(beyond, expected, side="right"))
    return float(losses[order][min(place, len(order) - 1)])


def near(atoms: Sequence[Atoms], cut: float) -> list[Atoms]:
    """The atoms without losses beyond the cut."""
    return [replace(p, losses=p.losses[p.losses <= cut], masses=p.masses[p.losses <= cut]) for p in atoms]


def saddle_against(atoms: Sequence[Atoms], epsilon: float, enough: float) -> Saddle:
    """The saddle whose mean is epsilon, or an earlier one at which the rate function is already `enough`."""
    return _bisected(atoms, lambda s: s.mean < epsilon and s.tilt * epsilon - s.cumulant < enough)


def saddle_for_epsilon(atoms: Sequence[Atoms], epsilon: float) -> Saddle:
    """The saddle whose mean is epsilon; tilt >= 0."""
    return _bisected(atoms, lambda saddle: saddle.mean < epsilon)


def _bisected(atoms: Sequence[Atoms], too_small: Callable[[Saddle], bool]) -> Saddle:
    start = saddle_at(atoms, 0.0)
    if not too_small(start):
        return start
    widest = max(float(part.losses[-1]) for part in atoms)
    low, high = math.log(1e-3 / max(start.deviation, widest, 1e-9)), math.log(_LARGEST_TILT)
    low = min(low, high - 1)
    below, above = start, saddle_at(atoms, math.exp(high))
    for _ in range(60):
        middle = (low + high) / 2
        found = saddle_at(atoms, math.exp(middle))
        # At the end of a bounded range the rate stands still while the tilt grows without bound: no need to follow.
        rate = found.tilt * found.mean - found.cumulant
        if too_small(found) and found.tilt * (found.mean - start.mean) < 4 * (rate + 5):
            low, below = middle, found
        else:
            high, above = middle, found
        if high - low < 1e-3 and above.mean - below.mean < 0.3 * below.deviation:
            break
    return below


def _log_union(atoms: Sequence[Atoms], epsilon: float) -> float:
    """Log of the sum of all mechanisms' deltas at this epsilon."""
    total = sum(p.count * float(p.masses @ -np.expm1(np.minimum(epsilon - p.losses, 0.0))) for p in atoms)
    return math.log(max(total, 1e-300))


def window_for(atoms: Sequence[Atoms], saddle: Saddle, *, outside: float, step: float) -> Window:
    """The shortest window that Chernoff's bound leaves with less than `outside` of the tilted mass on either side."""
    deviation = max(saddle.deviation, step)
    widest = max(float(np.max(np.abs(part.losses[[0, -1]]))) for part in atoms)
    exponents = np.geomspace(min(0.2 / deviation, 3 / widest), 60.0 / deviation, 24)
    needed = -math.log(max(outside, 1e-300))
    spreading = _spreading(atoms, saddle, step) * exponents**2 / 2 - saddle.cumulant
    above = sum((p.count * p.log_mgf(saddle.tilt + exponents) for p in atoms), spreading)
    below = sum((p.count * p.log_mgf(saddle.tilt - exponents) for p in atoms), spreading)
    high, low = (above + needed) / exponents, -(below + needed) / exponents
    best_high, best_low = int(np.argmin(high)), int(np.argmax(low))
    bottom = float(low[best_low]) - 4 * step
    length = float(high[best_high]) + 4 * step - bottom
    size = 1 << max(6, math.ceil(math.log2(length / step + 2)))
    return Window(saddle.tilt, bottom, size, float(exponents[best_high]), float(exponents[best_low]))


def step_for(atoms: Sequence[Atoms], saddle: Saddle, tolerance: float, per_deviation: float, slope: float) -> float:
    """The widest step whose spreading of the losses moves epsilon by less than the tolerance, roughly.

    Where log(delta) falls by `slope`, a variance v moves epsilon by (slope + 1) v / 2.
    """
    step = max(saddle.deviation, 1e-12) / per_deviation
    for _ in range(80):
        if _spreading(atoms, saddle, step) * (slope + 1) / 2 <= tolerance:
            break
        step *= 0.8
    return step


def _spreading(atoms: Sequence[Atoms], saddle: Saddle, step: float) -> float:
    """The variance that a grid adds: h^2 / 6 a cell, or |loss| h where the law is narrower than the cell beside 0."""
    return sum(
        p.count * float(p.tilted(saddle.tilt) @ np.minimum(step * step / 6, np.abs(p.losses - p.anchor) * step))
        for p in atoms
    )


def lowest(part: Atoms, saddle: Saddle) -> float:
    """The loss of one mechanism below which nothing matters under the tilt."""
    cumulative = np.cumsum(part.tilted(saddle.tilt))
    return float(part.losses[max(int(np.searchsorted(cumulative, 1e-13 / part.count)) - 1, 0)])


def lowest_put(curve: Curve) -> float:
    """The loss below which a curve's put is small beside its height at 0, whatever the tilt."""
    height = float(curve.call(np.zeros(1))[0][0])
    return -_first_below(curve.put(-_SCAN)[0], 1e-9 * height)
