"""A group of records under Poisson sampling: how many of them enter a lot is binomial.

With j of them in the lot the noise is shifted by at most j, so P = sum_j Binomial(j) N(j, noise^2) against
Q = N(0, noise^2), and R = sum_j Binomial(j) R_j grows with the output x. At the x where R = t calls add up:
E[(R - t)+] = sum_j Binomial(j) E[(R_j - t_j)+] with t_j = R_j(x), each term with its own relative accuracy.
"""

import numpy as np
from scipy.special import gammaln

from hush.accounting.pld.curves import UNIT, Array, Curve, Evaluated, gaussian_call

_NEWTON_STEPS = 60
_NEGLIGIBLE = 1e-250


def group(size: int, rate: float, noise: float) -> Curve:
    """The curve of `size` records together, 0 < rate < 1."""
    entered = np.arange(1, size + 1, dtype=np.float64)
    log_chances = (
        gammaln(size + 1)
        - gammaln(entered + 1)
        - gammaln(size - entered + 1)
        + entered * np.log(rate)
        + (size - entered) * np.log1p(-rate)
    )
    kept = log_chances > np.log(_NEGLIGIBLE)
    entered, log_chances = entered[kept], log_chances[kept]
    none = size * np.log1p(-rate)
    # gammaln and the logs lose a few units of the size of their values.
    relative = UNIT * (64 + 16 * (float(gammaln(size + 1)) + size * abs(np.log(rate))))

    def outputs(epsilons: Array) -> Array:
        """The x with R(x) = e^epsilon; Newton from above on a convex function."""
        above_none = epsilons + np.log(-np.expm1(np.minimum(none - epsilons, -1e-300)))
        x = np.min(((above_none[:, None] - log_chances) / entered) * noise**2 + entered / 2, axis=1)
        for _ in range(_NEWTON_STEPS):
            exponents = log_chances + entered * (2 * x[:, None] - entered) / (2 * noise**2)
            most = exponents.max(axis=1)
            weights = np.exp(exponents - most[:, None])
            total = weights.sum(axis=1)
            slope = (weights @ entered) / total / noise**2
            move = (np.log(total) + most - above_none) / slope
            x = x - move
            if np.all(np.abs(move) <= 1e-14 * (np.abs(x) + noise)):
                break
        return x

    def call(epsilons: Array) -> Evaluated:
        return _terms(outputs(epsilons), put=False)

    def put(epsilons: Array) -> Evaluated:
        inside = epsilons > none
        value, error = _terms(outputs(np.where(inside, epsilons, 0.0)), put=True)
        return np.where(inside, value, 0.0), np.where(inside, error, 0.0)

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
