"""Events beyond the Gaussian: each against the counting of its outcomes, with every accountant that knows it."""

from math import comb

import mpmath as mp
import numpy as np
import pytest
from oracles import finite_laws as laws
from oracles.privacy_loss import gaussian_delta

from hush.accounting import (
    ZCDP,
    Allocated,
    Approximate,
    DiscreteGaussian,
    DiscreteLaplace,
    Gaussian,
    Grouped,
    Laplace,
    MomentsAccountant,
    PoissonSampled,
    PureDP,
    RandomisedResponse,
    Shuffled,
    WithoutReplacement,
    delta,
    epsilon,
    moments,
    pld,
    renyi,
    strong,
    truncated_poisson,
)

FINITE = [
    (RandomisedResponse(2, 0.7), laws.randomised_response(2, 0.7)),
    (RandomisedResponse(5, 1.5), laws.randomised_response(5, 1.5)),
    (DiscreteLaplace(2.0), laws.whole_noise(lambda z: mp.e ** (-abs(z) / 2), 1, 60)),
    (DiscreteLaplace(1.5, 4), laws.whole_noise(lambda z: mp.e ** (-abs(z) / mp.mpf(1.5)), 4, 60)),
    (DiscreteGaussian(1.0), laws.whole_noise(lambda z: mp.e ** (-z * z / 2), 1, 40)),
    (DiscreteGaussian(2.5, 3), laws.whole_noise(lambda z: mp.e ** (-z * z / (2 * mp.mpf(2.5) ** 2)), 3, 110)),
]
NAMES = [repr(event) for event, _ in FINITE]


@pytest.mark.parametrize(("event", "law"), FINITE, ids=NAMES)
@pytest.mark.parametrize("at", [0.0, 0.3, 1.1])
def test_one_use_is_the_count_of_its_outcomes(event, law, at):
    exact = float(laws.delta(law, at))
    found = pld.delta(event, epsilon=at)
    assert found.lower <= exact * (1 + 1e-12) + 1e-25 and exact * (1 - 1e-12) <= found.upper
    assert found.upper - found.lower <= 1e-10 * exact + 1e-25
    assert renyi.delta(event, epsilon=at).upper >= exact * (1 - 1e-12)


@pytest.mark.parametrize(("event", "law"), FINITE[:3], ids=NAMES[:3])
@pytest.mark.parametrize("at", [0.2, 1.3])
def test_two_uses_are_every_pair_of_outcomes(event, law, at):
    exact = float(laws.delta(laws.composed(law, law), at))
    found = delta(event * 2, epsilon=at)
    assert found.lower <= exact * (1 + 1e-9) and exact * (1 - 1e-9) <= found.upper <= exact * 1.01
    mixed = float(laws.delta(laws.composed(law, laws.randomised_response(2, 0.4)), at))
    both = delta(event + PureDP(0.4), epsilon=at)
    assert both.lower <= mixed * (1 + 1e-9) and mixed * (1 - 1e-9) <= both.upper <= mixed * 1.05


@pytest.mark.parametrize(("event", "law"), FINITE, ids=NAMES)
@pytest.mark.parametrize("order", [1.5, 4.0, 30.0])
def test_renyi_divergences_are_sums_over_the_outcomes(event, law, order):
    with mp.workdps(50):
        exact = mp.log(mp.fsum(a**order * b ** (1 - order) for a, b in zip(*law, strict=True))) / (order - 1)
        sampled = mp.fsum(b * (mp.mpf(0.9) + mp.mpf(0.1) * a / b) ** order for a, b in zip(*law, strict=True))
        sampled = float(mp.log(sampled) / (order - 1))
    found = renyi.divergence(event, order)
    wide = 1.2 if isinstance(event, DiscreteGaussian) and order * event.sensitivity > 26 * event.scale else 1
    assert float(exact) * (1 - 1e-9) <= found <= float(exact) * (1 + 1e-8) * wide
    found = renyi.divergence(PoissonSampled(0.1, event), order)
    assert sampled * (1 - 1e-9) <= found <= sampled * (1 + 1e-8) * wide


def test_sampled_and_grouped_outcomes():
    rate, law = 0.2, laws.randomised_response(4, 1.0)
    sampled = [rate * a + (1 - rate) * b for a, b in zip(*law, strict=True)], law[1]
    found = delta(PoissonSampled(rate, RandomisedResponse(4, 1.0)), epsilon=0.1)
    exact = float(laws.delta(sampled, 0.1))
    assert found.lower <= exact * (1 + 1e-12) and exact * (1 - 1e-12) <= found.upper <= exact * (1 + 1e-9)
    assert epsilon(Grouped(3, DiscreteLaplace(4.0)), delta=1e-6) == epsilon(DiscreteLaplace(4.0, 3), delta=1e-6)
    assert epsilon(DiscreteLaplace(2.0), delta=1e-6) == epsilon(PureDP(0.5), delta=1e-6)  # integers, sensitivity 1


def test_a_group_under_pure_privacy_costs_at_least_what_some_mechanism_does():
    """No epsilon-private mechanism makes two steps of epsilon into randomised response with 2 epsilon."""
    found = delta(Grouped(2, PureDP(0.5)), epsilon=0.6)
    geometric = float(laws.delta(laws.whole_noise(lambda z: mp.e ** (-abs(z) / 2), 2, 80), 0.6))
    assert found.lower <= geometric * (1 + 1e-9)
    assert found.upper >= float(laws.delta(laws.randomised_response(2, 1.0), 0.6)) * (1 - 1e-9)


BOX = Approximate(1e-3, PureDP(0.3))


@pytest.mark.parametrize("at", [0.0, 0.4, 1.0])
def test_black_boxes_compose_as_kairouz_oh_viswanath_count_them(at):
    box = laws.with_failure(laws.randomised_response(2, 0.3), 1e-3)
    exact = float(laws.delta(laws.composed(*[box] * 4), at))
    found = delta(BOX * 4, epsilon=at)
    assert found.lower <= exact * (1 + 1e-9) and exact * (1 - 1e-9) <= found.upper <= exact * 1.01 + 1e-6
    for accountant in ("renyi", "moments", "strong"):
        assert delta(BOX * 4, epsilon=at, accountant=accountant).upper >= exact * (1 - 1e-9)


def test_a_black_box_is_no_better_than_its_delta():
    for accountant in ("pld", "renyi", "moments", "strong"):
        assert epsilon(BOX * 4, delta=3.9e-3, accountant=accountant).upper == np.inf
        assert 0 < epsilon(BOX * 4, delta=5e-3, accountant=accountant).upper < 3
    assert epsilon(BOX, delta=2e-3).upper <= 0.3 * (1 + 1e-9)
    book = MomentsAccountant()
    book.accumulate(Approximate(1e-6, Gaussian(4.0)) * 2)  # the approximate moments of the paper's draft
    assert book.delta(epsilon=1.0) == pytest.approx(
        2e-6 + moments.delta(Gaussian(4.0) * 2, epsilon=1.0).upper, rel=1e-5
    )
    with pytest.raises(ValueError, match="Approximate"):
        renyi.divergence(BOX, 2.0)


def test_zcdp_is_converted_above_every_mechanism_that_has_it():
    rho = 0.03
    run = ZCDP(rho) * 10
    for at in (0.5, 2.0):
        found = delta(run, epsilon=at)
        exact = float(gaussian_delta(1 / np.sqrt(2 * rho), 10, at))
        assert found.lower <= exact * (1 + 1e-9) and exact <= found.upper <= 8 * exact
        assert found.lower >= exact * (1 - 1e-6)  # the Gaussian is rho-zCDP
        assert found.upper <= renyi.delta(run, epsilon=at).upper
    assert moments.epsilon(run, delta=1e-5) == moments.epsilon(Gaussian(1 / np.sqrt(2 * rho)) * 10, delta=1e-5)
    mixed = delta(run + PureDP(0.2), epsilon=2.0)
    assert mixed.lower <= mixed.upper <= renyi.delta(run + PureDP(0.2), epsilon=2.0).upper


@pytest.mark.parametrize(("examples", "lot_size"), [(2, 1), (4, 1), (4, 2), (5, 3)])
@pytest.mark.parametrize("at", [0.0, 0.1, 0.7])
def test_lots_without_replacement_cost_more_than_poisson_lots_and_less_than_the_bound(examples, lot_size, at):
    lots, noise = laws.fixed_lots(examples, lot_size), 1.3
    event = WithoutReplacement(lot_size, examples, Gaussian(noise))
    found = pld.delta(event, epsilon=at)
    others = [[value] * (examples - 1) for value in (-1.0, -0.5, 0.0, 1.0)]
    worst = max(laws.lots_delta(lots, own, noise, at) for own in others)
    assert found.lower <= worst * (1 + 1e-6) and worst <= found.upper * (1 + 1e-6)
    # With the others at -1 the bound is not far off, and Poisson's would be wrong.
    if at > 0 and lot_size < examples - 1:
        assert worst > 1.001 * pld.delta(PoissonSampled(lot_size / examples, Gaussian(noise)), epsilon=at).upper


def test_lots_without_replacement_compose():
    step = WithoutReplacement(10, 1000, Gaussian(4.0))
    poisson = epsilon(PoissonSampled(0.01, Gaussian(4.0)) * 2000, delta=1e-5)
    found = epsilon(step * 2000, delta=1e-5)
    assert poisson.lower * (1 - 1e-9) <= found.lower <= poisson.upper < found.upper < 2.8 * poisson.upper
    assert epsilon(WithoutReplacement(7, 7, Gaussian(3.0)), delta=1e-5) == epsilon(Gaussian(3.0), delta=1e-5)
    for refused in (lambda: WithoutReplacement(8, 7, Gaussian(1.0)), lambda: WithoutReplacement(2, 7, Laplace(1.0))):
        with pytest.raises(ValueError, match=r"lot_size|Gaussian"):
            refused()


@pytest.mark.parametrize(("rate", "largest"), [(0.3, 1), (0.3, 2), (0.6, 2), (0.1, 3)])
def test_truncated_poisson_lots(rate, largest):
    examples, noise = 5, 1.1
    event = truncated_poisson(rate, Gaussian(noise), examples=examples, largest=largest)
    cut = sum(comb(examples, k) * rate**k * (1 - rate) ** (examples - k) for k in range(largest + 1, examples + 1))
    assert cut <= event.delta <= cut * (1 + 1e-8)
    lots = laws.truncated_lots(examples, rate, largest)
    for at in (0.0, 0.4):
        exact = max(laws.lots_delta(lots, [value] * (examples - 1), noise, at) for value in (-1.0, 0.0, 1.0))
        assert exact <= pld.delta(event, epsilon=at).upper
    assert truncated_poisson(rate, Gaussian(noise), examples=5, largest=5) == PoissonSampled(rate, Gaussian(noise))


def test_a_lower_bound_holds_for_the_event_it_stands_under():
    """Two records, lots of one: the worst found over the other record's gradient is 0.0332 (hazard 41)."""
    event = Shuffled(2, Gaussian(2.0))
    found = pld.delta(event, epsilon=0.5)
    assert found.lower <= 0.0332 < 0.0524 <= found.upper
    assert found.upper == pld.delta(Gaussian(2.0), epsilon=0.5).upper
    assert found.lower == pld.delta(Allocated(2, Gaussian(2.0)), epsilon=0.5).lower
    group = pld.delta(Grouped(2, event), epsilon=0.5)
    assert group.lower == found.lower and group.upper == pld.delta(Gaussian(1.0), epsilon=0.5).upper


def test_no_delta_of_zero_where_the_truth_is_positive():
    for event, at in ((Gaussian(1.0), 100.0), (PoissonSampled(0.1, Gaussian(1.0)), 60.0), (Gaussian(1.0) * 3, 300.0)):
        assert pld.delta(event, epsilon=at).upper > 0
        assert delta(event, epsilon=at).upper > 0
    assert delta(PureDP(1.0), epsilon=1.0 + 1e-9).upper == 0
    for event in (Gaussian(1e99), PureDP(1e-99)):
        assert moments.epsilon(event, delta=1e-5).upper > 0
    assert strong.epsilon(PureDP(1e-99) * 4, delta=1e-5).upper == pytest.approx(4e-99)


def test_accountants_refuse_by_name_what_they_do_not_know():
    for event in (DiscreteGaussian(1.0), PoissonSampled(0.1, DiscreteGaussian(1.0)), ZCDP(0.1)):
        with pytest.raises(ValueError, match=r"DiscreteGaussian|ZCDP"):
            strong.epsilon(event, delta=1e-5)
    with pytest.raises(ValueError, match="DiscreteGaussian"):
        moments.epsilon(PoissonSampled(0.1, DiscreteGaussian(1.0)), delta=1e-5)
    assert moments.epsilon(DiscreteGaussian(3.0), delta=1e-5) == moments.epsilon(Gaussian(3.0), delta=1e-5)


@pytest.mark.parametrize("accountant", ["pld", "renyi", "moments", "strong"])
def test_epsilon_is_asked_for_what_failures_leave_of_delta(accountant):
    box = laws.with_failure(laws.randomised_response(2, 0.3), 1e-3)
    four = laws.composed(*[box] * 4)
    found = epsilon(BOX * 4, delta=0.02, accountant=accountant)
    assert float(laws.delta(four, found.upper)) <= 0.02 * (1 + 1e-9)
    if accountant == "pld":
        assert float(laws.delta(four, found.lower)) >= 0.02 * (1 - 1e-6)
        assert found.upper - found.lower <= 2e-3
