"""Renyi accounting: real orders, each optimised, and the tight conversion to (epsilon, delta).

Mironov 2017 (composition by addition at each order); Mironov, Talwar, Zhang 2019 (the Poisson-sampled Gaussian, and
that the direction "with the record against without" is the larger one for mechanisms with a reflection, which
Gaussian, Laplace and randomised response have); Canonne, Kamath, Steinke 2020, Proposition 12 (the conversion).
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import scipy

from hush.accounting import allocation, selection
from hush.accounting import likelihood_ratios as losses
from hush.accounting.bounds import Bounds
from hush.accounting.events import (
    ZCDP,
    Allocated,
    DiscreteGaussian,
    Either,
    Event,
    Gaussian,
    Grouped,
    Laplace,
    Mechanism,
    PoissonSampled,
    Selected,
    Split,
    WithoutReplacement,
    parts_of,
)
from hush.accounting.failures import answers_delta, answers_epsilon
from hush.accounting.reductions import coarse, pure_total, refuse, require_delta

# The optimiser walks ln(order - 1) over this range; beyond it nothing is gained for any delta >= 1e-300.
_LOWEST, _HIGHEST = math.log(1e-8), math.log(1e10)
_ROUND_UP = 1e-10  # quadrature and round-off err by less than 1e-11 of a log moment; tests compare with mpmath


@answers_epsilon
def epsilon(event: Event, *, delta: float) -> Bounds:
    """An upper bound on epsilon at this delta; the lower bound is 0, nothing better is claimed.

    >>> from hush.accounting.events import Gaussian, PoissonSampled
    >>> round(epsilon(PoissonSampled(0.01, Gaussian(4.0)) * 10_000, delta=1e-5).upper, 4)
    1.0354
    """
    found = _least(lambda order: epsilon_at(order, divergence(event, order), delta=delta))
    return Bounds(0.0, min(max(found, 0.0), pure_total(event)))


@answers_delta
def delta(event: Event, *, epsilon: float) -> Bounds:
    """An upper bound on delta at this epsilon; at most 1."""
    if pure_total(event) <= epsilon:
        return Bounds(0.0, 0.0)
    found = _least(lambda order: log_delta_at(order, divergence(event, order), epsilon=epsilon))
    return Bounds(0.0, min(1.0, max(math.exp(min(found, 0.0)), math.ulp(0.0))))


def divergences(event: Event, orders: Sequence[float]) -> tuple[float, ...]:
    """Upper bounds on the Renyi divergence of the event at each order, both directions of adjacency."""
    return tuple(divergence(event, order) for order in orders)


def divergence(event: Event, order: float) -> float:
    """An upper bound on the Renyi divergence of the event at one real order > 1, both directions of adjacency.

    >>> from hush.accounting.events import Gaussian
    >>> round(divergence(Gaussian(2.0) * 8, 3.0), 6)
    3.0
    """
    if not (order > 1 and math.isfinite(order)):
        raise ValueError(f"a Renyi order must be a number > 1, got {order!r}")
    total = math.fsum(count * _log_moment(part, order) for part, count in parts_of(event))
    return total * (1 + _ROUND_UP) / (order - 1)


def best_order(event: Event, *, delta: float) -> float:
    """The order that makes the event's epsilon smallest; fix this one for a filter when a plan is known ahead."""
    require_delta(delta)
    orders: dict[float, float] = {}

    def remember(order: float) -> float:
        orders[order] = epsilon_at(order, divergence(event, order), delta=delta)
        return orders[order]

    _least(remember)
    return min(orders, key=orders.__getitem__)


def epsilon_at(order: float, divergence: float, *, delta: float) -> float:
    """Epsilon from one divergence (Canonne, Kamath, Steinke 2020, Prop. 12); may be negative, then 0 holds."""
    return divergence + math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)


def log_delta_at(order: float, divergence: float, *, epsilon: float) -> float:
    """The same proposition solved for ln(delta)."""
    return (order - 1) * (divergence - epsilon + math.log1p(-1 / order)) - math.log(order)


def _log_moment(event: Event, order: float) -> float:
    """ln of the larger of E_Q[(P/Q)^order] and E_P[(Q/P)^order] for one application of a mechanism."""
    match event:
        case Selected():
            return (order - 1) * min(_of_selection(event, order), pure_total(event))
        case Either(first, second):
            return max(_log_total(first, order), _log_total(second, order))
        case Split(share, first, second):
            return _mixed(share, _log_total(first, order), _log_total(second, order))
        case PoissonSampled(rate, Selected() as inner):
            return _mixed(rate, _log_moment(inner, order))
        case ZCDP(rho):
            return order * (order - 1) * rho
        case WithoutReplacement(lot_size, examples, inner):
            return _mixed(lot_size / examples, _of_simple(inner, order))
        case Allocated(steps, inner) if steps > 1:
            unamplified = _of_simple(inner, order)
            if order > allocation.HIGHEST_ORDER:
                return unamplified
            return min(unamplified, allocation.log_moment(steps, _whole_moments(inner), inner, order))
        case Grouped(size, PoissonSampled(rate, Gaussian(noise))) if 0 < rate < 1:
            return min(_of_simple(coarse(event), order), _of_group(size, rate, noise, order))
    return _of_simple(coarse(event), order)


@lru_cache(maxsize=100_000)
def _of_simple(event: Mechanism | PoissonSampled, order: float) -> float:
    match event:
        case Gaussian(noise):
            return order * (order - 1) / (2 * noise * noise)
        case Laplace(noise):
            return _of_laplace(noise, order)
        case PoissonSampled(rate, inner):
            if rate == 0:
                return 0.0
            if rate == 1:
                return _of_simple(inner, order)
            base = losses.of_mechanism(inner, order)
            if base is None:
                return _mixed(rate, _of_simple(inner, order))
            return _log1p_exp(losses.sampled(base, rate).log_moment_excess(order))
    ratios = losses.of_mechanism(event, order)
    if ratios is not None:
        return _log1p_exp(ratios.log_moment_excess(order))
    if isinstance(event, DiscreteGaussian):  # Canonne, Kamath, Steinke 2020, Theorem 4
        return order * (order - 1) * (event.sensitivity / event.scale) ** 2 / 2
    raise refuse(event)


def _mixed(share: float, log_moment: float, other: float = 0.0) -> float:
    """A mixture against one law: (q r + (1 - q) s)^order <= q r^order + (1 - q) s^order; coarse, cheap at any order."""
    if not 0 < share < 1:
        return log_moment if share >= 1 else other
    return float(np.logaddexp(math.log1p(-share) + other, math.log(share) + log_moment))


def _log_total(event: Event, order: float) -> float:
    return (order - 1) * divergence(event, order)


@lru_cache(maxsize=4096)
def _of_selection(event: Selected, order: float) -> float:
    """The Renyi divergence of a selection at this order."""

    def log_delta(epsilon: float) -> float:
        return _least(lambda order: log_delta_at(order, divergence(event.event, order), epsilon=epsilon))

    return selection.renyi_divergence(lambda order: divergence(event.event, order), log_delta, event.trials, order)


@lru_cache(maxsize=4096)
def _of_group(size: int, rate: float, noise: float, order: float) -> float:
    """Binomially many records of the group in the lot (Ganesh 2024): quadrature of both directions."""
    touched = np.arange(size + 1)
    log_choices = (
        scipy.special.gammaln(size + 1) - scipy.special.gammaln(touched + 1) - scipy.special.gammaln(size - touched + 1)
    )
    probabilities = np.exp(log_choices + touched * math.log(rate) + (size - touched) * math.log1p(-rate))
    probabilities /= probabilities.sum()
    both = [(losses.gaussian_mixture(probabilities, noise, power), power) for power in (order, 1 - order)]
    return max(math.inf if r is None else _log1p_exp(r.log_moment_excess(power)) for r, power in both)


def _of_laplace(noise: float, order: float) -> float:
    """Mironov 2017, Table II: ln((a e^((a-1)/b) + (a-1) e^(-a/b)) / (2a - 1)), less its terms that cancel."""
    grow, decay = (order - 1) / noise, order / noise
    if grow > 500:
        return math.log(order / (2 * order - 1)) + grow + 1e-12
    return math.log1p((order * _exp_gap(grow) + (order - 1) * _exp_gap(-decay)) / (2 * order - 1))


def _exp_gap(x: float) -> float:
    """e^x - 1 - x without cancellation."""
    if abs(x) > 0.1:
        return math.expm1(x) - x
    return math.fsum(x**k / math.factorial(k) for k in range(2, 14))


@lru_cache(maxsize=256)
def _whole_moments(mechanism: Mechanism) -> tuple[float, ...]:
    return (0.0, 0.0, *(_of_simple(mechanism, float(n)) for n in range(2, allocation.HIGHEST_ORDER + 1)))


def _log1p_exp(log_excess: float) -> float:
    return float(np.logaddexp(0.0, log_excess)) if log_excess > -30 else math.exp(log_excess)


def _least(objective: Callable[[float], float]) -> float:
    """The minimum over orders of an objective with one valley: a ladder of doublings, then a bounded search."""

    def at(log_beta: float) -> float:
        return objective(1 + math.exp(log_beta))

    rungs: list[float] = []
    values: list[float] = []
    log_beta = _LOWEST
    while log_beta <= _HIGHEST:
        rungs.append(log_beta)
        values.append(at(log_beta))
        if len(values) > 3 and min(values[-3:]) > min(values):
            break  # three rungs uphill
        log_beta += math.log(2)
    best = values.index(min(values))
    low, high = rungs[max(best - 1, 0)], rungs[min(best + 1, len(rungs) - 1)]
    refined = scipy.optimize.minimize_scalar(at, bounds=(low, high), method="bounded", options={"xatol": 1e-6})
    return min(values[best], float(refined.fun))
