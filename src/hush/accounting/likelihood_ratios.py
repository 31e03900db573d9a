"""Likelihood ratios dP/dQ of one mechanism on quadrature nodes, and their power moments without cancellation.

P is the output with the record, Q without. With r = dP/dQ, E_Q[r] = 1, so for any power p outside [0, 1]
    E_Q[r^p] - 1 = E_Q[r^p - 1 - p (r - 1)],
an integrand that is never negative: the sum keeps its relative precision even where the result is 1e-22.
"""

import math
from dataclasses import dataclass

import numpy as np
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
from hush.accounting.finite import outcomes

Array = NDArray[np.float64]

MOST_NODES = 200_000
TAIL = 12.0  # standard deviations kept beyond the outermost peak: exp(-72) of the integral is left out


@dataclass(frozen=True)
class Ratios:
    """Nodes of Q: `excess` is r - 1, `log` is ln r, `log_weight` is the logarithm of Q's weight there."""

    excess: Array
    log: Array
    log_weight: Array

    def log_moment_excess(self, power: float) -> float:
        """ln(E_Q[r^power] - 1) for a power > 1 or < 0; -inf where the mechanism reveals nothing."""
        small = np.abs(self.excess) * (abs(power) + 2) < 0.1
        terms = np.empty_like(self.log)
        with np.errstate(divide="ignore", under="ignore"):
            terms[small] = _log_convex_gap_small(self.excess[small], power)
            terms[~small] = _log_convex_gap(self.log[~small], power)
            terms += self.log_weight
            peak = float(terms.max())
            return peak + math.log(np.exp(terms - peak).sum()) if peak > -math.inf else peak


def sampled(ratios: Ratios, rate: float) -> Ratios:
    """The ratios of (1 - rate) Q + rate P against Q."""
    with np.errstate(over="ignore", divide="ignore"):
        excess = rate * np.expm1(ratios.log)
        far = np.logaddexp(np.log1p(-rate), np.log(rate) + ratios.log)
        near = np.log1p(np.maximum(excess, -0.5))
    return Ratios(np.minimum(excess, 1e300), np.where(np.abs(excess) < 0.5, near, far), ratios.log_weight)


def gaussian_mixture(probabilities: Array, noise: float, power: float) -> Ratios | None:
    """Ratios of sum_j probabilities[j] N(j, noise^2) against N(0, noise^2), nodes placed for `power`.

    The trapezoid rule: the integrand is analytic in a strip of half-width pi noise^2 around the line, where its modulus
    is at most exp(d^2 / 2 noise^2) times its value on the line, so with this spacing the rule errs by less than
    1e-15 of the whole. None if that would take too many nodes.
    """
    size = len(probabilities) - 1
    step = min(noise / 3, noise * noise / 2)
    reach = size * max(power, 2.0) if power > 0 else float(size * 2)
    start = 0.0 if power > 0 else size * power
    count = math.ceil((reach - start + 2 * TAIL * noise) / step) + 1
    if count * (size + 1) > MOST_NODES:
        return None
    z: Array = start - TAIL * noise + step * np.arange(count, dtype=np.float64)
    log_weight = -0.5 * (z / noise) ** 2 - math.log(noise * math.sqrt(2 * math.pi)) + math.log(step)
    shift = np.arange(size + 1)[:, None]
    losses = shift * (2 * z - shift) / (2 * noise * noise)
    with np.errstate(over="ignore", divide="ignore"):
        excess = np.minimum((probabilities[:, None] * np.expm1(np.minimum(losses, 600.0))).sum(axis=0), 1e300)
        far = np.logaddexp.reduce(losses + np.log(probabilities)[:, None], axis=0)
        near = np.log1p(np.maximum(excess, -0.5))
    return Ratios(excess, np.where(np.abs(excess) < 0.5, near, far), log_weight)


def of_mechanism(mechanism: Mechanism, power: float) -> Ratios | None:
    """Ratios of a mechanism seen by every record, nodes placed for `power`; None if that takes too many nodes."""
    match mechanism:
        case Gaussian(noise):
            return gaussian_mixture(np.array([0.0, 1.0]), noise, power)
        case Laplace(noise):
            return _laplace(noise, power)
        case PureDP() | RandomisedResponse() | DiscreteLaplace() | DiscreteGaussian():
            found = outcomes(mechanism)
            if isinstance(mechanism, DiscreteGaussian):
                # Its outcomes end at 38 deviations; a power's weight lies around power * sensitivity.
                reach = 38 * mechanism.scale - TAIL * mechanism.scale
                if (abs(power) + 1) * mechanism.sensitivity > reach:
                    return None
            return _from_logs(found.losses, found.log_q)
    raise ValueError(f"no likelihood ratios are known for {type(mechanism).__name__}")


def _laplace(noise: float, power: float) -> Ratios | None:
    """Two atoms (left of 0, right of the sensitivity) and the stretch between, by Gauss-Legendre panels."""
    panels = 2 + math.ceil((abs(power) + 2) / (4 * noise))
    if panels * 32 > MOST_NODES:
        return None
    nodes, weights = np.polynomial.legendre.leggauss(32)
    z = ((np.arange(panels)[:, None] + (nodes + 1) / 2) / panels).ravel()
    middle = np.log(np.tile(weights, panels) / (2 * panels)) - z / noise - math.log(2 * noise)
    logs = np.concatenate([[-1 / noise, 1 / noise], (2 * z - 1) / noise])
    return _from_logs(logs, np.concatenate([[math.log(0.5), math.log(0.5) - 1 / noise], middle]))


def _from_logs(logs: Array, log_weight: Array) -> Ratios:
    return Ratios(np.expm1(np.minimum(logs, 600.0)), logs, log_weight)


def _log_convex_gap(log_ratio: Array, power: float) -> Array:
    """ln(r^p - 1 - p (r - 1)) from ln r, away from r = 1; neither overflow nor loss near p = 1 or p = 0."""
    grown = power * log_ratio
    if power < 0:
        # e^(p l) - 1 - p (e^l - 1); whichever exponential is huge is the whole value.
        value = np.log(np.expm1(np.minimum(grown, 600.0)) - power * np.expm1(np.minimum(log_ratio, 600.0)))
        return np.where(grown > 600, grown, np.where(log_ratio > 600, math.log(-power) + log_ratio, value))
    beta = power - 1
    above = log_ratio + np.log(
        np.expm1(np.clip(beta * log_ratio, 0, 600.0)) + beta * np.expm1(-np.maximum(log_ratio, 0))
    )
    above = np.where(beta * log_ratio > 600, grown, above)
    low = np.minimum(log_ratio, 0.0)
    below = np.log(np.exp(low) * np.expm1(beta * low) - beta * np.expm1(low))
    return np.where(log_ratio > 0, above, below)


def _log_convex_gap_small(excess: Array, power: float) -> Array:
    """The same by its binomial series, for |(|p| + 2) (r - 1)| < 0.1."""
    series = np.ones_like(excess)
    for k in range(16, 2, -1):
        series = 1 + series * excess * (power - k + 1) / k
    return np.log(power * (power - 1) / 2) + 2 * np.log(np.abs(excess)) + np.log(np.abs(series))
