"""True positive rates against the trade-off curves that are known in closed form."""

import math

import pytest
from scipy.stats import norm

from hush.accounting import Gaussian, PoissonSampled, PureDP, true_positive_rate


@pytest.mark.parametrize("noise", [0.7, 1.0, 4.0])
@pytest.mark.parametrize("rate", [1e-4, 0.05, 0.6])
def test_the_gaussian(noise: float, rate: float) -> None:
    exact = float(norm.cdf(norm.ppf(rate) + 1 / noise))  # Dong, Roth, Su 2022, the trade-off curve of mu-GDP
    assert exact <= true_positive_rate(Gaussian(noise), false_positive_rate=rate) <= exact * (1 + 1e-4)


@pytest.mark.parametrize("rate", [0.01, 0.3, 0.9])
def test_randomised_response(rate: float) -> None:
    exact = min(math.e * rate, 1 - (1 - rate) / math.e)
    assert exact * (1 - 1e-12) <= true_positive_rate(PureDP(1.0), false_positive_rate=rate) <= exact * 1.001


def test_a_run_and_its_range() -> None:
    run = PoissonSampled(0.01, Gaussian(1.1)) * 1500
    found = [true_positive_rate(run, false_positive_rate=rate) for rate in (0.001, 0.01, 0.1)]
    assert 0.001 < found[0] < found[1] < found[2] < 0.5
    assert found[1] <= true_positive_rate(run, false_positive_rate=0.01, accountant="renyi")
    for rate in (0.0, 1.0, math.nan):
        with pytest.raises(ValueError, match="false_positive_rate"):
            true_positive_rate(run, false_positive_rate=rate)
