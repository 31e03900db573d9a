"""Theorem 1 and the claims of section 3.1, held against certified bounds."""

import math

import pytest

from hush.accounting import Budget, Gaussian, PoissonSampled, PureDP, calibrate, delta, moments, strong, theorem1


@pytest.mark.parametrize(("rate", "steps", "epsilon"), [(0.002, 10**6, 1.0), (0.005, 40_000, 0.5)])
def test_where_the_proofs_conditions_hold_its_noise_is_enough(rate: float, steps: int, epsilon: float) -> None:
    sigma = theorem1.noise(rate=rate, steps=steps, epsilon=epsilon, delta=1e-5)
    failed = theorem1.unmet(rate=rate, noise=sigma, steps=steps, epsilon=epsilon, delta=1e-5)
    assert all("q < 1/(16 sigma)" in why for why in failed), failed
    assert delta(PoissonSampled(rate, Gaussian(sigma)) * steps, epsilon=epsilon).upper <= 1e-5
    # The constant is not loose by a factor of 3.
    third = theorem1.noise(rate=rate, steps=steps, epsilon=epsilon, delta=1e-5, c2=2 / 3)
    assert delta(PoissonSampled(rate, Gaussian(third)) * steps, epsilon=epsilon).lower > 1e-5


def test_any_delta_is_too_much_said() -> None:
    """Near 1 the theorem as worded fails, and the proof's conditions say why."""
    sigma = theorem1.noise(rate=0.01, steps=10_000, epsilon=0.5, delta=0.99)
    assert delta(PoissonSampled(0.01, Gaussian(sigma)) * 10_000, epsilon=0.5).lower > 0.99
    failed = theorem1.unmet(rate=0.01, noise=sigma, steps=10_000, epsilon=0.5, delta=0.99)
    assert any("sigma >= 1" in why for why in failed) and any("lambda >= 1" in why for why in failed)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"noise": 3.0}, "lambda^2 / sigma^2"),
        ({"noise": 0.5}, "sigma >= 1"),
        ({"noise": 600.0}, "q < 1"),
        ({"epsilon": 1e-4, "noise": 1.5}, "ln"),
    ],
)
def test_each_condition_is_named_when_it_fails(change: dict[str, float], named: str) -> None:
    fine = {"rate": 2e-4, "noise": 6.8, "steps": 2_000_000, "epsilon": 0.3, "delta": 1e-5}
    assert theorem1.unmet(**fine) == []  # type: ignore[arg-type]
    assert any(named in why for why in theorem1.unmet(**(fine | change)))  # type: ignore[arg-type]


def test_measured_constants() -> None:
    """sigma epsilon / (q sqrt(T ln 1/delta)) at the paper's setting, from 0.7 to 1.5 where the theorem speaks."""
    for steps, known in ((10_000, 1.1164), (40_000, 1.198)):
        found = theorem1.measured_c2(rate=0.01, noise=4.0, steps=steps, delta=1e-5)
        assert found == pytest.approx(known, rel=2e-2)


def test_strong_composition_needs_more_noise_by_a_factor_that_grows() -> None:
    """Section 3.1: Omega(q sqrt(T ln(1/delta) ln(T/delta)) / epsilon) against O(q sqrt(T ln(1/delta)) / epsilon)."""
    ratios, claimed = [], []
    for steps in (10**4, 10**6):

        def run(sigma: float, steps: int = steps) -> PoissonSampled:
            return PoissonSampled(0.01, Gaussian(sigma)) * steps  # type: ignore[return-value]

        needed = {
            name: calibrate.noise(run, Budget(epsilon=1.0, delta=1e-5), accountant=name) for name in ("strong", "renyi")
        }
        ratios.append(needed["strong"] / needed["renyi"])
        claimed.append(math.sqrt(math.log(steps / 1e-5)))
    assert ratios[1] > ratios[0] > 2
    assert ratios[1] / ratios[0] == pytest.approx(claimed[1] / claimed[0], rel=0.1)


@pytest.mark.parametrize(("each", "count"), [(0.01, 10_000), (0.1, 1_000), (0.5, 100)])
def test_the_lemma_of_pure_privacy_is_about_strong_composition(each: float, count: int) -> None:
    """Appendix C, remark: the lemma with Theorem 2 is about as good as strong composition while epsilon is small."""
    alphas = [count * moments.of_pure_dp(each, order) for order in (n / 100 for n in range(1, 20_000))]
    lemma = min((a + math.log(1e5)) / (n / 100) for n, a in enumerate(alphas, start=1))
    known = each * math.sqrt(2 * count * math.log(1e5)) + count * each * math.expm1(each)
    assert known < lemma < (1.02 if each < 0.05 else 1.15 if each < 0.2 else 1.7) * known
    assert strong.epsilon(PureDP(each) * count, delta=1e-5).upper <= known * (1 + 1e-9)


def test_the_floor_under_every_epsilon_of_thirty_two_moments() -> None:
    assert moments.epsilon(PoissonSampled(1e-6, Gaussian(100.0)), delta=1e-5).upper == pytest.approx(
        math.log(1e5) / 32, rel=1e-6
    )
