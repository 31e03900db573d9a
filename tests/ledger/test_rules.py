"""The three rules: what is admitted, what adds up to what."""

import math
from fractions import Fraction

import pytest
from scipy.optimize import brentq
from scipy.stats import norm
from support.long_ledger import write_long_ledger

from hush.accounting import Budget, Gaussian, PureDP, epsilon
from hush.ledger import BudgetExhausted, Ledger, LedgerMismatch


def gaussian_delta(sigma: float, eps: float) -> float:
    """Exact delta of the Gaussian mechanism (Balle and Wang 2018, theorem 8)."""
    return norm.cdf(0.5 / sigma - eps * sigma) - math.exp(eps) * norm.cdf(-0.5 / sigma - eps * sigma)


def gaussian_epsilon(sigma: float, delta: float) -> float:
    return brentq(lambda eps: gaussian_delta(sigma, eps) - delta, 0.0, 100.0)


def take(account, units):
    for _ in range(units):
        account.take()


def test_slices_fill_the_cap_exactly_and_not_more(tmp_path):
    """0.1 + 0.2 = 0.3 in decimals, as a person means it, though not in floats."""
    with Ledger(tmp_path / "l", budget=Budget(epsilon=0.3, delta=3e-6)) as ledger:
        for name, eps in (("a", 0.1), ("b", 0.2)):
            ledger.open_account(name, budget=Budget(epsilon=eps, delta=1e-6), units=[(PureDP(eps / 2), 1)])
        assert ledger.spent(delta=1e-5).upper == pytest.approx(0.3, abs=1e-15)
        with pytest.raises(BudgetExhausted):
            ledger.remaining()
        tiny = Budget(epsilon=1e-12, delta=1e-12)
        with pytest.raises(BudgetExhausted, match="nothing was computed on the data"):
            ledger.open_account("c", budget=tiny, units=[(PureDP(1e-13), 1)])
        assert len(ledger.accounts()) == 2


def test_hazard_25_a_second_run_pays_beside_the_first(tmp_path):
    with Ledger(tmp_path / "l", budget=Budget(epsilon=3.0, delta=1e-5)) as ledger:
        ledger.open_account("a", budget=Budget(epsilon=2.0, delta=6e-6), units=[(Gaussian(100.0), 10)])
        assert ledger.remaining() == Budget(epsilon=1.0, delta=4e-6)
        for too_much in (Budget(epsilon=1.1, delta=1e-6), Budget(epsilon=0.5, delta=5e-6)):
            with pytest.raises(BudgetExhausted, match="plan for what is left"):
                ledger.open_account("b", budget=too_much, units=[(Gaussian(100.0), 10)])
        ledger.open_account("b", budget=ledger.remaining(), units=[(Gaussian(100.0), 10)])


def test_a_plan_must_fit_its_slice(tmp_path):
    exact = gaussian_epsilon(4.0 / math.sqrt(9), 1e-5)
    with Ledger(tmp_path / "l", create=True) as ledger:
        with pytest.raises(LedgerMismatch, match="a plan that costs"):
            ledger.open_account("a", budget=Budget(epsilon=exact * 0.99, delta=1e-5), units=[(Gaussian(4.0), 9)])
        ledger.open_account("a", budget=Budget(epsilon=exact * 1.01, delta=1e-5), units=[(Gaussian(4.0), 9)])
        with pytest.raises(LedgerMismatch, match="declared budget"):
            ledger.open_account("b", budget=None, units=[(Gaussian(4.0), 9)])


def test_upfront_is_part_of_the_slice(tmp_path):
    budget = Budget(epsilon=gaussian_epsilon(4.0 / math.sqrt(9), 1e-5) * 1.01, delta=1e-5)
    with Ledger(tmp_path / "l", create=True) as ledger, pytest.raises(LedgerMismatch, match="a plan that costs"):
        ledger.open_account("a", budget=budget, upfront=Gaussian(2.0), units=[(Gaussian(4.0), 9)])


def test_slices_give_no_refund(tmp_path):
    with Ledger(tmp_path / "l", budget=Budget(epsilon=1.0, delta=1e-5)) as ledger:
        account = ledger.open_account("a", budget=Budget(epsilon=1.0, delta=1e-5), units=[(Gaussian(100.0), 10)])
        account.close()
        with pytest.raises(BudgetExhausted):
            ledger.open_account("b", budget=Budget(epsilon=0.1, delta=1e-6), units=[(Gaussian(100.0), 1)])
        assert ledger.spent(delta=1e-5).upper >= gaussian_epsilon(100 / math.sqrt(10), 1e-5)


def test_a_smaller_delta_than_the_slices_is_answered_by_the_odometer(tmp_path):
    with Ledger(tmp_path / "l", create=True) as ledger:
        for name in "ab":
            ledger.open_account(name, budget=Budget(epsilon=1.0, delta=1e-5), units=[(Gaussian(20.0), 9)])
        spent = ledger.spent(delta=1e-6)
        assert gaussian_epsilon(20 / math.sqrt(18), 1e-6) <= spent.upper < math.inf
        assert spent.lower <= gaussian_epsilon(20 / math.sqrt(18), 1e-6)
        assert ledger.spent(delta=2e-5).upper == 2.0


def test_renyi_never_admits_more_than_the_exact_cost_allows(tmp_path):
    cap = Budget(epsilon=1.0, delta=1e-5)
    with Ledger(tmp_path / "l", budget=cap, rule="renyi") as ledger:
        for run in range(100):
            try:
                account = ledger.open_account(f"r{run}", budget=None, units=[(Gaussian(20.0), 4)])
            except BudgetExhausted:
                break
            take(account, 4)
        sigma = 20 / math.sqrt(4 * run)
        assert gaussian_epsilon(sigma, 1e-5) <= 1.0, "the filter let too much through"
        assert gaussian_epsilon(sigma, 1e-5) > 0.6, "the filter is useless"
        assert gaussian_epsilon(sigma, 1e-5) <= ledger.spent(delta=1e-5).upper <= 1.0


def test_renyi_holds_the_whole_plan_and_refunds_what_was_not_used(tmp_path):
    """A run that would pass the cap is refused before any gradient, even while the others have used little."""
    with Ledger(tmp_path / "l", budget=Budget(epsilon=1.0, delta=1e-5), rule="renyi") as ledger:
        account = ledger.open_account("a", budget=None, units=[(Gaussian(20.0), 12)])
        take(account, 2)
        with pytest.raises(BudgetExhausted, match="beside what is held"):
            ledger.open_account("b", budget=None, units=[(Gaussian(20.0), 11)])
        account.close()
        ledger.open_account("b", budget=None, units=[(Gaussian(20.0), 11)])
        with pytest.raises(BudgetExhausted):
            ledger.open_account("c", budget=None, units=[(Gaussian(20.0), 11)])


def test_renyi_counts_upfront_from_the_opening(tmp_path):
    with Ledger(tmp_path / "l", budget=Budget(epsilon=2.0, delta=1e-5), rule="renyi") as ledger:
        ledger.open_account("a", budget=None, upfront=Gaussian(4.0), units=[(Gaussian(20.0), 1)]).close()
        assert ledger.spent(delta=1e-5).upper >= gaussian_epsilon(4.0, 1e-5)


def test_odometer_admits_everything_and_reads_at_least_the_exact_cost(tmp_path):
    with Ledger(tmp_path / "l", rule="odometer") as ledger:
        assert ledger.spent(delta=1e-5).upper == 0
        for run in range(1, 4):
            account = ledger.open_account(str(run), budget=None, units=[(Gaussian(2.0), 10)])
            take(account, 4)
            account.close()
            exact = gaussian_epsilon(2 / math.sqrt(4 * run), 1e-5)
            assert exact <= ledger.spent(delta=1e-5).upper <= 2 * exact
        assert account.spent(delta=1e-5).upper >= gaussian_epsilon(1.0, 1e-5)


def test_rule_and_cap_are_fixed_with_the_file(tmp_path):
    cap = Budget(epsilon=1.0, delta=1e-5)
    Ledger(tmp_path / "l", budget=cap).close()
    Ledger(tmp_path / "l", budget=cap, rule="slices").close()
    with pytest.raises(LedgerMismatch, match=r"the cap .* has fixed"):
        Ledger(tmp_path / "l", budget=Budget(epsilon=2.0, delta=1e-5))
    with pytest.raises(LedgerMismatch, match="the rule 'slices' that the file has fixed"):
        Ledger(tmp_path / "l", rule="renyi")
    with pytest.raises(LedgerMismatch, match="one of the rules"):
        Ledger(tmp_path / "other", rule="hope")
    with pytest.raises(LedgerMismatch, match="a cap for the rule 'renyi'"):
        Ledger(tmp_path / "other", rule="renyi")
    with pytest.raises(LedgerMismatch, match="no cap for the rule 'odometer'"):
        Ledger(tmp_path / "other", budget=cap, rule="odometer")
    assert not (tmp_path / "other").exists()


def test_slice_of_one_account_is_answered_at_any_delta(tmp_path):
    with Ledger(tmp_path / "l", create=True) as ledger:
        ledger.open_account("a", budget=Budget(epsilon=1.0, delta=1e-5), units=[(Gaussian(20.0), 9)])
        assert ledger.spent(delta=1e-8) == epsilon(Gaussian(20.0) * 9, delta=1e-8)


def inexact_epsilon(sigma: float, delta: float, distance: float) -> float:
    """The smallest epsilon at which the Gaussian's own delta and (1 + e^epsilon) times the distance fit into delta."""
    return brentq(lambda eps: gaussian_delta(sigma, eps) + (1 + math.exp(eps)) * distance - delta, 0.0, 2.0)


def test_noise_that_is_not_exact_must_fit_its_slice_and_is_in_what_is_stated(tmp_path):
    sigma, distance = 20 / math.sqrt(9), 3.5e-8
    exact, inexact = gaussian_epsilon(sigma, 1e-6), inexact_epsilon(sigma, 1e-6, distance)
    assert inexact > 1.003 * exact
    plan = {"units": [(Gaussian(20.0), 9)]}
    with Ledger(tmp_path / "l", create=True) as ledger:
        tight = Budget(epsilon=0.4 * exact + 0.6 * inexact, delta=1e-6)
        with pytest.raises(LedgerMismatch, match="a plan that costs"):
            ledger.open_account("a", budget=tight, distance=distance, **plan)
        ledger.open_account("a", budget=tight, **plan)
        roomy = Budget(epsilon=1.05 * inexact, delta=1e-6)
        account = ledger.open_account("b", budget=roomy, distance=distance, **plan)
        assert account.spent(delta=1e-6).upper >= inexact
        with Ledger(ledger.path) as other:
            assert other.accounts()[1].distance == distance
        both = 20 / math.sqrt(18)
        assert inexact_epsilon(both, 1.9e-6, distance) <= ledger.spent(delta=1.9e-6).upper < 2, "by the odometer"
        with Ledger(tmp_path / "exact", create=True) as exact_ledger:
            for name in "ab":
                exact_ledger.open_account(name, budget=roomy, **plan)
            assert exact_ledger.spent(delta=1.9e-6).upper < ledger.spent(delta=1.9e-6).upper
        for wrong in (-1e-9, 1.0, math.nan):
            with pytest.raises(LedgerMismatch, match="a distance in total variation"):
                ledger.open_account("c", budget=roomy, distance=wrong, **plan)


@pytest.mark.parametrize("share", [0.6, 1.01])
def test_distances_of_all_accounts_are_taken_out_of_the_delta_of_the_cap(tmp_path, share):
    """Two accounts of which each uses up most of delta: the second one is refused, whatever its noise costs."""
    cap = Budget(epsilon=1.0, delta=1e-5)
    distance = share * cap.delta / (1 + math.exp(cap.epsilon))
    with Ledger(tmp_path / "l", budget=cap, rule="renyi") as ledger:
        opened = 0
        with pytest.raises(BudgetExhausted):
            for name in "ab":
                ledger.open_account(name, budget=None, units=[(Gaussian(1e4), 1)], distance=distance).take()
                opened += 1
        assert opened == (1 if share < 1 else 0)
        if opened:
            assert ledger.spent(delta=1e-5).upper <= cap.epsilon
            assert ledger.spent(delta=4e-6).upper > 2 * gaussian_epsilon(1e4, 4e-6), "delta is nearly used up"


def test_equal_and_different_slices_are_added_exactly(tmp_path):
    """Against fractions: a thousand slices of 0.001 are 1, and the lower end is that of the largest one."""
    write_long_ledger(tmp_path / "l", accounts=700, entries=701, alike=False)
    with Ledger(tmp_path / "l") as ledger:
        total = sum((Fraction(f"0.00{1 + n % 7}") for n in range(700)), Fraction(0))
        spent = ledger.spent(delta=1e-4)
        assert Fraction(repr(spent.upper)) == total
        largest = epsilon(Gaussian(1006.0) * 10**6, delta=1e-4)
        assert spent.lower == pytest.approx(min(largest.lower, spent.upper))
