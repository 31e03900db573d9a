"""The PLD accountant against closed forms, quadrature and exact counting."""

import math
import time

import numpy as np
import pytest
from oracles.privacy_loss import (
    SampledGaussian,
    gaussian_delta,
    gaussian_epsilon,
    group_delta,
    response_delta,
)

from hush.accounting import pld
from hush.accounting.events import (
    NOTHING,
    Allocated,
    Composed,
    Event,
    Gaussian,
    Grouped,
    Laplace,
    PoissonSampled,
    PureDP,
    Shuffled,
    WithoutReplacement,
    grouped,
)


def contains(bounds, value, slack=1e-12):
    return bounds.lower <= float(value) * (1 + slack) and float(value) <= bounds.upper * (1 + slack)


@pytest.mark.parametrize(("steps", "golden"), [(10_000, 0.9468), (40_000, 2.0331)])
def test_golden_values(steps, golden):
    bounds = pld.epsilon(PoissonSampled(0.01, Gaussian(4.0)) * steps, delta=1e-5)
    assert bounds.lower <= golden + 5e-5
    assert bounds.upper >= golden - 5e-5
    assert abs(bounds.upper - golden) <= 1e-3
    assert bounds.upper - bounds.lower <= 1e-3 * bounds.upper


@pytest.mark.parametrize("rate", [1e-8, 1e-3, 0.2, 0.9])
@pytest.mark.parametrize("noise", [0.3, 1.0, 30.0])
@pytest.mark.parametrize("epsilon", [0.0, 1e-4, 0.3, 2.0])
def test_one_step_is_the_closed_form(rate, noise, epsilon):
    exact = max(SampledGaussian(rate, noise, remove=side).delta(epsilon) for side in (True, False))
    bounds = pld.delta(PoissonSampled(rate, Gaussian(noise)), epsilon=epsilon)
    assert contains(bounds, exact)
    assert bounds.upper - bounds.lower <= 1e-9 * bounds.upper + 1e-25


@pytest.mark.parametrize(
    ("rate", "noise", "epsilon"),
    [(0.01, 0.5, 1.0), (0.3, 1.0, 0.5), (0.3, 0.4, 12.0), (0.01, 2.0, 0.02), (0.7, 5.0, 0.1), (1e-5, 0.4, 3.0)],
)
def test_two_steps_are_the_integral(rate, noise, epsilon):
    exact = max(SampledGaussian(rate, noise, remove=side).delta_of_two(epsilon) for side in (True, False))
    event = PoissonSampled(rate, Gaussian(noise)) * 2
    bounds = pld.delta(event, epsilon=epsilon)
    assert contains(bounds, exact)
    assert bounds.upper - bounds.lower <= 2e-3 * bounds.upper
    back = pld.epsilon(event, delta=float(exact))
    assert contains(back, epsilon)
    assert back.upper - back.lower <= max(1e-3 * back.upper, 1e-4)


@pytest.mark.parametrize(
    ("rate", "noise", "epsilon"), [(7e-6, 0.45, 5.6), (1e-8, 0.335, 0.05), (1e-8, 0.335, 3.0), (1e-6, 0.6, 0.002)]
)
def test_one_rare_large_loss_is_the_integral(rate, noise, epsilon):
    exact = max(SampledGaussian(rate, noise, remove=side).delta_of_two(epsilon) for side in (True, False))
    # The quadrature is good to 1e-6 here.
    event = PoissonSampled(rate, Gaussian(noise)) * 2
    bounds = pld.epsilon(event, delta=float(exact))
    assert contains(bounds, epsilon, slack=2e-6)
    assert bounds.upper - bounds.lower <= max(1e-3 * bounds.upper, 1e-4)
    held = pld.delta(event, epsilon=epsilon)
    assert contains(held, exact, slack=2e-6)
    assert held.upper - held.lower <= 0.02 * held.upper


@pytest.mark.parametrize("noise", [0.3, 2.0, 1000.0])
@pytest.mark.parametrize("steps", [1, 50, 10_000_000])
@pytest.mark.parametrize("delta", [0.3, 1e-5, 1e-18])
def test_at_rate_one_it_is_the_analytic_gaussian(noise, steps, delta):
    exact = gaussian_epsilon(noise, steps, delta)
    for event in (PoissonSampled(1.0, Gaussian(noise)) * steps, Gaussian(noise) * steps):
        bounds = pld.epsilon(event, delta=delta)
        assert contains(bounds, exact)
        assert bounds.upper - bounds.lower <= 1e-6 * bounds.upper + 1e-9


@pytest.mark.parametrize(("noise", "steps"), [(0.3, 2), (2.0, 30), (1000.0, 50)])
def test_hazard_41_shuffled_lots_cost_at_most_one_participation_and_at_least_random_allocation(noise, steps):
    exact = float(gaussian_epsilon(noise, steps, 1e-5))
    bounds = pld.epsilon(Shuffled(7, Gaussian(noise)) * steps, delta=1e-5)
    assert exact * (1 - 1e-12) <= bounds.upper <= exact * (1 + 1e-6) + 1e-9
    assert bounds.lower == min(pld.epsilon(Allocated(7, Gaussian(noise)) * steps, delta=1e-5).lower, bounds.upper)


def test_gaussians_through_the_grid_are_the_analytic_gaussian():
    # A sampled part of rate almost 1 forces discretisation and the FFT.
    event = PoissonSampled(1 - 1e-15, Gaussian(8.0)) * 400
    for epsilon in (0.5, 5.0, 14.0, 25.0):
        exact = gaussian_delta(8.0, 400, epsilon)
        bounds = pld.delta(event, epsilon=epsilon)
        assert contains(bounds, exact, slack=1e-9)
        assert bounds.upper - bounds.lower <= 2e-3 * bounds.upper


@pytest.mark.parametrize(("epsilon", "steps"), [(0.1, 60), (1.0, 7), (3.0, 2), (0.01, 1000)])
@pytest.mark.parametrize("delta", [1e-2, 1e-6, 1e-10])
def test_pure_dp_is_composed_randomised_response(epsilon, steps, delta):
    bounds = pld.epsilon(PureDP(epsilon) * steps, delta=delta)
    assert response_delta(epsilon, steps, bounds.upper) <= delta * (1 + 1e-9)
    if bounds.lower > 0:
        assert response_delta(epsilon, steps, bounds.lower) >= delta * (1 - 1e-9)
    assert bounds.upper - bounds.lower <= max(2e-3 * bounds.upper, 2e-4)


def test_laplace_lies_between_a_part_of_it_and_pure_dp():
    for noise, steps, delta in ((2.0, 1, 1e-3), (5.0, 30, 1e-6), (1.0, 4, 1e-9)):
        laplace = pld.epsilon(Laplace(noise) * steps, delta=delta)
        pure = pld.epsilon(PureDP(1 / noise) * steps, delta=delta)
        assert laplace.lower <= pure.upper
        assert laplace.upper - laplace.lower <= 5e-3 * laplace.upper
        sampled = pld.epsilon(PoissonSampled(0.1, Laplace(noise)) * steps, delta=delta)
        assert sampled.upper < laplace.lower
    one = pld.delta(Laplace(2.0), epsilon=0.2)
    assert contains(one, 1 - math.exp((0.2 - 0.5) / 2))


@pytest.mark.parametrize(
    ("size", "rate", "noise", "epsilon"), [(3, 0.1, 2.0, 0.3), (8, 0.02, 1.0, 1.0), (2, 0.5, 0.7, 2.0)]
)
def test_a_group_under_sampling_is_the_binomial_mixture(size, rate, noise, epsilon):
    exact = group_delta(size, rate, noise, epsilon)
    bounds = pld.delta(Grouped(size, PoissonSampled(rate, Gaussian(noise))), epsilon=epsilon)
    assert contains(bounds, exact, slack=1e-9)
    assert bounds.upper - bounds.lower <= 1e-6 * bounds.upper


def test_group_costs_are_ordered():
    one = PoissonSampled(0.02, Gaussian(2.0)) * 300
    costs = [pld.epsilon(grouped(one, size), delta=1e-6) for size in (1, 2, 5)]
    assert costs[0].upper < costs[1].lower < costs[1].upper < costs[2].lower
    coarse = pld.epsilon(PoissonSampled(1 - 0.98**5, Gaussian(0.4)) * 300, delta=1e-6)
    invalid = pld.epsilon(PoissonSampled(0.02, Gaussian(0.4)) * 300, delta=1e-6)
    assert costs[2].upper <= coarse.upper
    assert costs[2].upper > invalid.upper or costs[2].lower < coarse.lower
    assert contains(pld.epsilon(Grouped(3, Gaussian(6.0)) * 4, delta=1e-6), gaussian_epsilon(2.0, 4, 1e-6))


def test_heterogeneous_composition():
    parts: list[Event] = [
        PoissonSampled(0.05, Gaussian(1.5)) * 100,
        Gaussian(6.0) * 2,
        PoissonSampled(0.1, Laplace(3.0)) * 5,
    ]
    alone = [pld.epsilon(part, delta=1e-6) for part in parts]
    together = pld.epsilon(parts[0] + parts[1] + parts[2], delta=1e-6)
    assert max(bound.lower for bound in alone) < together.upper < sum(bound.upper for bound in alone)
    assert together.upper - together.lower <= 1e-3 * together.upper
    split = PoissonSampled(0.05, Gaussian(1.5)) * 50 + PoissonSampled(0.05 * (1 + 1e-12), Gaussian(1.5)) * 50
    whole = pld.epsilon(parts[0], delta=1e-6)
    assert pld.epsilon(split, delta=1e-6).lower <= whole.upper
    assert whole.lower <= pld.epsilon(split, delta=1e-6).upper


def test_events_that_cost_nothing():
    for event in (NOTHING, PureDP(0.0) * 5, PoissonSampled(0.0, Gaussian(1.0)) * 5):
        assert pld.epsilon(event, delta=1e-5).upper == 0
        assert pld.delta(event, epsilon=0.0).upper == 0
    assert pld.epsilon(PoissonSampled(0.5, Gaussian(1.0)) + PureDP(0.0), delta=1e-5).lower > 0


def test_questions_and_events_that_are_refused():
    for delta in (0.0, 1.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="delta"):
            pld.epsilon(Gaussian(1.0), delta=delta)
    with pytest.raises(ValueError, match="epsilon"):
        pld.delta(Gaussian(1.0), epsilon=-0.1)

    class Unknown(Event):
        pass

    with pytest.raises(ValueError, match="Unknown"):
        pld.epsilon(Composed(((Unknown(), 3),)), delta=1e-5)


def test_epsilon_and_delta_answer_each_other():
    for event in (PoissonSampled(0.02, Gaussian(1.0)) * 500, Laplace(4.0) * 20, Allocated(5, Gaussian(2.0)) * 3):
        for delta in (1e-3, 1e-7):
            epsilon = pld.epsilon(event, delta=delta)
            assert pld.delta(event, epsilon=epsilon.upper * 1.0001).lower <= delta
            if epsilon.lower > 0:
                assert pld.delta(event, epsilon=epsilon.lower * 0.9999).upper >= delta


def test_bounds_hold_for_numpy_free_of_warnings():
    with np.errstate(all="raise", under="ignore"):
        assert pld.epsilon(PoissonSampled(0.01, Gaussian(0.3)) * 100, delta=1e-6).upper > 0


CORNERS = [
    (Allocated(10, Gaussian(0.001)) * 10**4, 1e-5),
    (PoissonSampled(0.5, Gaussian(1e100)) * 10**15, 1e-300),
    (PoissonSampled(0.5, Gaussian(1e-50)) * 3, 1e-5),
    (Gaussian(1e-100), 1e-5),
    (Laplace(1e-100) * 3, 1e-5),
    (PoissonSampled(1e-12, Gaussian(0.05)) * 10**12, 1e-5),
    (WithoutReplacement(100, 10**5, Gaussian(1.0)) * 10**5, 1e-6),
    (PoissonSampled(0.01, Gaussian(0.05)) * 100, 0.5),
    (Laplace(0.001) * 10, 1e-15),
]


@pytest.mark.parametrize(("event", "delta"), CORNERS, ids=repr)
def test_no_corner_takes_long_or_ends_in_a_traceback(event, delta):
    start = time.process_time()
    found = pld.epsilon(event, delta=delta)
    assert 0 <= found.lower <= found.upper < math.inf
    assert pld.delta(event, epsilon=1.0).upper <= 1
    assert time.process_time() - start < 20  # twice what one question may take
