"""Strong composition: the paper's printed values, named not valid, and the valid form."""

import math

import pytest
from oracles.privacy_moments import gaussian_delta

from hush.accounting import Gaussian, Laplace, PoissonSampled, PureDP, epsilon, strong

STEP = PoissonSampled(0.01, Gaussian(4.0))


@pytest.mark.parametrize(("steps", "printed"), [(10_000, 9.34), (40_000, 24.22)])
def test_the_papers_form_reproduces_the_papers_values(steps: int, printed: float) -> None:
    assert round(strong.paper_epsilon(STEP * steps, delta=1e-5).upper, 2) == printed


@pytest.mark.parametrize(("steps", "known"), [(10_000, 26.2), (40_000, 81.5)])
def test_the_valid_form(steps: int, known: float) -> None:
    assert round(strong.epsilon(STEP * steps, delta=1e-5).upper, 1) == known


def test_the_papers_form_answers_only_for_what_the_paper_composes() -> None:
    for event in (Gaussian(4.0) * 3, STEP * 3 + Gaussian(7.0), PoissonSampled(0.1, Laplace(1.0))):
        with pytest.raises(ValueError, match="Poisson-sampled Gaussian only"):
            strong.paper_epsilon(event, delta=1e-5)
    assert epsilon(STEP * 0, delta=1e-5, accountant="strong-paper").upper == 0.0


@pytest.mark.parametrize("noise", [0.3, 1.0, 4.0, 1000.0])
@pytest.mark.parametrize("value", [0.0, 0.1, 1.5, 20.0])
def test_the_exact_gaussian_curve(noise: float, value: float) -> None:
    assert strong.gaussian_delta(noise, value) == pytest.approx(
        float(gaussian_delta(noise, value)), rel=1e-9, abs=1e-300
    )


@pytest.mark.parametrize("noise", [0.05, 0.3, 1.0, 4.0])
@pytest.mark.parametrize("delta", [0.4, 1e-3, 1e-12])
def test_one_gaussian_is_never_charged_below_its_exact_cost(noise: float, delta: float) -> None:
    found = strong.naive_epsilon(Gaussian(noise), delta=delta).upper
    assert gaussian_delta(noise, found) <= delta


def test_pure_mechanisms_compose_by_the_theorem_and_never_above_the_plain_sum() -> None:
    few, many = PureDP(0.1) * 3, PureDP(0.1) * 10_000
    assert strong.epsilon(few, delta=1e-5).upper == pytest.approx(0.3)
    expected = 0.1 * math.sqrt(2 * 10_000 * math.log(1e5)) + 10_000 * 0.01
    assert strong.epsilon(many, delta=1e-5).upper == pytest.approx(expected, rel=1e-3)
    assert strong.delta(few, epsilon=0.3 + 1e-9).upper == 0.0


def test_delta_is_the_inverse_of_epsilon() -> None:
    run = STEP * 1000
    answer = strong.epsilon(run, delta=1e-6).upper
    assert strong.delta(run, epsilon=answer * (1 + 1e-9)).upper == pytest.approx(1e-6, rel=1e-3)
    assert strong.delta(run, epsilon=0.0).upper == 1.0
