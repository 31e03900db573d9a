"""Calibration: within the budget always, close to it, and never forgetting what was spent."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.privacy_moments import gaussian_epsilon

from hush.accounting import NOTHING, Allocated, Budget, Event, Gaussian, PoissonSampled, calibrate, epsilon
from hush.accounting.accountants import Accountant
from hush.accounting.calibrate import TOLERANCE

BUDGET = Budget(epsilon=2.0, delta=1e-5)
VALID: tuple[Accountant, ...] = ("pld", "renyi", "moments", "strong")


def run(noise: float) -> Event:
    return PoissonSampled(0.01, Gaussian(noise)) * 2_000


@pytest.mark.parametrize("accountant", VALID)
@pytest.mark.parametrize("spent", [NOTHING, Gaussian(6.0)], ids=["fresh", "used"])
def test_hazard_25_noise_never_overshoots_and_is_close(accountant: Accountant, spent: Event) -> None:
    found = calibrate.noise(run, BUDGET, spent=spent, accountant=accountant)
    assert epsilon(spent + run(found), delta=1e-5, accountant=accountant).upper <= BUDGET.epsilon
    assert epsilon(spent + run(found * (1 - 2 * TOLERANCE)), delta=1e-5, accountant=accountant).upper > BUDGET.epsilon


def test_hazard_25_what_is_already_spent_is_part_of_the_answer() -> None:
    fresh = calibrate.noise(run, BUDGET, accountant="renyi")
    used = calibrate.noise(run, BUDGET, spent=run(fresh * 1.3), accountant="renyi")
    assert used > fresh * 1.1
    with pytest.raises(ValueError, match="already spent"):
        calibrate.noise(run, BUDGET, spent=run(fresh * 0.9), accountant="renyi")


def test_noise_of_one_gaussian_is_the_analytic_one() -> None:
    found = calibrate.noise(Gaussian, BUDGET)
    assert BUDGET.epsilon * (1 - 3e-3) < gaussian_epsilon(found, 1e-5) <= BUDGET.epsilon


@pytest.mark.parametrize("accountant", VALID)
def test_steps_are_the_last_that_fit(accountant: Accountant) -> None:
    step = PoissonSampled(0.02, Gaussian(3.0))
    found = calibrate.steps(lambda n: step * n, BUDGET, spent=Gaussian(9.0), accountant=accountant)
    assert isinstance(found, int) and found > 1
    assert epsilon(step * found + Gaussian(9.0), delta=1e-5, accountant=accountant).upper <= 2.0
    assert epsilon(step * (found + 1) + Gaussian(9.0), delta=1e-5, accountant=accountant).upper > 2.0


def test_steps_at_both_ends() -> None:
    assert calibrate.steps(lambda n: Gaussian(0.1) * n, BUDGET, accountant="renyi") == 0
    assert (
        calibrate.steps(lambda n: PoissonSampled(0.0, Gaussian(1.0)) * n, BUDGET, accountant="renyi") == calibrate.MOST
    )
    assert calibrate.steps(lambda n: Gaussian(50.0) * n, BUDGET, accountant="renyi", at_most=7) == 7


def test_lot_size_is_the_largest_that_fits() -> None:
    def lots(size: int) -> Event:
        return PoissonSampled(size / 60_000, Gaussian(2.0)) * 1_000

    found = calibrate.lot_size(lots, BUDGET, examples=60_000, accountant="renyi")
    assert epsilon(lots(found), delta=1e-5, accountant="renyi").upper <= 2.0
    assert epsilon(lots(found + 1), delta=1e-5, accountant="renyi").upper > 2.0
    assert calibrate.lot_size(lots, Budget(epsilon=500.0, delta=1e-5), examples=60_000, accountant="renyi") == 60_000


def test_epochs_of_allocation_are_found_whole() -> None:
    found = calibrate.steps(lambda n: Allocated(100, Gaussian(2.0)) * n, BUDGET, accountant="renyi")
    assert epsilon(Allocated(100, Gaussian(2.0)) * found, delta=1e-5, accountant="renyi").upper <= 2.0


def test_the_paper_form_is_no_basis_for_a_promise() -> None:
    with pytest.raises(ValueError, match="not a valid bound"):
        calibrate.noise(run, BUDGET, accountant="strong-paper")


@settings(max_examples=60, deadline=None)
@given(st.floats(1e-5, 1e6), st.floats(0.3, 3.0), st.floats(0.01, 50.0))
def test_smallest_finds_any_falling_boundary(at: float, power: float, target: float) -> None:
    found = calibrate.smallest(lambda x: target * (at / x) ** power, target)
    assert at * (1 - 1e-12) <= found <= at * (1 + 1.01 * TOLERANCE)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 10**9), st.floats(0.4, 2.0))
def test_largest_finds_any_rising_boundary(at: int, start: int, power: float) -> None:
    def measure(n: int) -> float:
        return 1.0 if n == at else (n / at) ** power if at else n + 1.5

    assert calibrate.largest(measure, 1.0, at_most=10**9, start=start) == at


def test_a_target_no_noise_reaches_is_an_error_not_a_guess() -> None:
    with pytest.raises(ValueError, match="no noise up to"):
        calibrate.smallest(lambda x: 3.0, 2.0)
    assert math.isfinite(calibrate.smallest(lambda x: 0.0, 2.0))
