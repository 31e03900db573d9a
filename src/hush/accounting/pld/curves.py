"""The hockey-stick curve of one mechanism, accurate in both tails, with a bound on its round-off.

With the record the output has law P, without it Q, and R = dP/dQ. At t = e^epsilon the curve is the *call*
E_Q[(R - t)+], which is delta(epsilon), and below epsilon = 0 the *put* E_Q[(t - R)+] = call - (1 - t), which does not
lose its digits there. The pair taken the other way round (Q against P) has call e^epsilon put(-epsilon).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import scipy
from numpy.typing import NDArray

from hush.accounting.events import (
    DiscreteGaussian,
    DiscreteLaplace,
    Gaussian,
    Laplace,
    Mechanism,
    PureDP,
    RandomisedResponse,
)
from hush.accounting.finite import Outcomes, outcomes
from hush.accounting.reductions import refuse

Array = NDArray[np.float64]
Evaluated = tuple[Array, Array]  # values, and a bound on the absolute error of each
UNIT = 2.0**-53
_HALF_PI = np.sqrt(np.pi / 2)
_FEW_OUTCOMES = 64
_FEW = 16 * UNIT  # for up to four operations and one exponential or logarithm


@dataclass(frozen=True)
class Curve:
    """call(epsilons >= 0) and put(epsilons <= 0); `symmetric` if both directions have the same curve.

    `anchor` is the loss of an output that says nothing, the end of the loss's range for a sampled mechanism: where
    a grid is too coarse to resolve the many losses close to it, it has a point exactly there.
    """

    call: Callable[[Array], Evaluated]
    put: Callable[[Array], Evaluated]
    symmetric: bool
    anchor: float = 0.0
    floor: float = 0.0  # values below this are not resolved
    lattice: float = 0.0  # if positive: losses are the anchor plus multiples of this, and a grid should hold them all
    lower: "Curve | None" = None  # where this curve is only an upper bound: the one to take for a lower bound

    def reversed(self) -> "Curve":
        """The curve of Q against P."""

        def call(epsilons: Array) -> Evaluated:
            value, error = self.put(-epsilons)
            return _scaled_by_exp(value, epsilons), _scaled_by_exp(error, epsilons) + _FEW * _scaled_by_exp(
                value, epsilons
            )

        def put(epsilons: Array) -> Evaluated:
            value, error = self.call(-epsilons)
            scale = np.exp(epsilons)
            return scale * value, scale * (error + _FEW * value * (1 - epsilons))

        lower = self.lower.reversed() if self.lower else None
        return self if self.symmetric else Curve(call, put, False, -self.anchor, self.floor, lower=lower)

    @property
    def below(self) -> "Curve":
        return self.lower or self


def _scaled_by_exp(value: Array, exponent: Array) -> Array:
    """value * e^exponent; the callers' values are 0 long before the exponential could overflow."""
    return np.where(value > 0, value * np.exp(np.minimum(exponent, 700.0)), 0.0)


def of_mechanism(mechanism: Mechanism) -> Curve:
    """The dominating pair of one mechanism: shifted noise, or outcomes that can be counted."""
    match mechanism:
        case Gaussian(noise):
            return gaussian(1 / noise)
        case Laplace(noise):
            return _mirrored(lambda epsilons: _laplace_call(epsilons, 1 / noise))
        case PureDP() | RandomisedResponse() | DiscreteLaplace() | DiscreteGaussian():
            return _of_outcomes(outcomes(mechanism))
    raise refuse(mechanism)


def gaussian(mean: float) -> Curve:
    """N(mean, 1) against N(0, 1): also many Gaussians together, whose noise may lie below what an event may have."""
    return _mirrored(lambda epsilons: gaussian_call(epsilons, mean))


def _of_outcomes(found: Outcomes) -> Curve:
    """Of the outcomes with a loss l beyond epsilon each gives P (1 - e^(epsilon - l)); running sums hold both terms."""
    losses = found.losses
    masses = np.exp(found.log_q + losses)
    beyond, falling = np.zeros(len(losses) + 1), np.zeros(len(losses) + 1)
    beyond[:-1] = np.cumsum(masses[::-1])[::-1]
    decay = np.exp(losses[:-1] - losses[1:])
    for i in range(len(losses) - 1, -1, -1):  # the sum of P e^(losses[i] - l) from i on: nothing in it overflows
        falling[i] = masses[i] + (decay[i] * falling[i + 1] if i < len(decay) else 0.0)
    most = np.append(losses, np.inf)
    relative = UNIT * (64 + 4 * len(losses) + 8 * float(np.max(np.abs(losses) + np.abs(found.log_q))))

    def call(epsilons: Array) -> Evaluated:
        place = np.searchsorted(losses, epsilons, side="right")
        value = beyond[place] - np.exp(epsilons - most[place]) * falling[place]
        # An outcome whose loss is rounded to the other side of epsilon has next to no part in the value.
        edge = beyond[np.maximum(place - 1, 0)]
        return np.maximum(value, 0.0), (relative + 4 * UNIT * epsilons) * edge + 1e-300

    few = found.lattice if len(losses) <= _FEW_OUTCOMES else 0.0
    return replace(_mirrored(call), anchor=float(losses[0]) if few else 0.0, lattice=few)


def of_profile(profile: Callable[[float], float], knots_each: int = 40) -> Curve:
    """An upper curve from bounds on delta that hold in both directions, at some 160 epsilons (4 * knots_each)."""
    knots = np.concatenate([np.linspace(0.0, 1.0, knots_each + 1)[:-1], np.geomspace(1.0, 200.0, 3 * knots_each + 1)])
    return of_bounds(knots, np.array([profile(float(knot)) for knot in knots]))


def of_bounds(knots: Array, bounds: Array) -> Curve:
    """An upper curve from bounds on delta at these epsilons, from 0 on, that hold in both directions.

    The true curve is convex in e^epsilon, so chords through bounds above it lie above it too; beyond the last knot it
    is level.
    """
    heights = np.minimum.accumulate(np.minimum(bounds, 1.0)) * (1 + 1e-12)

    def call(epsilons: Array) -> Evaluated:
        left = np.clip(np.searchsorted(knots, epsilons, side="right") - 1, 0, len(knots) - 2)
        width = np.expm1(knots[left + 1] - knots[left])
        share = np.clip(np.expm1(np.minimum(epsilons - knots[left], 60.0)) / width, 0.0, 1.0)
        value = heights[left] + share * (heights[left + 1] - heights[left])
        return value, 1e-12 * heights[left]

    return _mirrored(call)


def concentrated(rho: float) -> Curve:
    """rho-zCDP converted at the best of many orders (Canonne, Kamath, Steinke 2020, Proposition 12)."""
    beta = np.geomspace(1e-8, 1e10, 2000)
    order = 1 + beta
    fixed = beta * (rho * order - np.log1p(1 / beta)) - np.log(order)

    def profile(epsilon: float) -> float:
        return math.exp(min(0.0, float(np.min(fixed - beta * epsilon)) * (1 - 1e-12) + 1e-12))

    return of_profile(profile, 400)


def without_replacement(doubled: Curve, rate: float) -> Curve:
    """An upper curve, both ways, for a lot of fixed size, from the mechanism's curve at twice the sensitivity.

    A lot without the record has another one in its place, so P = (1 - q) A + q B(record), Q = (1 - q) A + q B(null)
    where A is one contribution from B(null) and two from B(record). By advanced joint convexity (Balle, Barthe,
    Gaboardi 2018, Theorem 2) a mixture of both replaces Q: with e^epsilon = 1 + q (e^x - 1), either direction is at
    most q times the doubled mechanism's curve at x.
    """
    return _mirrored(sampled(doubled, rate).call)


def sampled(base: Curve, rate: float) -> Curve:
    """The curve after Poisson sampling: R becomes 1 - rate + rate R, so calls and puts scale by the rate.

    (Zhu, Dong, Wang 2022, Theorem 11: a dominating pair of the mechanism gives one of the sampled mechanism.)
    """

    def call(epsilons: Array) -> Evaluated:
        value, error = base.call(_before_sampling(epsilons, rate))
        return rate * value, rate * error + _FEW * rate * value

    def put(epsilons: Array) -> Evaluated:
        excess = np.expm1(epsilons) / rate
        inside = excess > -1
        value, error = base.put(np.log1p(np.where(inside, excess, 0.0)))
        return np.where(inside, rate * value, 0.0), np.where(inside, rate * error + _FEW * rate * value, 0.0)

    return Curve(call, put, False, math.log1p(-rate))


def _before_sampling(epsilons: Array, rate: float) -> Array:
    """log(1 + (e^epsilon - 1) / rate) without overflow."""
    small = np.minimum(epsilons, 40.0)
    return np.where(epsilons > 40.0, epsilons - np.log(rate), np.log1p(np.expm1(small) / rate))


def gaussian_call(epsilons: Array, mean: float) -> Evaluated:
    """E[(R - t)+] for N(mean, 1) against N(0, 1), at epsilons >= 0, with relative accuracy in the tail.

    Phi(-a) - e^epsilon Phi(-b) with a = epsilon/mean - mean/2 and b = a + mean, where e^epsilon phi(b) = phi(a).
    """
    a = epsilons / mean - mean / 2
    b = epsilons / mean + mean / 2
    density = np.exp(-0.5 * a * a)
    far = a >= 0
    tail = np.where(
        far, 0.5 * density * scipy.special.erfcx(np.where(far, a, 0.0) / np.sqrt(2)), scipy.special.ndtr(-a)
    )
    value = np.maximum(tail - 0.5 * density * scipy.special.erfcx(b / np.sqrt(2)), 0.0)
    # In units: a and b are off by 2 (|a| + b) (quotient, half, difference, the rounded mean), so the exponential by
    # 2 |a| (|a| + b) + a^2 + 2; erfcx and ndtr by at most 8 (measured in the tests), products by 3; the second term is
    # no larger than the first. Together 26 + 6 a^2 + 4 |a| b, and b >= |a|. What is left, 6 + 8 b mean, pays for an
    # epsilon that is itself off by 3 + epsilon units, as after `_before_sampling`: the slope is at most the tail.
    return value, (32 + 4 * (np.abs(a) + b + mean) ** 2) * UNIT * tail


def _laplace_call(epsilons: Array, most: float) -> Evaluated:
    value = np.where(epsilons < most, -np.expm1((np.minimum(epsilons, most) - most) / 2), 0.0)
    return value, np.where(epsilons < most * (1 + _FEW), _FEW * (value + most), 0.0)


def _mirrored(call: Callable[[Array], Evaluated]) -> Curve:
    """A pair that swaps into itself: the put is the mirrored call."""

    def put(epsilons: Array) -> Evaluated:
        value, error = call(-epsilons)
        # The error is not scaled down by e^epsilon: sampling's inverse near R = 1 - rate loses digits there.
        return np.exp(epsilons) * value, error + _FEW * value

    return Curve(call, put, True)
