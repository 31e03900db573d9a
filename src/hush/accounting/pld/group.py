"""A group of records under Poisson sampling: how many of them enter a lot is binomial.

With j of them in the lot the noise is shifted by at most j, so P = sum_j Binomial(j) N(j, noise^2) against
Q = N(0, noise^2), and R = sum_j Binomial(j) R_j grows with the output x. At the x where R = t calls add up:
E[(R - t)+] = sum_j Binomial(j) E[(R_j - t_j)+] with t_j = R_j(x), each term with its own relative accuracy. At an x
that is a little off, the sum is the call at R(x): wrong by at most |R(x) - t| times the chance of an output beyond.
"""

import numpy as np
import scipy

from hush.accounting.pld.curves import UNIT, Array, Curve, Evaluated, gaussian_call

_NEWTON_STEPS = 60
_NEGLIGIBLE = 1e-250


def group(size: int, rate: float, noise: float) -> Curve:
    """The curve of `size` records together, 0 < rate < 1."""
    entered = np.arange(1, size + 1, dtype=np.float64)
    log_chances = (
        scipy.special.gammaln(size + 1)
        - scipy.special.gammaln(entered + 1)
        - scipy.special.gammaln(size - entered + 1)
        + entered * np.log(rate)
        + (size - entered) * np.log1p(-rate)
    )
    kept = log_chances > np.log(_NEGLIGIBLE)
    entered, log_chances = entered[kept], log_chances[kept]
    none = size * np.log1p(-rate)
    # gammaln and the logs lose a few units of the size of their values.
    relative = UNIT * (64 + 16 * (float(scipy.special.gammaln(size + 1)) + size * abs(np.log(rate))))

    def outputs(epsilons: Array) -> tuple[Array, Array]:
        """The x with R(x) = e^epsilon, by Newton from above on a convex function, and a bound on |R(x) - e^epsilon|.

        The bound is the residual that is left, with what it is rounded by; it holds however well Newton did.
        """
        above_none = epsilons + np.log(-np.expm1(np.minimum(none - epsilons, -1e-300)))
        x = np.min(((above_none[:, None] - log_chances) / entered) * noise**2 + entered / 2, axis=1)
        for step in range(_NEWTON_STEPS + 1):
            exponents = log_chances + entered * (2 * x[:, None] - entered) / (2 * noise**2)
            most = exponents.max(axis=1)
            weights = np.exp(exponents - most[:, None])
            total = weights.sum(axis=1)
            slope = (weights @ entered) / total / noise**2
            residual = np.log(total) + most - above_none
            if step == _NEWTON_STEPS or np.all(np.abs(residual) <= 1e-14 * (np.abs(x) + noise) * slope):
                break
            x = x - residual / slope
        terms = np.abs(exponents).max(axis=1) + np.abs(log_chances).max() + np.abs(above_none)
        off = np.abs(residual) + relative + 16 * UNIT * (8 + terms)
        return x, np.exp(np.minimum(above_none, 600.0)) * np.expm1(np.minimum(off, 1.0))

    def call(epsilons: Array) -> Evaluated:
        x, off = outputs(epsilons)
        value, error = _terms(x, put=False)
        return value, error + 2 * off * scipy.special.ndtr(-x / noise)

    def put(epsilons: Array) -> Evaluated:
        inside = epsilons > none
        x, off = outputs(np.where(inside, epsilons, 0.0))
        value, error = _terms(x, put=True)
        return np.where(inside, value, 0.0), np.where(inside, error + 2 * off * scipy.special.ndtr(x / noise), 0.0)

    def _terms(x: Array, *, put: bool) -> Evaluated:
        value, error = np.zeros_like(x), np.full_like(x, size * _NEGLIGIBLE)
        for j, chance in zip(entered, np.exp(log_chances), strict=True):
            epsilons = j * (2 * x - j) / (2 * noise**2)
            own, own_error = gaussian_call(np.abs(epsilons), j / noise)
            shrink = np.exp(-np.abs(epsilons))
            if put:
                term = np.where(epsilons <= 0, shrink * own, own - _minus_expm1(epsilons))
            else:
                term = np.where(epsilons >= 0, own, shrink * own + _minus_expm1(epsilons))
            value += chance * term
            error += chance * (own_error + relative * (term + own))
        return value, error

    return Curve(call, put, False, float(none))


def _minus_expm1(epsilons: Array) -> Array:
    return -np.expm1(np.minimum(epsilons, 700.0))
