"""One mechanism's privacy loss on a grid, once too large and once too small, as hockey-stick curves.

Both grids hold P-masses D_i at epsilons i * step whose curve sum_i D_i (1 - t e^(-epsilon_i))+ lies above (below) the
mechanism's curve at every t > 0. Such an order survives composition: swap one factor at a time. Since the curve
is pinned at both ends, the error of a step is of second order, step^2, and not of the order of the step. Rare large
losses may have wider steps of their own, `far`: those masses are not composed by FFT but conditioned on (jumps.py).
"""

import math
from dataclasses import dataclass, field, replace

import numpy as np
import scipy

from hush.accounting.pld.curves import UNIT, Array, Curve

_NONE = np.empty(0)
_FARTHEST = 600.0  # e^epsilon must stay a number; losses beyond it are left out of the optimistic grid


@dataclass(frozen=True)
class Grid:
    """P-masses at epsilons shift + (first + i) * step, at the far losses, and at infinity."""

    step: float
    shift: float
    first: int
    masses: Array
    infinite: float
    far_losses: Array = field(default_factory=lambda: _NONE)
    far_masses: Array = field(default_factory=lambda: _NONE)

    @property
    def total(self) -> float:
        return float(np.sum(self.masses) + np.sum(self.far_masses)) + self.infinite

    @property
    def losses(self) -> Array:
        return self.shift + self.step * np.arange(self.first, self.first + len(self.masses), dtype=np.float64)


@dataclass(frozen=True)
class _Knots:
    """Values at losses `steps` apart: puts left of 0 (the first `calls` of them), calls from 0 on."""

    steps: Array
    losses: Array
    values: Array
    errors: Array
    calls: int

    def masses(self) -> tuple[Array, Array]:
        """P-masses of the chords through the knots, and a bound on their round-off.

        D_i = t_i (slope right of i - slope left of i), written without t_i. Left of the first knot the put falls to 0
        at t = 0; right of the last the call stays level, which is mass at infinity.
        """
        rise = np.diff(self.values)
        from_left, from_right = rise.copy(), rise.copy()
        across = self.calls - 1
        # Between the last put and the first call one is turned into the other: call - put = 1 - t.
        from_left[across] += np.expm1(self.losses[self.calls])
        from_right[across] += np.expm1(self.losses[across])
        right = np.concatenate([from_left / np.expm1(self.steps), [0.0]])
        left = np.concatenate([[self.values[0]], from_right / -np.expm1(-self.steps)])
        return right - left, 8 * UNIT * (np.abs(right) + np.abs(left))


def _knots(curve: Curve, losses: Array, steps: Array) -> _Knots:
    calls = int(np.searchsorted(losses, 0.0))
    below, below_error = curve.put(losses[:calls])
    above, above_error = curve.call(losses[calls:])
    values = np.concatenate([below, above])
    errors = np.concatenate([below_error, above_error]) + 8 * UNIT * values
    # Where puts turn into calls, 1 - t is rounded as well.
    errors[calls - 1 : calls + 1] += 4 * UNIT * steps[calls - 1]
    return _Knots(steps, losses, values, errors, calls)


def _losses(shift: float, first: int, last: int, step: float) -> Array:
    return shift + step * np.arange(first, last + 1, dtype=np.float64)


def _beyond(losses: Array, step: float, far: Array) -> tuple[Array, Array]:
    """The uniform losses and those of the far ones that lie beyond them, and the steps between."""
    # A far loss is used as it is, a uniform step as it is meant: the difference of rounded losses would lose digits.
    kept = far[(far > losses[-1] + step / 2) & (far <= _FARTHEST)]
    joined = np.concatenate([losses, kept])
    return joined, np.concatenate([np.full(len(losses) - 1, step), np.diff(joined[len(losses) - 1 :])])


def pessimistic(curve: Curve, first: int, last: int, step: float, far: Array = _NONE) -> Grid:
    """The chords through the knots ("connect the dots", Doroshenko et al. 2022) lie above a convex curve.

    Round-off raises the knots and every mass; a mass that round-off made negative is raised to 0, which is safe too.
    """
    shift = _shift(curve, step)
    near = _losses(shift, first, last, step)
    losses, steps = _beyond(near, step, far)
    knots = _knots(curve, losses, steps)
    raised = replace(knots, values=knots.values + knots.errors)
    masses, round_off = raised.masses()
    masses, split = np.maximum(masses + round_off, 0.0), len(near)
    return Grid(step, shift, first, masses[:split], float(raised.values[-1]), losses[split:], masses[split:])


def optimistic(curve: Curve, first: int, last: int, step: float, far: Array = _NONE) -> Grid:
    """The largest convex curve with its knots on the grid below (knots lowered until their chords lie below the curve).

    In a cell a convex curve lies above its neighbours' chords, continued; the half grid supplies them. Mass
    before the first and after the last knot is left out. Taking the greatest convex minorant only lowers the curve.
    """
    last = max(min(last, int(_FARTHEST / step)), 4)
    first = min(max(first, -int(_FARTHEST / step)), -2)
    rest = _rest(curve, step)
    shift = rest - step * math.ceil(rest / step)
    near = _losses(shift, first, last, step)
    if near[-1] > 1.1 * _FARTHEST:  # one step is too wide
        return _nothing(near, step, shift, first)
    losses, steps = _beyond(near, step, far)
    half = steps / 2
    halves = np.repeat(half, 2)
    middles = np.concatenate(
        [_losses(shift + step / 2, first, last - 1, step), losses[len(near) - 1 : -1] + half[len(near) - 1 :]]
    )
    fine_losses = np.empty(2 * len(losses) - 1)
    fine_losses[::2], fine_losses[1::2] = losses, middles
    knots = _knots(curve, fine_losses, halves)
    fine = np.maximum(knots.masses()[0], 0.0)
    both = np.exp(halves) * fine[:-1] + fine[1:]
    dip = np.expm1(halves) * fine[:-1] * fine[1:] / np.where(both > 0, both, 1.0)
    # All values as calls or all as puts, within one coarse cell: its last fine knot decides.
    values = knots.values
    start, middle, end = values[:-2:2], values[1::2], values[2::2]
    weight = 1 / (1 + np.exp(half))
    sag = (1 - weight) * start + weight * end - middle
    cell = (knots.calls - 1) // 2  # the coarse cell that holds the turn from put to call
    if 2 * cell + 1 < knots.calls:
        sag[cell] += weight[cell] * np.expm1(losses[cell + 1])  # start and middle are puts, end a call
    else:
        sag[cell] -= (1 - weight[cell]) * np.expm1(losses[cell])  # start is a put, middle and end are calls
    errors = knots.errors
    gap = np.maximum(sag, 0.0) + np.maximum(dip[::2], dip[1::2])
    gap += 8 * np.maximum.reduce([errors[:-2:2], errors[1::2], errors[2::2]])
    # Every knot pays for the cells on both sides of it; slopes of -1 are rounded left of 0.
    lowered = values[::2] - np.maximum(np.append(gap, 0.0), np.insert(gap, 0, 0.0))
    lowered -= np.where(losses < 0, 16 * UNIT * np.exp(losses), 0.0)
    calls = int(np.searchsorted(losses, 0.0))
    if rest != curve.anchor:
        # The cell right of the rest is far from straight. Its right end does not pay for it; its left end comes down
        # to 0, below the continued chord of the next cell, and so does everything left of it.
        at = math.ceil(rest / step) - first
        chord = (end[at] - values[2 * at + 3]) / (np.exp(losses[at + 1]) * np.expm1(step / 2))
        continued = end[at] + chord * np.exp(rest) * np.expm1(losses[at + 1] - rest) + np.expm1(rest)
        if at != calls - 1 or continued < 8 * (errors[2 * at + 2] + errors[2 * at + 3]):
            return _nothing(near, step, shift, first)
        lowered[: at + 1] = 0.0
        lowered[at + 1] = end[at] - gap[at + 1]
    settled = settle(lowered, calls)
    if settled is None:
        return _nothing(near, step, shift, first)
    masses, split = _minorant(settled, losses, steps), len(near)
    return Grid(step, shift, first, masses[:split], 0.0, losses[split:], masses[split:])


def settle(lowered: Array, calls: int) -> Array | None:
    """Values below 0 raised to 0, and their neighbours brought down to 0, so that no chord rises above the curve.

    None if that would be needed where puts turn into calls: then nothing is left of the curve.
    """
    raised = lowered < 0
    if raised[calls - 1] or raised[calls]:
        return None
    zero = raised.copy()
    zero[1:] |= raised[:-1]
    zero[:-1] |= raised[1:]
    zero[[0, -1]] = True
    return np.where(zero, 0.0, lowered)


def _nothing(losses: Array, step: float, shift: float, first: int) -> Grid:
    """A grid that says nothing: all mass at the last loss that is not positive."""
    masses = np.zeros_like(losses)
    masses[int(np.searchsorted(losses, 0.0, side="right")) - 1] = 1.0
    return Grid(step, shift, first, masses, 0.0)


def _minorant(knots: Array, losses: Array, steps: Array) -> Array:
    """P-masses of the greatest convex function below the knots: its slopes are an isotonic regression of theirs."""
    points = np.exp(losses)
    widths = points[:-1] * np.expm1(steps)
    calls = int(np.searchsorted(losses, 0.0))
    rise = np.diff(knots)
    rise[calls - 1] += np.expm1(losses[calls - 1])
    slopes = rise / widths
    slopes[: calls - 1] -= 1.0
    fitted = scipy.optimize.isotonic_regression(slopes, weights=widths)
    pooled = np.repeat(np.diff(fitted.blocks), np.diff(fitted.blocks))
    slope = np.concatenate([[-1.0], np.clip(fitted.x, -1.0, 0.0), [0.0]])
    round_off = UNIT * np.concatenate([[8], 8 + 2 * pooled, [8]]) * np.abs(slope)
    masses: Array = np.maximum(points * (np.diff(slope) - round_off[:-1] - round_off[1:]), 0.0)
    return masses


def _rest(curve: Curve, step: float) -> float:
    """Where the many outputs that say almost nothing are gathered by the optimistic grid.

    If the grid resolves them, anywhere: the anchor. If not, the point where the curve's chord beyond the first cell,
    continued, meets 1 - t, which is the centre of the losses left of that chord.
    """
    height = float(curve.call(np.zeros(1))[0][0])
    if curve.anchor >= 0 or height > step / 2 or step > _FARTHEST / 2:
        return curve.anchor
    rest = 0.0
    for _ in range(6):
        losses = rest + step * np.array([1.0, 1.5])
        near, far = curve.call(losses)[0]
        slope = float((near - far) / (np.exp(losses[0]) * np.expm1(step / 2)))
        if slope > 0.5:
            return curve.anchor
        rest = math.log1p(-(1 - 1e-6) * (float(near) + slope * math.expm1(losses[0])) / (1 - slope))
    return rest


def _shift(curve: Curve, step: float) -> float:
    """The grid's offset in (-step, 0] for which the anchor is one of its points."""
    return curve.anchor - step * math.ceil(curve.anchor / step)
