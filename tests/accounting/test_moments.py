"""The paper's accountant against the paper, its published log, and integrals in high precision."""

import math

import pytest
from oracles.privacy_moments import log_moment_sampled_gaussian

from hush.accounting import (
    Allocated,
    Gaussian,
    Laplace,
    MomentsAccountant,
    PoissonSampled,
    PureDP,
    Shuffled,
    moments,
    renyi,
)

STEP = PoissonSampled(0.01, Gaussian(4.0))


@pytest.mark.parametrize(("steps", "printed"), [(10_000, 1.2586), (40_000, 2.5759)])
def test_golden_values(steps: int, printed: float) -> None:
    assert round(moments.epsilon(STEP * steps, delta=1e-5).upper, 4) == printed


PUBLISHED = {0.125: 0.72709, 0.25: 0.24708, 0.5: 0.0029139, 1: 6.494e-10, 2: 8.2242e-24, 4: 1.319e-51, 8: 3.3927e-107}


@pytest.mark.parametrize(("epsilon", "published"), PUBLISHED.items())
def test_the_published_log_of_ten_lots_and_pca(epsilon: float, published: float) -> None:
    run = STEP * 20 + Gaussian(7.0)  # two tensors a lot, as the published code charged
    assert moments.delta(run, epsilon=epsilon).upper == pytest.approx(published, rel=5e-5)


@pytest.mark.parametrize("order", [1, 7, 32])
@pytest.mark.parametrize(("rate", "noise"), [(0.01, 4.0), (0.5, 0.6), (1e-6, 1.0), (1.0, 2.0), (0.2, 30.0)])
def test_integration_and_closed_form_are_the_integral(rate: float, noise: float, order: int) -> None:
    e2 = log_moment_sampled_gaussian(rate, noise, order + 1)
    e1 = log_moment_sampled_gaussian(rate, noise, -order)
    exact = float(max(e1, e2))
    found = moments.by_integration(rate, noise, order)
    assert exact <= found <= exact * (1 + 1e-11) + 1e-12
    assert moments.closed_form(rate, noise, order) == pytest.approx(exact, rel=1e-11, abs=1e-13)


def test_more_moments_on_request_help_where_epsilon_is_small() -> None:
    run = STEP * 10
    few = moments.epsilon(run, delta=1e-5).upper
    many = moments.epsilon(run, delta=1e-5, lambdas=range(1, 200)).upper
    assert many < few / 2
    assert many >= renyi.epsilon(run, delta=1e-5).upper
    with pytest.raises(ValueError, match="whole numbers"):
        moments.epsilon(run, delta=1e-5, lambdas=[1.5])  # type: ignore[list-item]


def test_the_asymptotic_bound_holds_inside_its_conditions_and_is_refused_outside() -> None:
    for order in (1, 8, 32):
        assert moments.asymptotic(0.01, 4.0, order) >= moments.by_integration(0.01, 4.0, order)
    for rate, noise, order, named in [(0.01, 0.5, 1, "noise >= 1"), (0.5, 2.0, 1, "rate"), (0.01, 1.0, 32, "lambda")]:
        with pytest.raises(ValueError, match=named):
            moments.asymptotic(rate, noise, order)


@pytest.mark.parametrize("epsilon", [0.01, 0.3, 2.0])
@pytest.mark.parametrize("order", [1, 5, 32])
def test_the_lemma_bounds_randomised_response_and_laplace(epsilon: float, order: int) -> None:
    lemma = moments.of_pure_dp(epsilon, order)
    likely = 1 / (1 + math.exp(-epsilon))
    exact = math.log(likely * math.exp(order * epsilon) + (1 - likely) * math.exp(-order * epsilon))
    assert lemma >= exact
    assert order * renyi.divergence(Laplace(1 / epsilon), order + 1) <= lemma * (1 + 1e-9)
    assert moments.log_moments(PureDP(epsilon), [order])[0] <= min(lemma, order * epsilon)


def test_the_accountant_charges_before_and_answers_at_any_time() -> None:
    accountant = MomentsAccountant()
    assert accountant.epsilon(delta=1e-5) == accountant.delta(epsilon=0.0) == 0.0
    accountant.accumulate(STEP * 4_000)
    halfway = accountant.epsilon(delta=1e-5)
    accountant.accumulate(STEP * 6_000)
    assert 0 < halfway < accountant.epsilon(delta=1e-5)
    assert accountant.epsilon(delta=1e-5) == pytest.approx(1.25857, abs=1e-5)
    assert accountant.delta(epsilon=1.25858) == pytest.approx(1e-5, rel=1e-3)
    assert accountant.event == STEP * 10_000


def test_lots_without_an_analysis_in_the_paper_are_charged_without_amplification() -> None:
    plain = moments.epsilon(Gaussian(4.0) * 5, delta=1e-5)
    assert moments.epsilon(Shuffled(100, Gaussian(4.0)) * 5, delta=1e-5) == plain
    assert moments.epsilon(Allocated(100, Gaussian(4.0)) * 5, delta=1e-5) == plain
