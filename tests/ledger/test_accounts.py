"""Accounts: reserved before use, settled, resumed, taken over, closed."""

import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hush.accounting import Budget, Gaussian, PoissonSampled, epsilon
from hush.ledger import (
    AccountRefused,
    BudgetExhausted,
    Ledger,
    LedgerError,
    LedgerMismatch,
    LedgerUnwritable,
    MemoryAccount,
)

CAP = Budget(epsilon=3.0, delta=1e-5)
SLICE = Budget(epsilon=1.0, delta=1e-6)
UNITS = [(Gaussian(100.0), 100), (Gaussian(200.0), 50)]


@pytest.fixture
def ledger(tmp_path):
    with Ledger(tmp_path / "data.hush", budget=CAP) as opened:
        yield opened


@pytest.fixture
def account(ledger):
    return ledger.open_account("run", budget=SLICE, units=UNITS)


def on_record(ledger) -> int:
    """What another process would read, through its own connection."""
    with Ledger(ledger.path) as other:
        return other.pages()[0].spent


def test_reserve_is_on_record_before_it_returns(ledger, account):
    for unit in range(1, 151):
        account.reserve(unit)
        assert on_record(ledger) >= unit


def test_a_plan_with_fewer_units_refuses_and_records_nothing(ledger, account):
    account.reserve(149)
    before = on_record(ledger)
    with pytest.raises(BudgetExhausted, match=r"at most 150 units .* a request for 151; the run ends"):
        account.reserve(151)
    assert on_record(ledger) == before
    account.reserve(150)


def test_settle_frees_what_was_reserved_ahead(ledger, account):
    account.reserve(3)
    assert account.reserved > 3
    account.settle(3)
    assert account.reserved == on_record(ledger) == 3
    account.reserve(4)
    assert on_record(ledger) >= 4


@pytest.mark.parametrize("units", [9, 1000])
def test_settle_refuses_less_than_was_asked_for_and_more_than_was_reserved(account, units):
    account.reserve(10)
    with pytest.raises(AccountRefused, match="settle what was really used"):
        account.settle(units)


def test_hazard_22_resumed_account_starts_after_every_reserved_unit(ledger, account):
    """Steps since the last checkpoint stay spent; nothing that may have been released is handed out again."""
    account.reserve(20)
    account.settle(20)
    account.reserve(21)  # a block ahead is on record; then the process dies
    reserved = on_record(ledger)
    with Ledger(ledger.path) as again:
        resumed = again.resume_account("run")
        assert resumed.reserved == reserved > 21
        assert resumed.left == 150 - reserved
        with pytest.raises(AccountRefused):
            resumed.settle(21)  # the dead process may have used all of its block
        resumed.reserve(reserved + 1)


def test_an_account_that_is_used_up_says_so_when_resumed(ledger, account):
    account.reserve(150)
    with Ledger(ledger.path) as again:
        resumed = again.resume_account("run")
        assert resumed.left == 0
        with pytest.raises(BudgetExhausted, match="the run ends here"):
            resumed.reserve(151)


def test_two_processes_never_use_the_same_unit(ledger, account):
    account.reserve(1)
    with Ledger(ledger.path) as again:
        other = again.resume_account("run")
        first_of_other = other.reserved + 1
        other.reserve(first_of_other)
        last_of_first = account.reserved
        for unit in range(2, last_of_first + 1):
            account.reserve(unit)  # its own block, charged before it was taken over
        assert last_of_first < first_of_other
        for forbidden in (lambda: account.reserve(last_of_first + 1), lambda: account.close(last_of_first)):
            with pytest.raises(AccountRefused, match="another process has resumed"):
                forbidden()


def test_a_forked_process_cannot_use_the_account(ledger, account):
    account.reserve(1)
    account._pid = ledger._store._pid = os.getpid() + 1  # as a forked child sees it
    with pytest.raises(LedgerError, match="a forked copy"):
        account.reserve(1)


def test_a_closed_account_grants_nothing(ledger, account):
    account.reserve(5)
    account.close()
    account.close()
    assert account.closed and on_record(ledger) == 5
    with pytest.raises(AccountRefused, match="a closed account"):
        account.reserve(6)
    with pytest.raises(AccountRefused, match="a closed account"):
        account.reserve(2)
    with pytest.raises(AccountRefused, match="a closed account"):
        ledger.resume_account("run")


def test_a_name_is_used_once(ledger, account):
    with pytest.raises(AccountRefused, match="resume it, or choose another"):
        ledger.open_account("run", budget=SLICE, units=UNITS)


def test_an_unknown_account_is_named_with_those_that_exist(ledger, account):
    with pytest.raises(AccountRefused, match=r"on record \(run\); came 'walk'"):
        ledger.resume_account("walk")


@pytest.mark.parametrize("units", [-1, 1.5, "2", True])
def test_units_are_whole_numbers(ledger, units):
    with pytest.raises(LedgerMismatch):
        ledger.open_account("run", budget=SLICE, units=[(Gaussian(100.0), units)])


def test_an_interrupted_reservation_does_not_harm_the_file(ledger, account, monkeypatch):
    """Ctrl-C after the commit and before the books know: the next reservation finds more on record than it knew."""
    from hush.ledger import witness

    def interrupted(*_):
        raise KeyboardInterrupt

    account.reserve(1)
    with monkeypatch.context() as patch:
        patch.setattr(witness, "advance", interrupted)
        with pytest.raises(KeyboardInterrupt):
            account.reserve(40)
    account.reserve(18)
    assert on_record(ledger) >= 40


def test_events_of_the_first_units_follow_the_plans_order(ledger, account):
    page = ledger.pages()[0]
    assert page.event(120) == Gaussian(100.0) * 100 + Gaussian(200.0) * 20
    assert page.event(0) == Gaussian(100.0) * 0


def test_spent_is_the_whole_plan_and_so_far_is_not(ledger):
    """Gaussians compose exactly: n with multiplier s are one with s / sqrt(n)."""
    from hush import accounting

    account = ledger.open_account("run", budget=SLICE, units=[(Gaussian(100.0), 100)], upfront=Gaussian(50.0))
    account.reserve(25)
    whole = 1 / math.sqrt(100 / 100.0**2 + 1 / 50.0**2)
    begun = 1 / math.sqrt(25 / 100.0**2 + 1 / 50.0**2)
    assert account.spent(delta=1e-6).upper == pytest.approx(
        accounting.epsilon(Gaussian(whole), delta=1e-6).upper, rel=2e-3
    )
    assert account.so_far(delta=1e-6).upper == pytest.approx(
        accounting.epsilon(Gaussian(begun), delta=1e-6).upper, rel=2e-3
    )


def test_memory_account_counts_like_one_on_a_ledger():
    account = MemoryAccount(units=[(Gaussian(100.0), 3)], upfront=Gaussian(100.0))
    account.reserve(2)
    assert (account.reserved, account.left, account.total) == (2, 1, 3)
    with pytest.raises(BudgetExhausted):
        account.reserve(4)
    assert account.so_far(delta=1e-9) == epsilon(Gaussian(100.0) * 3, delta=1e-9)
    assert account.spent(delta=1e-9) == epsilon(Gaussian(100.0) * 4, delta=1e-9)
    account.close()
    with pytest.raises(BudgetExhausted):
        account.reserve(3)


@pytest.mark.parametrize("place", ["file", "folder"])
def test_read_only_is_said_clearly_and_nothing_is_granted(tmp_path_factory, place):
    """As an ordinary user: root may write anywhere."""
    script = Path(__file__).with_name("read_only.py")
    done = subprocess.run([sys.executable, script, place], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "nothing granted" in done.stdout


def test_size_limit_on_files_is_said_clearly(ledger, account):
    import resource

    account.reserve(1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        with pytest.raises(LedgerUnwritable):
            account.reserve(60)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    account.reserve(60)
    assert on_record(ledger) >= 60


@pytest.mark.timing
def test_charging_costs_less_than_one_percent_of_a_step(tmp_path):
    """Steps of 5 ms, the fastest the MNIST network is trained with on two cores.

    Whoever else writes to the disk meanwhile is measured with it, so the least disturbed of three readings counts.
    """

    def charging(path: Path) -> float:
        spent = 0.0
        with Ledger(path) as ledger:
            unit = PoissonSampled(0.01, Gaussian(8.0))
            account = ledger.open_account("run", budget=Budget(epsilon=2.0, delta=1e-5), units=[(unit, 6000)])
            for step in range(1, 601):
                began = time.perf_counter()
                account.reserve(step)
                spent += time.perf_counter() - began
                time.sleep(0.005)
        return spent / 600

    assert min(charging(tmp_path / f"{reading}.hush") for reading in range(3)) < 0.01 * 0.005
