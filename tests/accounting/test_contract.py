"""One suite for every accountant: what may be relied on whichever of them answers."""

import math
from fractions import Fraction
from functools import cache
from itertools import pairwise
from types import ModuleType

import pytest
from oracles.privacy_moments import gaussian_delta, gaussian_epsilon

from hush import accounting
from hush.accounting import (
    NOTHING,
    ZCDP,
    Allocated,
    Bounds,
    Composed,
    Event,
    Gaussian,
    Grouped,
    Laplace,
    PoissonSampled,
    PureDP,
    RandomisedResponse,
    Shuffled,
    WithoutReplacement,
    moments,
    pld,
    renyi,
    rounded_up,
    strong,
)

STEP = PoissonSampled(0.02, Gaussian(2.0))
MECHANISMS: list[Event] = [
    Gaussian(3.0),
    Laplace(4.0),
    PureDP(0.2),
    STEP,
    PoissonSampled(0.1, Laplace(2.0)),
    PoissonSampled(0.1, PureDP(0.5)),
    Shuffled(50, Gaussian(3.0)),
    Allocated(50, Gaussian(1.5)),
    Grouped(2, STEP),
    Grouped(3, Gaussian(9.0)),
]
every_accountant = pytest.mark.parametrize(
    "accountant", [moments, renyi, pld, strong], ids=lambda m: m.__name__.split(".")[-1]
)
every_mechanism = pytest.mark.parametrize("event", MECHANISMS, ids=repr)


@cache
def certified(event: Event) -> tuple[float, float]:
    """The certified lower bounds on epsilon at delta 1e-5 and on delta at epsilon 0.7."""
    return pld.epsilon(event, delta=1e-5).lower, pld.delta(event, epsilon=0.7).lower


@cache
def upper(accountant: ModuleType, event: Event, delta: float = 1e-5) -> float:
    return float(accountant.epsilon(event, delta=delta).upper)


@every_accountant
@every_mechanism
def test_counts_above_one_cost_more_than_one(accountant: ModuleType, event: Event) -> None:
    """A branch that forgot to multiply by the count would answer the same for all of these."""
    costs = [upper(accountant, event * n) for n in (1, 3, 30)]
    assert all(math.isfinite(cost) for cost in costs)
    assert costs[0] < costs[1] < costs[2]


@every_accountant
@every_mechanism
def test_no_answer_lies_below_the_certified_lower_bound(accountant: ModuleType, event: Event) -> None:
    for n in (1, 20):
        least_epsilon, least_delta = certified(event * n)
        assert least_epsilon <= upper(accountant, event * n) * (1 + 1e-9)
        assert least_delta <= accountant.delta(event * n, epsilon=0.7).upper * (1 + 1e-9)


@every_accountant
@every_mechanism
def test_a_smaller_delta_costs_more(accountant: ModuleType, event: Event) -> None:
    costs = [upper(accountant, event * 5, delta) for delta in (1e-2, 1e-5, 1e-10)]
    assert all(a <= b * (1 + 2e-3) for a, b in pairwise(costs))


@every_accountant
@every_mechanism
def test_delta_and_epsilon_answer_each_other(accountant: ModuleType, event: Event) -> None:
    cost = upper(accountant, event * 5)
    back = accountant.delta(event * 5, epsilon=cost)
    # The widths of two intervals add up; a certified delta of allocation may be wide, never wrong.
    assert back.lower <= 1e-5 * (1 + 1e-9)
    assert back.upper <= 1e-5 * (10 if isinstance(event, Allocated) else 1.06)
    assert (
        0
        <= accountant.delta(event * 5, epsilon=cost * 2 + 1).upper
        <= accountant.delta(event * 5, epsilon=0.0).upper
        <= 1
    )


@every_accountant
def test_more_noise_and_a_lower_rate_cost_less(accountant: ModuleType) -> None:
    by_noise = [upper(accountant, PoissonSampled(0.02, Gaussian(noise)) * 50) for noise in (0.5, 1.0, 3.0, 20.0)]
    by_rate = [upper(accountant, PoissonSampled(rate, Gaussian(1.5)) * 50) for rate in (1.0, 0.3, 0.01, 1e-4)]
    for costs in (by_noise, by_rate):
        assert all(a > b for a, b in pairwise(costs))


@every_accountant
@pytest.mark.parametrize("noise", [0.7, 2.0, 30.0])
@pytest.mark.parametrize("count", [1, 4, 100])
def test_hazard_24_rate_one_bounds_the_analytic_gaussian(accountant: ModuleType, noise: float, count: int) -> None:
    exact = gaussian_epsilon(noise, 1e-5, count)
    for event in (Gaussian(noise) * count, PoissonSampled(1.0, Gaussian(noise)) * count):
        bounds = accountant.epsilon(event, delta=1e-5)
        assert bounds.lower <= exact <= bounds.upper
        held = accountant.delta(event, epsilon=1.0)
        assert held.lower <= gaussian_delta(noise, 1.0, count) <= held.upper


@pytest.mark.parametrize("accountant", [moments, renyi, strong], ids=lambda m: m.__name__.split(".")[-1])
def test_hazard_24_extremes_give_finite_answers_that_grow_with_the_steps(accountant: ModuleType) -> None:
    """No failure, no warning, nothing negative; the certified accountant has a grid of its own."""
    for rate in (1e-8, 1e-3, 1.0):
        for noise in (0.3, 1.0, 1e3):
            for delta in (0.5, 1e-18):
                costs = [upper(accountant, PoissonSampled(rate, Gaussian(noise)) * n, delta) for n in (1, 1000, 10**7)]
                assert all(0 <= cost < math.inf for cost in costs)
                assert all(a <= b * (1 + 1e-9) + 1e-12 for a, b in pairwise(costs))


@every_accountant
def test_parts_that_differ_cost_at_least_each_and_in_any_order(accountant: ModuleType) -> None:
    whole = Gaussian(4.0) * 2 + STEP * 100 + Laplace(8.0)
    assert upper(accountant, whole) >= max(
        upper(accountant, part) for part in (Gaussian(4.0) * 2, STEP * 100, Laplace(8.0))
    )
    assert upper(accountant, whole) == upper(accountant, Laplace(8.0) + STEP * 60 + Gaussian(4.0) * 2 + STEP * 40)


@every_accountant
def test_a_larger_group_pays_more(accountant: ModuleType) -> None:
    costs = [upper(accountant, accounting.grouped(STEP * 40, size)) for size in (1, 2, 5)]
    assert costs[0] < costs[1] < costs[2]


@every_accountant
def test_nothing_costs_nothing(accountant: ModuleType) -> None:
    for free in (NOTHING, STEP * 0, PoissonSampled(0.0, Gaussian(1.0)) * 9, PureDP(0.0) * 9):
        assert upper(accountant, free) <= 1e-4
    assert accountant.epsilon(NOTHING, delta=1e-9).upper == accountant.delta(NOTHING, epsilon=0.0).upper == 0.0


class Unheard(Event):
    """A mechanism nobody has analysed."""


@every_accountant
def test_what_is_not_known_is_refused_by_name(accountant: ModuleType) -> None:
    for event in (Unheard(), Composed(((Gaussian(1.0), 3), (Unheard(), 1)))):
        with pytest.raises(ValueError, match="Unheard"):
            accountant.epsilon(event, delta=1e-5)
        with pytest.raises(ValueError, match="Unheard"):
            accountant.delta(event, epsilon=1.0)
    tampered = object.__new__(PoissonSampled)
    object.__setattr__(tampered, "rate", 0.1)
    object.__setattr__(tampered, "event", STEP)
    with pytest.raises(ValueError, match="PoissonSampled"):
        accountant.epsilon(tampered, delta=1e-5)


@every_accountant
def test_a_question_without_an_answer_is_refused(accountant: ModuleType) -> None:
    for delta in (0.0, 1.0, -1e-5, math.nan):
        with pytest.raises(ValueError, match="delta"):
            accountant.epsilon(STEP, delta=delta)
    for epsilon in (-0.1, math.nan, math.inf):
        with pytest.raises(ValueError, match="epsilon"):
            accountant.delta(STEP, epsilon=epsilon)


@every_mechanism
def test_the_default_answer_is_never_above_renyis(event: Event) -> None:
    for n in (1, 40):
        assert accounting.epsilon(event * n, delta=1e-7).upper <= upper(renyi, event * n, 1e-7)
        assert accounting.delta(event * n, epsilon=0.5).upper <= renyi.delta(event * n, epsilon=0.5).upper


def test_a_wide_certified_interval_gives_way_to_renyi(monkeypatch: pytest.MonkeyPatch) -> None:
    run = STEP * 100
    monkeypatch.setattr(pld, "epsilon", lambda event, *, delta: Bounds(0.01, 1e6))
    monkeypatch.setattr(pld, "delta", lambda event, *, epsilon: Bounds(0.0, 1.0))
    assert accounting.epsilon(run, delta=1e-5) == Bounds(0.01, upper(renyi, run))
    assert accounting.delta(run, epsilon=1.0).upper == renyi.delta(run, epsilon=1.0).upper


def test_each_name_reaches_its_accountant() -> None:
    run = STEP * 100
    for name, module in {"renyi": renyi, "moments": moments, "strong": strong}.items():
        assert accounting.epsilon(run, delta=1e-5, accountant=name) == module.epsilon(run, delta=1e-5)  # type: ignore[arg-type]
        assert accounting.delta(run, epsilon=1.0, accountant=name) == module.delta(run, epsilon=1.0)  # type: ignore[arg-type]
    assert accounting.epsilon(run, delta=1e-5, accountant="strong-paper") == strong.paper_epsilon(run, delta=1e-5)
    with pytest.raises(ValueError, match="gdp"):
        accounting.epsilon(run, delta=1e-5, accountant="gdp")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", accounting.ACCOUNTANTS)
def test_deltas_that_a_float_hardly_holds_are_refused_and_the_next_are_answered(name: accounting.Accountant) -> None:
    for delta in (5e-324, 1e-308, 0.99e-300):
        with pytest.raises(ValueError, match="not below 1e-300"):
            accounting.epsilon(STEP * 10, delta=delta, accountant=name)
    assert 0 < accounting.epsilon(STEP * 10, delta=1e-300, accountant=name).upper < math.inf


@pytest.mark.parametrize(
    ("event", "least"),
    [
        (Gaussian(1e-100) * 1000, 5e202),  # mu^2 / 2 with mu = sqrt(1000) / 1e-100
        (WithoutReplacement(1, 10, Gaussian(1e-100)), 5e199),
        (ZCDP(1e-250), 0.0),
        (ZCDP(1e-310), 0.0),
    ],
)
def test_extremes_whose_reduction_no_event_could_hold_are_answered(event: Event, least: float) -> None:
    assert least * (1 - 1e-9) <= accounting.epsilon(event, delta=1e-5).upper < math.inf


def test_a_sum_of_pure_epsilons_is_rounded_up_by_every_accountant() -> None:
    rate, epsilon = 0.00033803636025183645, 0.19305916481360813
    e = Fraction(0)  # exp(epsilon) from below, exactly enough
    for k in range(30, -1, -1):
        e = 1 + e * Fraction(epsilon) / (k + 1)
    most = 1 + Fraction(rate) * (e - 1)  # the largest ratio, of which the answer is the logarithm
    event = PoissonSampled(rate, RandomisedResponse(3, epsilon))
    for name in ("pld", "renyi", "moments", "strong"):
        answer = accounting.epsilon(event, delta=1e-40, accountant=name).upper
        reached = Fraction(0)
        for k in range(30, -1, -1):
            reached = 1 + reached * Fraction(answer) / (k + 1)
        chance = (e / (e + 2) * Fraction(rate)) + (1 - Fraction(rate)) / (
            e + 2
        )  # of the worst outcome, with the record
        assert chance * max(1 - reached / most, 0) <= Fraction(1e-40), name


@pytest.mark.parametrize("digits", [4, 6])
def test_what_is_printed_of_a_cost_is_never_below_it(digits: int) -> None:
    for value in (0.1, 1e-5, 0.1 / 300_011, 1.2345649e-05, 1.00000001, 9.999999999, 5e-324, 123456789.0):
        assert value <= float(rounded_up(value, digits)) <= value * (1 + 10.0 ** (1 - digits)) or value == 5e-324
    assert rounded_up(1e-5, digits) == "1e-05" and rounded_up(0.1, digits) == "0.1"
