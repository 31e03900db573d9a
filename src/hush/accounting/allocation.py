"""Renyi moments of one epoch of random allocation: every record joins one of t lots, uniformly.

With the record the t outputs are the mixture P = 1/t sum_i (record in lot i), without it Q = no record anywhere
(Feldman and Shenfeld, "Privacy amplification by random allocation", 2025: this pair dominates the epoch, also when the
lots' queries adapt). The ratio dP/dQ is the mean r = (r_1 + ... + r_t) / t of independent ratios of the one-lot
mechanism.
"""

import math
from functools import lru_cache

import numpy as np
import scipy

from hush.accounting import likelihood_ratios as losses
from hush.accounting.events import Gaussian, Mechanism
from hush.accounting.likelihood_ratios import Array

HIGHEST_ORDER = 256
_ROUND_OFF = 1e-12  # an allowance per order on ln of a moment, above what 256 x 40 log-sum-exps can lose


def log_moment(steps: int, base_log_moments: tuple[float, ...], mechanism: Mechanism, order: float) -> float:
    """An upper bound on ln max(E_Q[r^order], E_Q[r^(1 - order)]), both directions, for a real order in [1, 256].

    `base_log_moments` are the one-lot mechanism's at the whole orders. The logarithm of a moment is convex in its
    order, so between whole orders the chord is an upper bound.
    """
    table = _table(steps, base_log_moments, mechanism)
    below = min(int(order), HIGHEST_ORDER - 1)
    return float(table[below] + (order - below) * (table[below + 1] - table[below]))


@lru_cache(maxsize=64)
def _table(steps: int, base_log_moments: tuple[float, ...], mechanism: Mechanism) -> Array:
    """Bounds at the whole orders 0..HIGHEST_ORDER (entries 0 and 1 are exactly 0)."""
    table = np.maximum(_with_record(steps, base_log_moments), _without_record(steps, base_log_moments, mechanism))
    table += _ROUND_OFF * np.arange(HIGHEST_ORDER + 1)
    table[:2] = 0.0
    return table


def _with_record(steps: int, base_log_moments: tuple[float, ...]) -> Array:
    """ln E_Q[r^n] for n = 0..HIGHEST_ORDER.

    E_Q[(r_1 + ... + r_t)^n] = n! [y^n] (sum_k E_Q[r_1^k] y^k / k!)^t; all terms are positive, so the power is taken by
    repeated squaring on logarithms.
    """
    orders = np.arange(HIGHEST_ORDER + 1)
    square = np.array(base_log_moments) - scipy.special.gammaln(orders + 1)
    power = np.full(HIGHEST_ORDER + 1, -np.inf)
    power[0] = 0.0
    remaining = steps
    while remaining:
        if remaining & 1:
            power = _multiply(power, square)
        remaining >>= 1
        if remaining:
            square = _multiply(square, square)
    return power + scipy.special.gammaln(orders + 1) - orders * math.log(steps)


def _multiply(a: Array, b: Array) -> Array:
    """The product of two power series with positive coefficients, on logarithms."""
    n = np.arange(len(a))
    gap = n[:, None] - n[None, :]
    terms = np.where(gap >= 0, a[None, :] + b[np.maximum(gap, 0)], -np.inf)
    peak = terms.max(axis=1, keepdims=True)
    with np.errstate(under="ignore"):
        return (peak + np.log(np.exp(terms - peak).sum(axis=1, keepdims=True)))[:, 0]


def _without_record(steps: int, base_log_moments: tuple[float, ...], mechanism: Mechanism) -> Array:
    """Upper bounds on ln E_Q[r^(1-n)], the other direction, for n = 0..HIGHEST_ORDER.

    r^-s = 1/Gamma(s) int_0^inf y^(s-1) e^(-y r) dy, and E_Q[e^(-y r)] = M(y/t)^t with the one-lot transform
    M(v) = E_Q[e^(-v r_1)]: one outer trapezoid rule in ln y. Where its ends are not yet negligible, the bound of an
    epoch without amplification stands in (joint convexity).
    """
    bounds = np.array(base_log_moments)
    nodes = _one_lot_nodes(mechanism)
    if nodes is None:
        return bounds
    step = 1 / 32
    log_y = np.arange(-45.0, 60.0, step)
    log_power = np.array([steps * _log_transform(*nodes, v - math.log(steps)) for v in log_y])
    for n in range(2, HIGHEST_ORDER + 1):
        terms = (n - 1) * log_y + log_power
        peak = terms.max()
        if terms[-1] > peak - 60 or terms[0] > peak - 36:
            continue
        with np.errstate(under="ignore"):
            value = peak + math.log(np.exp(terms - peak).sum() * step) - scipy.special.gammaln(n - 1)
        bounds[n] = min(bounds[n], max(value, 0.0))
    return bounds


def _one_lot_nodes(mechanism: Mechanism) -> tuple[Array, Array] | None:
    """(weights of Q, ln r_1) for M(v): fine and far enough that M keeps its relative precision down to 1e-280."""
    if isinstance(mechanism, Gaussian):
        noise = mechanism.noise_multiplier
        step = min(noise / 8, noise * noise / 16)
        if 72 * noise / step > 20_000:
            return None
        z = np.arange(-36 * noise, 36 * noise, step)
        with np.errstate(under="ignore"):
            weights = np.exp(-0.5 * (z / noise) ** 2) * (step / (noise * math.sqrt(2 * math.pi)))
        return weights, (2 * z - 1) / (2 * noise * noise)
    ratios = losses.of_mechanism(mechanism, -30.0)
    return None if ratios is None else (np.exp(ratios.log_weight), ratios.log)


def _log_transform(weights: Array, log_ratio: Array, log_v: float) -> float:
    """ln M(v) with its full precision near M = 1; the mass of Q beyond the nodes counts as ratio 0."""
    with np.errstate(under="ignore"):
        decay = -np.exp(np.minimum(log_v + log_ratio, 700.0))
        missing = -float((weights * np.expm1(decay)).sum())
        if missing < 0.5:
            return math.log1p(-missing)
        return math.log(float((weights * np.exp(decay)).sum()) + 1e-282)
