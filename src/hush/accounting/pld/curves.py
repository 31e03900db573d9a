"""The hockey-stick curve of one mechanism, accurate in both tails, with a bound on its round-off.

With the record the output has law P, without it Q, and R = dP/dQ. At t = e^epsilon the curve is the *call*
E_Q[(R - t)+], which is delta(epsilon), and below epsilon = 0 the *put* E_Q[(t - R)+] = call - (1 - t), which does not
lose its digits there. The pair taken the other way round (Q against P) has call e^epsilon put(-epsilon).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.special import erfcx, ndtr

from hush.accounting.events import Gaussian, Laplace, PureDP

Array = NDArray[np.float64]
Evaluated = tuple[Array, Array]  # values, and a bound on the absolute error of each
UNIT = 2.0**-53
_HALF_PI = np.sqrt(np.pi / 2)
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
    silent: bool = False  # a lower bound that says nothing
    lattice: float = 0.0  # if positive: losses are the anchor plus multiples of this, and a grid should hold them all

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

        return self if self.symmetric else Curve(call, put, False, -self.anchor, self.floor)


def _scaled_by_exp(value: Array, exponent: Array) -> Array:
    """value * e^exponent; the callers' values are 0 long before the exponential could overflow."""
    return np.where(value > 0, value * np.exp(np.minimum(exponent, 700.0)), 0.0)


def of_mechanism(mechanism: Gaussian | Laplace | PureDP) -> Curve:
    """The dominating pair of one mechanism: shifted noise, or randomised response where only epsilon is known."""
    match mechanism:
        case Gaussian(noise):
            return _mirrored(lambda epsilons: gaussian_call(epsilons, 1 / noise))
        case Laplace(noise):
            return _mirrored(lambda epsilons: _laplace_call(epsilons, 1 / noise))
        case PureDP(epsilon):
            response = _mirrored(lambda epsilons: _response_call(epsilons, epsilon))
            return replace(response, anchor=-epsilon, lattice=2 * epsilon)


def of_profile(profile: Callable[[Array], Array], *, top: float, points: int = 600) -> Curve:
    """The pair of a mechanism of which only upper bounds on delta are known, valid in both directions.

    The true curve is convex in e^epsilon, so the chords through upper bounds lie above it; beyond `top` the last bound
    stays.
    """
    knots = np.linspace(0.0, top, points)
    deltas = np.minimum.accumulate(profile(knots))

    def call(epsilons: Array) -> Evaluated:
        right = np.clip(np.searchsorted(knots, epsilons, side="right"), 1, points - 1)
        low, high = knots[right - 1], knots[right]
        share = np.clip(np.expm1(np.minimum(epsilons, high) - low) / np.expm1(high - low), 0.0, 1.0)
        value = (1 - share) * deltas[right - 1] + share * deltas[right]
        return value, _FEW * value

    return _mirrored(call)


def nothing() -> Curve:
    """The pair of a mechanism that says nothing: a lower bound for any."""
    return replace(_mirrored(lambda epsilons: (np.zeros_like(epsilons), np.zeros_like(epsilons))), silent=True)


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
    tail = np.where(far, 0.5 * density * erfcx(np.where(far, a, 0.0) / np.sqrt(2)), ndtr(-a))
    value = np.maximum(tail - 0.5 * density * erfcx(b / np.sqrt(2)), 0.0)
    # In units: a and b are off by 2 (|a| + b) (quotient, half, difference, the rounded mean), so the exponential by
    # 2 |a| (|a| + b) + a^2 + 2; erfcx and ndtr by at most 8 (measured in the tests), products by 3; the second term is
    # no larger than the first. Together 26 + 6 a^2 + 4 |a| b, and b >= |a|. What is left, 6 + 8 b mean, pays for an
    # epsilon that is itself off by 3 + epsilon units, as after `_before_sampling`: the slope is at most the tail.
    return value, (32 + 4 * (np.abs(a) + b + mean) ** 2) * UNIT * tail


def _laplace_call(epsilons: Array, most: float) -> Evaluated:
    value = np.where(epsilons < most, -np.expm1((np.minimum(epsilons, most) - most) / 2), 0.0)
    return value, np.where(epsilons < most * (1 + _FEW), _FEW * (value + most), 0.0)


def _response_call(epsilons: Array, most: float) -> Evaluated:
    value = np.where(epsilons < most, -np.expm1(np.minimum(epsilons, most) - most) / (1 + np.exp(-most)), 0.0)
    return value, np.where(epsilons < most * (1 + _FEW), _FEW * (value + most), 0.0)


def _mirrored(call: Callable[[Array], Evaluated]) -> Curve:
    """A pair that swaps into itself: the put is the mirrored call."""

    def put(epsilons: Array) -> Evaluated:
        value, error = call(-epsilons)
        # The error is not scaled down by e^epsilon: sampling's inverse near R = 1 - rate loses digits there.
        return np.exp(epsilons) * value, error + _FEW * value

    return Curve(call, put, True)
