"""The moments accountant, in the words of Abadi et al., "Deep Learning with Differential Privacy" (2016), section 3.2.

The log moment alpha(lambda) of a mechanism bounds the moment generating function of its privacy loss, Eq. (2); it adds
up over mechanisms (Theorem 2.1), and Markov's inequality turns it into delta = min over lambda of exp(alpha(lambda) -
lambda epsilon) (Theorem 2.2). For the Gaussian with Poisson sampling there are three routes, as in section 4:
numerical integration (used here), a closed form, an asymptotic estimate.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import scipy
from numpy.typing import NDArray

from hush.accounting.bounds import Bounds
from hush.accounting.events import NOTHING, ZCDP, DiscreteGaussian, Event, Gaussian, PoissonSampled, parts_of
from hush.accounting.failures import answers_delta, answers_epsilon, without_failures
from hush.accounting.reductions import at_most, coarse, pure_epsilon, refuse

Array = NDArray[np.float64]

LAMBDAS = tuple(range(1, 33))  # "it suffices to compute alpha(lambda) for lambda <= 32"
_MOST_NODES = 200_000
_ROUND_UP = 1e-13  # more than the integration and its round-off can lose on ln E


@answers_epsilon
def epsilon(event: Event, *, delta: float, lambdas: Sequence[int] = LAMBDAS) -> Bounds:
    """The smallest epsilon that Theorem 2.2 gives for this delta; the lower bound is 0.

    >>> from hush.accounting.events import Gaussian, PoissonSampled
    >>> round(epsilon(PoissonSampled(0.01, Gaussian(4.0)) * 10_000, delta=1e-5).upper, 4)
    1.2586
    """
    if at_most(event) == NOTHING:
        return Bounds(0.0, 0.0)
    return Bounds(0.0, max(0.0, float(np.min((log_moments(event, lambdas) - math.log(delta)) / np.array(lambdas)))))


@answers_delta
def delta(event: Event, *, epsilon: float, lambdas: Sequence[int] = LAMBDAS) -> Bounds:
    """The smallest delta that Theorem 2.2 gives for this epsilon, at most 1."""
    if at_most(event) == NOTHING:
        return Bounds(0.0, 0.0)
    exponent = min(0.0, float(np.min(log_moments(event, lambdas) - np.array(lambdas) * epsilon)))
    return Bounds(0.0, max(math.exp(exponent), math.ulp(0.0)))


_epsilon, _delta = epsilon, delta  # the accountant's methods have the same names


class MomentsAccountant:
    """The paper's accountant: accumulate the cost of each access before it is used, ask what was spent at any time.

    What it answers holds for parameters and a number of steps fixed ahead (section 4 of the paper); where they are
    chosen in the run use `Filter` or `Odometer`.

    >>> accountant = MomentsAccountant()
    >>> accountant.accumulate(PoissonSampled(0.01, Gaussian(4.0)) * 10_000)
    >>> round(accountant.epsilon(delta=1e-5), 4)
    1.2586
    """

    def __init__(self, lambdas: Sequence[int] = LAMBDAS) -> None:
        self._lambdas = _whole(lambdas)
        self._event: Event = NOTHING

    def accumulate(self, event: Event) -> None:
        """Charge the event; call this before the event's result is used (AccumulatePrivacySpending)."""
        log_moments(without_failures(event)[1], self._lambdas)  # refused here, if at all; and remembered
        self._event = self._event + event

    @property
    def event(self) -> Event:
        """Everything accumulated, for any other accountant."""
        return self._event

    def epsilon(self, *, delta: float) -> float:
        """Epsilon spent so far at this delta."""
        return _epsilon(self._event, delta=delta, lambdas=self._lambdas).upper

    def delta(self, *, epsilon: float) -> float:
        """Delta spent so far at this epsilon."""
        return _delta(self._event, epsilon=epsilon, lambdas=self._lambdas).upper


def log_moments(event: Event, lambdas: Sequence[int] = LAMBDAS) -> Array:
    """alpha(lambda) of the event at each lambda: additive composition, Theorem 2.1.

    Allocated and Shuffled lots have no analysis in the paper; they are charged without amplification.
    """
    total = np.zeros(len(_whole(lambdas)))
    for part, count in parts_of(event):
        total += count * np.array([_log_moment(part, order) for order in lambdas])
    return total


@lru_cache(maxsize=100_000)
def _log_moment(event: Event, order: int) -> float:
    if isinstance(event, ZCDP):
        return order * (order + 1) * event.rho
    match coarse(event):
        case Gaussian(noise):
            return gaussian(noise, order)
        case PoissonSampled(rate, Gaussian(noise)):
            return by_integration(rate, noise, order)
        case DiscreteGaussian(scale, sensitivity):  # Canonne, Kamath, Steinke 2020, Theorem 4
            return gaussian(scale / sensitivity, order)
        case pure if pure_epsilon(pure) < math.inf:
            # Lemma of appendix C; besides, the privacy loss never exceeds epsilon.
            known = pure_epsilon(pure)
            return min(of_pure_dp(known, order), order * known)
    raise refuse(event)


def gaussian(noise: float, order: int) -> float:
    """alpha(lambda) = lambda (lambda + 1) / (2 sigma^2) of the Gaussian mechanism without sampling."""
    return order * (order + 1) / (2 * noise * noise)


def by_integration(rate: float, noise: float, order: int) -> float:
    """alpha(lambda) = ln max(E1, E2), Eqs. (3) and (4), by numerical integration.

    >>> by_integration(0.01, 4.0, 8) > closed_form(0.01, 4.0, 8) - 1e-12
    True
    """
    if rate == 0:
        return 0.0
    # mu0 = N(0, sigma^2), mu1 = N(1, sigma^2), mu = (1 - q) mu0 + q mu1, on a grid that spans the peaks of both
    # integrands. The integrands are analytic, so the trapezoid rule converges exponentially in 1 / step.
    step = min(noise / 4, noise * noise / (8 + order / 10))
    if (2 * order + 24 * noise) / step > _MOST_NODES:
        return closed_form(rate, noise, order) * (1 + 1e-10) + _ROUND_UP
    z = np.arange(-order - 12 * noise, order + 1 + 12 * noise, step)
    log_mu0 = -0.5 * (z / noise) ** 2 - math.log(noise * math.sqrt(2 * math.pi))
    with np.errstate(divide="ignore"):
        log_ratio = np.logaddexp(np.log1p(-rate), math.log(rate) + (2 * z - 1) / (2 * noise * noise))  # ln(mu / mu0)
    log_mu = log_mu0 + log_ratio
    e1 = scipy.special.logsumexp(log_mu0 - order * log_ratio) + math.log(step)  # E_{z ~ mu0} (mu0 / mu)^lambda
    e2 = scipy.special.logsumexp(log_mu + order * log_ratio) + math.log(step)  # E_{z ~ mu} (mu / mu0)^lambda
    return max(float(e1), float(e2), 0.0) * (1 + _ROUND_UP) + _ROUND_UP


def closed_form(rate: float, noise: float, order: int) -> float:
    """ln E2 by the binomial theorem, the second route; E1 <= E2 (Mironov, Talwar, Zhang 2019, Theorem 5)."""
    if rate == 0:
        return 0.0
    k = np.arange(order + 2)
    log_binomial = (
        scipy.special.gammaln(order + 2) - scipy.special.gammaln(k + 1) - scipy.special.gammaln(order + 2 - k)
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        log_stay = np.where(k == order + 1, 0.0, (order + 1 - k) * np.log1p(-rate))
    return float(
        scipy.special.logsumexp(log_binomial + log_stay + k * math.log(rate) + k * (k - 1) / (2 * noise * noise))
    )


def asymptotic(rate: float, noise: float, order: int) -> float:
    """The third route, q^2 lambda (lambda + 1) / ((1 - q) sigma^2): an ESTIMATE of alpha, not a bound.

    It leaves out the lemma's O(q^3 lambda^3 / sigma^3), and with it falls short of alpha in places where all of the
    lemma's conditions hold (at rate 0.0497, noise 1, lambda 3: 0.0312 for 0.0338). It explains how alpha grows, no
    accountant uses it, and where the conditions fail it is refused.

    >>> asymptotic(0.0497, 1.0, 3) < by_integration(0.0497, 1.0, 3)
    True
    """
    failed = asymptotic_conditions_failed(rate, noise, order)
    if failed:
        raise ValueError(f"the asymptotic estimate does not apply: {'; '.join(failed)}; use by_integration")
    return rate * rate * order * (order + 1) / ((1 - rate) * noise * noise)


def asymptotic_conditions_failed(rate: float, noise: float, order: int) -> list[str]:
    """Which conditions of appendix B's lemma fail: sigma >= 1, q < 1/(16 sigma), lambda <= sigma^2 ln(1/(q sigma)).

    >>> asymptotic_conditions_failed(0.01, 4.0, 32)
    []
    """
    failed = []
    if noise < 1:
        failed.append(f"it needs noise >= 1, got {noise}")
    if not 0 < rate < 1 / (16 * noise):
        failed.append(f"it needs 0 < rate < 1/(16 noise) = {1 / (16 * noise):.4g}, got {rate}")
    elif order > noise * noise * math.log(1 / (rate * noise)):
        failed.append(f"it needs lambda <= {noise * noise * math.log(1 / (rate * noise)):.4g}, got {order}")
    return failed


def of_pure_dp(epsilon: float, order: float) -> float:
    """Appendix C: an epsilon-private mechanism has alpha <= l eps (e^eps - 1) + l^2 eps^2 e^(2 eps) / 2."""
    if epsilon > 300:
        return math.inf
    return order * epsilon * math.expm1(epsilon) + order**2 * epsilon**2 * math.exp(2 * epsilon) / 2


def _whole(lambdas: Sequence[int]) -> tuple[int, ...]:
    if not lambdas or any(not isinstance(order, int) or order < 1 for order in lambdas):
        raise ValueError(f"lambdas must be whole numbers >= 1, got {lambdas!r}")
    return tuple(lambdas)
