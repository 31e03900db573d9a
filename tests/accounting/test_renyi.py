"""Renyi divergences against integrals in high precision; orders that never limit the answer."""

import math
from itertools import pairwise

import mpmath as mp
import numpy as np
import pytest
from oracles.privacy_moments import (
    gaussian_epsilon,
    log_moment_randomised_response,
    log_moment_sampled_gaussian,
    log_moment_sampled_laplace,
    log_moment_two_lots,
    sampled_gaussian_delta,
    sampled_group_delta,
)

from hush.accounting import (
    Allocated,
    Event,
    Gaussian,
    Grouped,
    Laplace,
    PoissonSampled,
    PureDP,
    Shuffled,
    likelihood_ratios,
    moments,
    pld,
    renyi,
)
from hush.accounting.reductions import coarse

STEP = PoissonSampled(0.01, Gaussian(4.0))


def covers(found: float, exact: float, slack: float = 1e-9) -> bool:
    """An upper bound, and a tight one; the exact value itself is known to about 1e-13."""
    return exact * (1 - 1e-12) - 1e-25 <= found <= exact * (1 + slack) + 1e-25


def test_golden_values() -> None:
    # A grid of orders gives 1.0355; the best real order is a little better.
    assert renyi.epsilon(STEP * 10_000, delta=1e-5).upper == pytest.approx(1.0355, abs=1.5e-4)
    assert renyi.epsilon(STEP * 10_000, delta=1e-5).upper <= 1.0355
    assert renyi.epsilon(STEP * 40_000, delta=1e-5).upper == pytest.approx(2.2097, abs=5e-5)


@pytest.mark.parametrize("order", [1.001, 1.7, 4.0, 23.5])
@pytest.mark.parametrize(
    ("rate", "noise"), [(0.01, 4.0), (1e-8, 0.3), (1e-8, 1e3), (0.3, 0.3), (0.999, 1.0), (0.5, 50.0), (1e-3, 0.8)]
)
def test_the_sampled_gaussian_at_real_orders(rate: float, noise: float, order: float) -> None:
    found = (order - 1) * renyi.divergence(PoissonSampled(rate, Gaussian(noise)), order)
    assert covers(found, float(log_moment_sampled_gaussian(rate, noise, order)), slack=1e-8)


@pytest.mark.parametrize(("rate", "noise"), [(0.01, 4.0), (0.3, 0.5), (0.9, 1.0)])
def test_the_direction_without_the_record_is_never_the_larger(rate: float, noise: float) -> None:
    for order in (1.01, 2.5, 17.0):
        assert log_moment_sampled_gaussian(rate, noise, 1 - order) <= log_moment_sampled_gaussian(rate, noise, order)
        assert log_moment_sampled_laplace(rate, noise, 1 - order) <= log_moment_sampled_laplace(rate, noise, order)


@pytest.mark.parametrize("order", [1.01, 2.5, 40.0])
@pytest.mark.parametrize("noise", [0.5, 3.0, 1000.0])
@pytest.mark.parametrize("rate", [0.01, 0.6, 1.0])
def test_laplace(rate: float, noise: float, order: float) -> None:
    event = PoissonSampled(rate, Laplace(noise)) if rate < 1 else Laplace(noise)
    assert covers(
        (order - 1) * renyi.divergence(event, order), float(log_moment_sampled_laplace(rate, noise, order)), 1e-8
    )


@pytest.mark.parametrize("order", [1.0001, 3.3, 200.0])
@pytest.mark.parametrize("epsilon", [1e-5, 0.5, 6.0])
@pytest.mark.parametrize("rate", [1e-4, 0.5, 1.0])
def test_pure_dp_is_randomised_response(rate: float, epsilon: float, order: float) -> None:
    event = PoissonSampled(rate, PureDP(epsilon)) if rate < 1 else PureDP(epsilon)
    found = (order - 1) * renyi.divergence(event, order)
    assert covers(found, float(log_moment_randomised_response(rate, epsilon, order)), 1e-8)


def test_orders_never_limit_the_answer() -> None:
    """On a grid much finer than the search needs, no order does better; also where epsilon is in the thousands."""
    for event, delta in [
        (PoissonSampled(1 / 16, Gaussian(1.0)) * 10**6, 1e-5),
        (STEP * 10_000, 1e-5),
        (STEP, 1e-12),
        (Gaussian(0.3) * 10**7, 1e-5),
        (PoissonSampled(1e-8, Gaussian(1e3)) * 10, 1e-18),
    ]:
        found = renyi.epsilon(event, delta=delta).upper
        middle = math.log(renyi.best_order(event, delta=delta) - 1)
        finest = min(
            renyi.epsilon_at(order, renyi.divergence(event, order), delta=delta)
            for order in 1 + np.exp(np.linspace(middle - 2, middle + 2, 200))
        )
        assert found <= finest * (1 + 1e-9)
    assert (
        renyi.epsilon(PoissonSampled(1 / 16, Gaussian(1.0)) * 10**6, delta=1e-5).upper < 3370
    )  # a grid from 1.25 gives 5259


def test_delta_and_epsilon_are_inverse() -> None:
    for event in (STEP * 10_000, Gaussian(2.0) * 3, Allocated(50, Gaussian(1.0)) * 4, PureDP(0.1) * 200):
        answer = renyi.epsilon(event, delta=1e-7).upper
        assert renyi.delta(event, epsilon=answer).upper == pytest.approx(1e-7, rel=1e-3)


@pytest.mark.parametrize("noise", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("order", [2.0, 3.0, 6.0])
def test_allocation_to_two_lots_is_the_integral_over_the_plane(noise: float, order: float) -> None:
    exact = max(log_moment_two_lots(noise, order), log_moment_two_lots(noise, 1 - order))
    found = (order - 1) * renyi.divergence(Allocated(2, Gaussian(noise)), order)
    assert exact * (1 - 1e-9) <= found <= exact * (1 + 1e-7)


def test_the_other_direction_of_allocation_is_computed_too() -> None:
    """The transform behind r^-s, alone, against the plane."""
    from hush.accounting import allocation

    for noise in (0.7, 2.0):
        base = renyi._whole_moments(Gaussian(noise))
        table = allocation._without_record(2, base, Gaussian(noise))
        for order in (2, 5):
            assert table[order] == pytest.approx(log_moment_two_lots(noise, 1 - order), rel=1e-8)


def test_allocation_between_whole_orders_is_the_chord_from_above() -> None:
    for order in (1.3, 2.5, 4.2):
        exact = max(log_moment_two_lots(1.0, order), log_moment_two_lots(1.0, 1 - order))
        found = (order - 1) * renyi.divergence(Allocated(2, Gaussian(1.0)), order)
        assert exact <= found <= exact * 1.7


def test_allocation_costs_between_poisson_sampled_lots_and_no_amplification() -> None:
    for noise in (0.8, 1.0, 4.0):
        allocated = renyi.epsilon(Allocated(100, Gaussian(noise)) * 10, delta=1e-5).upper
        poisson = renyi.epsilon(PoissonSampled(0.01, Gaussian(noise)) * 1000, delta=1e-5).upper
        assert 0.7 * poisson < allocated < 1.5 * poisson
        assert allocated < renyi.epsilon(Gaussian(noise) * 10, delta=1e-5).upper
    assert renyi.divergence(Allocated(1, Gaussian(2.0)), 3.0) == renyi.divergence(Gaussian(2.0), 3.0)
    assert renyi.divergence(Allocated(5, Gaussian(2.0)), 1e4) <= renyi.divergence(Gaussian(2.0), 1e4)
    tables = [renyi.divergence(Allocated(10, kind), 5.0) for kind in (Laplace(1.0), PureDP(1.0), Gaussian(1.0))]
    alone = [renyi.divergence(kind, 5.0) for kind in (Laplace(1.0), PureDP(1.0), Gaussian(1.0))]
    assert all(0 < epoch < once for epoch, once in zip(tables, alone, strict=True))


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize(("rate", "noise"), [(0.01, 4.0), (0.3, 1.5)])
def test_a_group_is_a_binomial_mixture(size: int, rate: float, noise: float) -> None:
    for order in (1.5, 6.0):
        both = [log_moment_sampled_gaussian(rate, noise, power, size=size) for power in (order, 1 - order)]
        found = (order - 1) * renyi.divergence(Grouped(size, PoissonSampled(rate, Gaussian(noise))), order)
        assert covers(found, float(max(both)), slack=1e-8)


@pytest.mark.parametrize("power", [2.5, -0.01, -1.5, -9.0])
def test_moments_of_a_group_in_each_direction(power: float) -> None:
    """With the record has been the larger in every case seen; without it is computed all the same."""
    for rate, noise, size in [(0.3, 1.5, 3), (0.01, 0.4, 2)]:
        mixture = np.array([math.comb(size, j) * rate**j * (1 - rate) ** (size - j) for j in range(size + 1)])
        ratios = likelihood_ratios.gaussian_mixture(mixture, noise, power)
        assert ratios is not None
        exact = mp.expm1(log_moment_sampled_gaussian(rate, noise, power, size=size))
        assert math.exp(ratios.log_moment_excess(power)) == pytest.approx(float(exact), rel=1e-10)


def test_a_group_costs_more_than_the_tempting_shortcut_and_less_than_the_coarse_bound() -> None:
    group = Grouped(4, PoissonSampled(0.02, Gaussian(0.4)))
    shortcut, fallback = PoissonSampled(0.02, Gaussian(0.1)), coarse(group)
    assert fallback.rate == pytest.approx(1 - 0.98**4, rel=1e-12) and fallback.event == Gaussian(0.1)
    # The group is noticed with probability 1 - 0.98^4; "same rate, noise / 4" would promise a delta of 0.02.
    exact = sampled_group_delta(0.02, 0.4, epsilon=0.5, size=4)
    assert pld.delta(shortcut, epsilon=0.5).upper < 0.0201 < 0.038 < exact <= renyi.delta(group, epsilon=0.5).upper
    assert renyi.divergence(group, 1.5) < renyi.divergence(fallback, 1.5)
    assert renyi.epsilon(Grouped(400, PoissonSampled(0.02, Gaussian(8.0))) * 2, delta=1e-5).upper < math.inf


@pytest.mark.parametrize("outer", [Shuffled, Allocated])
def test_a_group_in_epochs_of_lots_costs_at_most_all_in_one_lot(outer) -> None:  # type: ignore[no-untyped-def]
    assert coarse(Grouped(3, outer(10, Gaussian(6.0)))) == Gaussian(2.0)
    assert coarse(Grouped(3, outer(10, Laplace(2.0)))) == PureDP(1.5)
    assert coarse(Grouped(3, outer(10, PureDP(0.5)))) == PureDP(1.5)


def test_hazard_24_the_whole_range_is_finite_monotone_and_above_the_truth() -> None:
    """No negative epsilon, none from an order near 1, no overflow, no failure at rate 1 (warnings are errors here)."""
    deltas = (0.5, 1e-5, 1e-12, 1e-18)
    for rate in (1e-8, 1e-4, 0.03, 0.7, 1.0):
        for noise in (0.3, 1.0, 30.0, 1e3):
            step: Event = PoissonSampled(rate, Gaussian(noise))
            table = [[renyi.epsilon(step * n, delta=d).upper for d in deltas] for n in (1, 100, 10**7)]
            assert all(0 <= value < math.inf for row in table for value in row)
            for row in table:
                assert all(a <= b * (1 + 1e-9) + 1e-15 for a, b in pairwise(row))
            for few, more in pairwise(table):
                assert all(a <= b * (1 + 1e-9) + 1e-15 for a, b in zip(few, more, strict=True))
            for value, delta in zip(table[0], deltas, strict=True):
                assert sampled_gaussian_delta(rate, noise, value) <= mp.mpf(delta) * (1 + mp.mpf(10) ** -9)


@pytest.mark.parametrize("noise", [0.3, 2.0, 100.0])
@pytest.mark.parametrize("count", [1, 1000])
def test_hazard_24_rate_one_bounds_the_analytic_gaussian(noise: float, count: int) -> None:
    exact = gaussian_epsilon(noise, 1e-6, count)
    found = renyi.epsilon(PoissonSampled(1.0, Gaussian(noise)) * count, delta=1e-6).upper
    assert exact <= found <= exact * 1.2
    assert found == renyi.epsilon(Gaussian(noise) * count, delta=1e-6).upper


def test_the_tight_conversion_is_never_above_the_papers() -> None:
    for steps in (1, 100, 10**5):
        assert renyi.epsilon(STEP * steps, delta=1e-5).upper <= moments.epsilon(STEP * steps, delta=1e-5).upper


def test_an_order_must_exceed_one() -> None:
    for order in (1.0, 0.5, math.inf, math.nan):
        with pytest.raises(ValueError, match="order"):
            renyi.divergence(STEP, order)
