"""Noise that is exact only to a distance: delta pays for it, against the closed form of the Gaussian mechanism."""

import math

import pytest
from scipy.stats import norm

from hush import accounting
from hush.accounting import Bounds, Gaussian
from hush.accounting.approximate_noise import added_delta, epsilon_of_inexact


def delta_of_gaussian(sigma: float, epsilon: float) -> float:
    """Balle and Wang 2018, theorem 8."""
    below, above = 1 / (2 * sigma) - epsilon * sigma, -1 / (2 * sigma) - epsilon * sigma
    return float(norm.cdf(below) - math.exp(epsilon) * norm.cdf(above))


@pytest.mark.parametrize("distance", [1e-20, 1e-16, 1e-12, 1e-9, 3e-8])
@pytest.mark.parametrize("sigma", [0.8, 2.0, 6.0])
def test_delta_of_the_true_law_is_at_most_what_is_stated(sigma: float, distance: float) -> None:
    """The accounted delta at the stated epsilon and all that the distance can add stay below delta together."""
    found = epsilon_of_inexact(
        lambda delta: accounting.epsilon(Gaussian(sigma), delta=delta), delta=1e-5, distance=distance
    )
    if found.upper == math.inf:
        assert (1 + math.exp(accounting.epsilon(Gaussian(sigma), delta=1e-5 * 0.875).upper)) * distance > 1e-5 / 8
        return
    whole = delta_of_gaussian(sigma, found.upper) + (1 + math.exp(found.upper)) * distance
    assert whole <= 1e-5
    exact = accounting.epsilon(Gaussian(sigma), delta=1e-5)
    assert found.lower <= exact.lower and exact.upper < found.upper < exact.upper * 1.1


def test_little_is_set_aside_where_little_is_needed() -> None:
    exact = accounting.epsilon(Gaussian(2.0), delta=1e-5).upper
    tiny = epsilon_of_inexact(lambda d: accounting.epsilon(Gaussian(2.0), delta=d), delta=1e-5, distance=2e-20).upper
    assert exact < tiny < exact * (1 + 1e-8)


def test_a_distance_that_delta_cannot_pay_for_has_no_epsilon() -> None:
    assert epsilon_of_inexact(lambda delta: Bounds(5.0, 5.0), delta=1e-5, distance=1e-7).upper == math.inf
    assert added_delta(1e-30, 1e4) == math.inf
    assert added_delta(1e-6, 0.0) == pytest.approx(2e-6)
