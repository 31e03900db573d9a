"""Filter and odometer: refused before use, exact for one order, valid against every opponent of a small game."""

import json
import math
from functools import cache

import pytest

from hush.accounting import (
    Budget,
    BudgetExceeded,
    Event,
    Filter,
    Gaussian,
    Odometer,
    PoissonSampled,
    PureDP,
    compose,
    renyi,
)
from hush.accounting.filters import ORDERS

STEP = PoissonSampled(0.01, Gaussian(4.0))
BUDGET = Budget(epsilon=2.0, delta=1e-5)


def test_a_charge_that_does_not_fit_is_refused_before_use_and_leaves_no_trace() -> None:
    cap = Filter(BUDGET)
    cap.charge(STEP * 1000)
    before = cap.spent
    assert not cap.affords(Gaussian(0.5))
    with pytest.raises(BudgetExceeded, match="stop here"):
        cap.charge(Gaussian(0.5))
    assert cap.spent == before
    cap.charge(STEP)
    assert all(new > old for new, old in zip(cap.spent, before, strict=True))


def test_the_cap_is_reached_but_never_passed() -> None:
    cap = Filter(BUDGET)
    charged = 0
    while cap.affords(STEP * 500):
        cap.charge(STEP * 500)
        charged += 500
    assert 0.95 * BUDGET.epsilon < cap.epsilon() <= BUDGET.epsilon * (1 + 1e-6)
    assert renyi.epsilon(STEP * charged, delta=1e-5).upper <= BUDGET.epsilon


def test_one_order_is_the_tight_conversion() -> None:
    run = STEP * 10_000
    order = renyi.best_order(run, delta=1e-5)
    cap = Filter(BUDGET, orders=[order])
    cap.charge(run)
    assert cap.epsilon() == pytest.approx(renyi.epsilon(run, delta=1e-5).upper, rel=3e-6)


PLANS = {
    STEP * 100: 1.05,
    STEP * 10_000: 1.04,
    PoissonSampled(0.04, Gaussian(8.0)) * 500: 1.04,
    PoissonSampled(0.1, Gaussian(5.0)) * 100: 1.04,
    PoissonSampled(1 / 16, Gaussian(1.0)) * 10**6: 1.01,
    Gaussian(10.0) * 100: 1.04,
    PoissonSampled(0.01, Gaussian(1.0)) * 1000: 1.17,
    PoissonSampled(0.001, Gaussian(1.0)) * 100: 1.5,  # rare large losses
}


@pytest.mark.parametrize(("run", "factor"), PLANS.items(), ids=repr)
def test_what_the_grid_costs(run: Event, factor: float) -> None:
    best = renyi.epsilon(run, delta=1e-5).upper
    assert Filter(Budget(epsilon=factor * best, delta=1e-5)).affords(run)
    assert not Filter(Budget(epsilon=best * (1 - 1e-9), delta=1e-5)).affords(run)
    odometer = Odometer(delta=1e-5)
    odometer.charge(run)
    assert best < odometer.epsilon() < 2.6 * best


def test_one_event_of_any_size_gets_through_somewhere() -> None:
    """The wide orders are kept beside those of the budget."""
    for epsilon in (0.05, 0.5, 5.0, 50.0):
        cap = Filter(Budget(epsilon=epsilon, delta=1e-5))
        assert cap.affords(PureDP(epsilon / 4)) and cap.affords(PoissonSampled(1e-6, Gaussian(4.0)))


OPTIONS = (0.1, 0.35, 0.9, 2.0)  # randomised response with these epsilons
GAME_BUDGET = Budget(epsilon=0.8, delta=0.15)
ROUNDS = 6


def charges(counts: tuple[int, ...]) -> Event:
    return compose((PureDP(epsilon), n) for epsilon, n in zip(OPTIONS, counts, strict=True))


def more(counts: tuple[int, ...], choice: int) -> tuple[int, ...]:
    return tuple(n + (i == choice) for i, n in enumerate(counts))


@cache
def admitted(counts: tuple[int, ...]) -> bool:
    return Filter(GAME_BUDGET).affords(charges(counts))


@cache
def reading(counts: tuple[int, ...]) -> float:
    odometer = Odometer(delta=GAME_BUDGET.delta)
    odometer.charge(charges(counts))
    return odometer.epsilon()


def best_opponent(budget: Budget, allowed) -> float:  # type: ignore[no-untyped-def]
    """The largest delta any adaptive strategy reaches at the budget's epsilon, by going through all of them."""

    @cache
    def value(counts: tuple[int, ...], loss: float, rounds: int) -> float:
        best = max(0.0, 1 - math.exp(budget.epsilon - loss))
        for choice, epsilon in enumerate(OPTIONS):
            after = more(counts, choice)
            if rounds and allowed(after):
                likely = 1 / (1 + math.exp(-epsilon))
                up, down = (round(loss + sign * epsilon, 9) for sign in (1, -1))
                best = max(best, likely * value(after, up, rounds - 1) + (1 - likely) * value(after, down, rounds - 1))
        return best

    return value((0,) * len(OPTIONS), 0.0, ROUNDS)


def test_no_adaptive_opponent_beats_the_filter() -> None:
    reached = best_opponent(GAME_BUDGET, admitted)
    assert 0.02 * GAME_BUDGET.delta < reached <= GAME_BUDGET.delta
    # The game is sharp enough to catch a filter that forgets half of what it is charged.
    assert best_opponent(GAME_BUDGET, lambda counts: admitted(tuple(n // 2 for n in counts))) > GAME_BUDGET.delta


def most_likely_escape(delta: float, read) -> float:  # type: ignore[no-untyped-def]
    """The largest probability, over all adaptive strategies, that the loss is ever above the reading."""

    @cache
    def value(counts: tuple[int, ...], loss: float, rounds: int) -> float:
        if any(counts) and loss > read(counts) + 1e-9:
            return 1.0
        best = 0.0
        for choice, epsilon in enumerate(OPTIONS if rounds else ()):
            likely = 1 / (1 + math.exp(-epsilon))
            after = more(counts, choice)
            up, down = (round(loss + sign * epsilon, 9) for sign in (1, -1))
            best = max(best, likely * value(after, up, rounds - 1) + (1 - likely) * value(after, down, rounds - 1))
        return best

    return value((0,) * len(OPTIONS), 0.0, ROUNDS)


def test_no_adaptive_opponent_outruns_the_odometer() -> None:
    assert most_likely_escape(GAME_BUDGET.delta, reading) <= GAME_BUDGET.delta
    assert most_likely_escape(GAME_BUDGET.delta, lambda counts: 0.5 * reading(counts)) > GAME_BUDGET.delta


def test_the_state_survives_json() -> None:
    cap, odometer = Filter(BUDGET, orders=[2.0, 9.0]), Odometer(delta=1e-6)
    cap.charge(STEP * 50)
    odometer.charge(STEP * 50)
    again = Filter.from_dict(json.loads(json.dumps(cap.to_dict())))
    assert (again.spent, again.orders, again.budget) == (cap.spent, cap.orders, cap.budget)
    assert Odometer.from_dict(json.loads(json.dumps(odometer.to_dict()))).epsilon() == odometer.epsilon()
    for broken in ([0.1], [0.1, math.nan], [0.1, -1.0]):
        with pytest.raises(ValueError, match="one for each order"):
            Filter.from_dict(cap.to_dict() | {"spent": broken})


def test_many_small_charges_cost_at_least_one_large_one() -> None:
    small, large = Filter(BUDGET), Filter(BUDGET)
    for _ in range(300):
        small.charge(STEP)
    large.charge(STEP * 300)
    assert all(a >= b * (1 - 1e-15) for a, b in zip(small.spent, large.spent, strict=True))


def test_orders_are_checked() -> None:
    for orders in ([], [1.0], [math.inf], [2.0, math.nan]):
        with pytest.raises(ValueError, match="orders"):
            Filter(BUDGET, orders=orders)
    assert Filter(BUDGET).orders[8:] == ORDERS == Odometer(delta=1e-5).orders
