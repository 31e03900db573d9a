"""One mechanism's privacy loss on a uniform grid, once too large and once too small, as hockey-stick curves.

Both grids hold P-masses D_i at epsilons i * step whose curve sum_i D_i (1 - t e^(-epsilon_i))+ lies above (below) the
mechanism's curve at every t > 0. Such an order survives composition: swap one factor at a time. Since the curve
is pinned at both ends, the error of a step is of second order, step^2, and not of the order of the step.
"""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import isotonic_regression

from hush.accounting.pld.curves import UNIT, Array, Curve

_FARTHEST = 600.0  # e^epsilon must stay a number; losses beyond it are left out of the optimistic grid


@dataclass(frozen=True)
class Grid:
    """P-masses at epsilons (first + i) * step, and the mass at infinity."""

    step: float
    first: int
    masses: Array
    infinite: float

    @property
    def losses(self) -> Array:
        return self.step * np.arange(self.first, self.first + len(self.masses), dtype=np.float64)


def _knots(curve: Curve, first: int, last: int, step: float) -> tuple[Array, Array]:
    """Put left of 0, call from 0 on, at the grid's points, and the error bounds."""
    below, below_error = curve.put(step * np.arange(first, 0, dtype=np.float64))
    above, above_error = curve.call(step * np.arange(0, last + 1, dtype=np.float64))
    value = np.concatenate([below, above])
    # The point i * step is itself rounded; a curve's slope in epsilon is at most its tail probability, covered by the
    # curves' own bounds. Differences below round once more.
    return value, np.concatenate([below_error, above_error]) + 8 * UNIT * value


def _masses(value: Array, zero: int, step: float) -> tuple[Array, Array]:
    """P-masses of the chords through the knots, and a bound on their round-off.

    D_i = t_i (slope right of i - slope left of i), written without t_i. Left of the first knot the put falls to 0 at
    t = 0; right of the last the call stays level, which is mass at infinity. At 0 put turns into call: the slope
    of 1 - t is added.
    """
    rise = np.diff(value)
    right, left = rise / np.expm1(step), rise / -np.expm1(-step)
    masses = np.concatenate([right, [0.0]]) - np.concatenate([[value[0]], left])
    round_off = np.abs(np.concatenate([right, [0.0]])) + np.abs(np.concatenate([[value[0]], left]))
    masses[zero] += 1.0
    round_off[zero] += 1.0
    return masses, 8 * UNIT * round_off


def pessimistic(curve: Curve, first: int, last: int, step: float) -> Grid:
    """The chords through the knots ("connect the dots", Doroshenko et al. 2022) lie above a convex curve.

    Round-off raises the knots and every mass; a mass that round-off made negative is raised to 0, which is safe too.
    """
    value, error = _knots(curve, first, last, step)
    raised = value + error
    masses, round_off = _masses(raised, -first, step)
    return Grid(step, first, np.maximum(masses + round_off, 0.0), float(raised[-1]))


def optimistic(curve: Curve, first: int, last: int, step: float) -> Grid:
    """The largest convex curve with its knots on the grid below (knots lowered until their chords lie below the curve).

    In a cell a convex curve lies above its neighbours' chords, continued; the half grid supplies them. Mass
    before the first and after the last knot is left out. Taking the greatest convex minorant only lowers the curve.
    """
    last = max(min(last, int(_FARTHEST / step)), 1)
    first = min(max(first, -int(_FARTHEST / step)), -1)
    half = step / 2
    value, error = _knots(curve, 2 * first, 2 * last, half)
    fine = np.maximum(_masses(value, -2 * first, half)[0], 0.0)
    both = np.exp(half) * fine[:-1] + fine[1:]
    dip = np.expm1(half) * fine[:-1] * fine[1:] / np.where(both > 0, both, 1.0)
    weight = 1 / (1 + np.exp(half))
    middle = (1 - weight) * value[:-2:2] + weight * value[2::2] - value[1::2]
    gap = np.maximum(middle, 0.0) + np.maximum(dip[::2], dip[1::2])
    allowance = 8 * np.maximum.reduce([error[:-2:2], error[1::2], error[2::2]])
    gap = gap + allowance
    losses = step * np.arange(first, last + 1, dtype=np.float64)
    lowered = value[::2].copy()
    lowered[1:-1] -= np.maximum(gap[:-1], gap[1:]) + np.where(losses[1:-1] < 0, 16 * UNIT * np.exp(losses[1:-1]), 0.0)
    lowered[[0, -1]] = 0.0
    return _minorant(np.maximum(lowered, 0.0), losses, first, step)


def _minorant(knots: Array, losses: Array, first: int, step: float) -> Grid:
    """P-masses of the greatest convex function below the knots: its slopes are an isotonic regression of theirs."""
    points = np.exp(losses)
    widths = points[:-1] * np.expm1(step)
    slopes = np.diff(knots) / widths - (losses[:-1] < -step / 2)
    fitted = isotonic_regression(slopes, weights=widths)
    pooled = np.repeat(np.diff(fitted.blocks), np.diff(fitted.blocks))
    slope = np.concatenate([[-1.0], np.clip(fitted.x, -1.0, 0.0), [0.0]])
    round_off = UNIT * np.concatenate([[8], 8 + 2 * pooled, [8]]) * np.abs(slope)
    masses = points * (np.diff(slope) - round_off[:-1] - round_off[1:])
    return Grid(step, first, np.maximum(masses, 0.0), 0.0)
