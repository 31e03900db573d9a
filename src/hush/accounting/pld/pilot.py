"""A rough picture of a composition, from which tilt, window and grid step are chosen; nothing here is certified.

Few atoms, placed densely near 0 and widely in the tails, give the cumulant function K of the total loss. A saddle
point then says roughly where delta(epsilon) takes its value.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import erfcx

from hush.accounting.pld.compose import Window
from hush.accounting.pld.curves import Array, Curve

Parts = Sequence[tuple[Curve, int]]
_SCAN = np.geomspace(1e-18, 1e6, 800)
_LARGEST_TILT = 1e5
LARGEST_SIZE = 1 << 21


@dataclass(frozen=True)
class Atoms:
    losses: Array
    masses: Array
    count: int

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
        return max(0.5 * float(erfcx(self.tilt * scale) - erfcx((self.tilt + 1) * scale)), 1e-300)

    @property
    def log_delta(self) -> float:
        return self.cumulant - self.tilt * self.mean + math.log(self.weight)


def atoms_of(curve: Curve, count: int, negligible: float) -> Atoms:
    """Connected dots on a sinh grid that ends where call (put) is negligible."""
    middle = float(curve.call(np.zeros(1))[0][0])
    high = _first_below(curve.call(_SCAN)[0], negligible)
    low = _first_below(curve.put(-_SCAN)[0], 1e-18 * middle / count)
    right = _spread(middle, high, 500)
    left = -_spread(middle, low, 300)[::-1]
    losses = np.concatenate([left, right[1:]])
    value = np.concatenate([curve.put(left[:-1])[0], curve.call(right)[0]])
    rise, gaps = np.diff(value), np.diff(losses)
    masses = np.concatenate([rise / np.expm1(gaps), [0.0]]) - np.concatenate([[value[0]], rise / -np.expm1(-gaps)])
    masses[len(left) - 1] += 1.0
    return Atoms(losses, np.maximum(masses, 0.0), count)


def _first_below(values: Array, level: float) -> float:
    below = np.flatnonzero(values <= level)
    return float(_SCAN[below[0]] if len(below) else _SCAN[-1])


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


def saddle_for(atoms: Sequence[Atoms], *, log_delta: float | None = None, epsilon: float = 0.0) -> Saddle:
    """The saddle at which delta is roughly e^log_delta, or else the one whose mean is epsilon; tilt >= 0."""

    def too_small(saddle: Saddle) -> bool:
        return saddle.mean < epsilon if log_delta is None else saddle.log_delta > log_delta

    start = saddle_at(atoms, 0.0)
    if not too_small(start):
        return start
    low, high = math.log(1e-3 / max(start.deviation, 1e-9)), math.log(_LARGEST_TILT)
    low = min(low, high - 1)
    for _ in range(40):
        middle = (low + high) / 2
        if too_small(saddle_at(atoms, math.exp(middle))):
            low = middle
        else:
            high = middle
        if high - low < 1e-3:
            break
    return saddle_at(atoms, math.exp(low))


def window_for(atoms: Sequence[Atoms], saddle: Saddle, *, outside: float, step: float) -> Window:
    """The shortest window that Chernoff's bound leaves with less than `outside` of the tilted mass on either side."""
    deviation = max(saddle.deviation, step)
    exponents = np.geomspace(0.2, 60.0, 24) / deviation
    needed = -math.log(outside)
    above = sum((p.count * p.log_mgf(saddle.tilt + exponents) for p in atoms), np.zeros(24)) - saddle.cumulant
    below = sum((p.count * p.log_mgf(saddle.tilt - exponents) for p in atoms), np.zeros(24)) - saddle.cumulant
    high, low = (above + needed) / exponents, -(below + needed) / exponents
    best_high, best_low = int(np.argmin(high)), int(np.argmax(low))
    bottom = float(low[best_low]) - 4 * step
    length = float(high[best_high]) + 4 * step - bottom
    size = 1 << max(6, math.ceil(math.log2(length / step + 2)))
    return Window(saddle.tilt, bottom, size, float(exponents[best_high]), float(exponents[best_low]))


def step_for(atoms: Sequence[Atoms], saddle: Saddle, tolerance: float) -> float:
    """The widest step whose spreading of the losses moves epsilon by less than the tolerance, roughly.

    A cell of width h adds a variance of h^2 / 6, or |loss| h where the law is narrower than the cell beside 0.
    """
    spread = max(saddle.deviation, 1e-12)
    step = spread / 8
    for _ in range(80):
        added = sum(
            p.count * float(p.tilted(saddle.tilt) @ np.minimum(step * step / 6, np.abs(p.losses) * step)) for p in atoms
        )
        if added * (saddle.tilt + 1) / 2 <= tolerance:
            break
        step *= 0.8
    return step


def extent(part: Atoms, curve: Curve, saddle: Saddle, *, negligible: float) -> tuple[float, float]:
    """Losses of one mechanism between which everything lies that matters under the tilt."""
    cumulative = np.cumsum(part.tilted(saddle.tilt))
    low = part.losses[max(int(np.searchsorted(cumulative, 1e-13 / part.count)) - 1, 0)]
    return float(low), _first_below(curve.call(_SCAN)[0], negligible)
