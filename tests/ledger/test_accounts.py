"""Accounts: reserved before use, settled, resumed, taken over, closed."""

import copy
import math
import os
import pickle
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
    """What another process would read, through its own opening of the file."""
    with Ledger(ledger.path) as other:
        return other.accounts()[0].spent


def take(account, units: int) -> list[int]:
    return [account.take() for _ in range(units)]


def test_a_unit_is_on_record_before_it_is_handed_out(ledger, account):
    for unit in range(150):
        assert account.take() == unit == account.taken - 1
        assert on_record(ledger) > unit
    assert account.left == 0


def test_a_plan_with_fewer_units_refuses_and_records_nothing(ledger, account):
    take(account, 149)
    before = on_record(ledger)
    with pytest.raises(BudgetExhausted, match=r"at most 150 units .* a request for 151; the run ends"):
        account.spend_up_to(151)
    assert on_record(ledger) == before
    assert account.take() == 149
    with pytest.raises(BudgetExhausted):
        account.take()


def test_settle_frees_what_was_reserved_ahead_and_nothing_else(ledger, account):
    take(account, 3)
    assert account.reserved > 3
    account.settle()
    assert account.reserved == on_record(ledger) == 3
    assert account.take() == 3
    assert on_record(ledger) >= 4


def test_s2_an_account_given_to_several_runs_hands_each_unit_to_one(ledger, account):
    """Threads as well: forty units are forty units, whoever asks."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(5) as runs:
        got = [unit for units in runs.map(lambda _: take(account, 30), range(5)) for unit in units]
    assert sorted(got) == list(range(150))
    with pytest.raises(BudgetExhausted):
        account.take()


def test_s2_accounts_are_not_copied(ledger, account):
    for one in (account, MemoryAccount(units=UNITS), ledger):
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="cannot be copied"):
                copied(one)


def test_units_that_an_earlier_run_used_are_spent_and_not_handed_out(ledger, account):
    account.spend_up_to(40)
    account.spend_up_to(7)
    assert account.take() == 40 and on_record(ledger) >= 41
    for units in (-1, 1.5, "2", True):
        with pytest.raises(ValueError, match="a whole number"):
            account.spend_up_to(units)


def test_hazard_22_resumed_account_starts_after_every_reserved_unit(ledger, account):
    """Steps since the last checkpoint stay spent; nothing that may have been released is handed out again."""
    take(account, 20)
    account.settle()
    take(account, 1)  # a block ahead is on record; then the process dies
    reserved = on_record(ledger)
    with Ledger(ledger.path) as again:
        resumed = again.resume_account("run")
        assert resumed.taken == resumed.reserved == reserved > 21
        assert resumed.left == 150 - reserved
        resumed.settle()
        assert on_record(ledger) == reserved, "the dead process may have used all of its block"
        assert resumed.take() == reserved


def test_an_account_that_is_used_up_says_so_when_resumed(ledger, account):
    take(account, 150)
    with Ledger(ledger.path) as again:
        resumed = again.resume_account("run")
        assert resumed.left == 0
        with pytest.raises(BudgetExhausted, match="the run ends here"):
            resumed.take()


def test_two_processes_never_use_the_same_unit(ledger, account):
    got = take(account, 1)
    with Ledger(ledger.path) as again:
        other = again.resume_account("run")
        got += take(other, 1)
        got += take(account, account.reserved - 1)  # its own block, charged before it was taken over
        for forbidden in (account.take, account.close):
            with pytest.raises(AccountRefused, match="another process has resumed"):
                forbidden()
        got += take(other, 20)
    assert len(set(got)) == len(got) and max(got) < on_record(ledger)


@pytest.mark.parametrize("kind", ["ledger", "memory"])
def test_a_forked_process_cannot_use_the_account(ledger, account, kind):
    """A real fork: what is in memory says that the parent's next units are free."""
    one = account if kind == "ledger" else MemoryAccount(units=UNITS)
    one.take()
    child = os.fork()
    if child == 0:
        refused = 0
        for use in (one.take, one.close, lambda: one.spend_up_to(9), ledger.accounts):
            try:
                use()
            except LedgerError as error:
                refused += "forked copy" in str(error)
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4, "each of the four was refused"
    assert one.take() == 1, "the child has changed nothing for its parent"


def test_a_closed_account_grants_nothing(ledger, account):
    take(account, 5)
    account.close()
    account.close()
    assert account.closed and account.left == 0 and on_record(ledger) == 5
    for refused in (account.take, account.settle, lambda: ledger.resume_account("run")):
        if refused == account.settle:
            refused()  # nothing to give back
            continue
        with pytest.raises(AccountRefused, match="a closed account"):
            refused()
    assert on_record(ledger) == 5


def test_a_name_is_used_once(ledger, account):
    with pytest.raises(AccountRefused, match="resume it, or choose another"):
        ledger.open_account("run", budget=SLICE, units=UNITS)


@pytest.mark.parametrize(
    "name", ["", "a" * 201, "a\nspent: epsilon 0", "\x1b[8m", "\u202eback", "nul\0", "e\u0301", " a", "a\u200b", 7]
)
def test_s10_names_and_reasons_can_be_shown_to_a_person(ledger, name):
    with pytest.raises(AccountRefused, match="expected a name that can be shown; came") as refusal:
        ledger.open_account(name, budget=SLICE, units=UNITS)
    assert str(refusal.value).isprintable() and len(str(refusal.value)) < 300
    with pytest.raises(ValueError, match=r"a reason has (1 to 1000|printable) characters"):
        ledger.link(refusal=1, reason=name if name != "a" * 201 else "a" * 1001)
    assert not ledger.accounts()


def test_an_unknown_account_is_named_with_those_that_exist(ledger, account):
    with pytest.raises(AccountRefused, match=r"on record \(run\); came 'walk'"):
        ledger.resume_account("walk")


@pytest.mark.parametrize("units", [-1, 1.5, "2", True])
def test_units_are_whole_numbers(ledger, units):
    with pytest.raises(LedgerMismatch):
        ledger.open_account("run", budget=SLICE, units=[(Gaussian(100.0), units)])


@pytest.mark.parametrize("kind", ["take", "settle", "close"])
def test_an_interrupt_after_a_write_is_durable_does_no_harm(ledger, account, monkeypatch, kind):
    """Ctrl-C after the entry is on disk and before the account knows: more or as much is on record, never less."""
    from hush.ledger import witness

    def interrupted(*_):
        raise KeyboardInterrupt

    got = take(account, 16 if kind == "take" else 3)
    with monkeypatch.context() as patch:
        patch.setattr(witness, "advance", interrupted)
        with pytest.raises(KeyboardInterrupt):
            getattr(account, kind)()
    if kind != "close":
        got += take(account, 2)
    assert got == list(range(len(got))) and on_record(ledger) >= len(got)


def test_events_of_the_first_units_follow_the_plans_order(ledger, account):
    record = ledger.accounts()[0]
    assert record.event(120) == Gaussian(100.0) * 100 + Gaussian(200.0) * 20
    assert record.event(0) == Gaussian(100.0) * 0


def test_spent_is_the_whole_plan_and_so_far_is_not(ledger):
    """Gaussians compose exactly: n with multiplier s are one with s / sqrt(n)."""
    from hush import accounting

    account = ledger.open_account("run", budget=SLICE, units=[(Gaussian(100.0), 100)], upfront=Gaussian(50.0))
    take(account, 25)
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
    assert take(account, 2) == [0, 1]
    assert (account.taken, account.reserved, account.left, account.total) == (2, 2, 1, 3)
    with pytest.raises(BudgetExhausted):
        account.spend_up_to(4)
    assert account.so_far(delta=1e-9) == epsilon(Gaussian(100.0) * 3, delta=1e-9)
    assert account.spent(delta=1e-9) == epsilon(Gaussian(100.0) * 4, delta=1e-9)
    account.close()
    with pytest.raises(AccountRefused):
        account.take()


@pytest.mark.parametrize("place", ["file", "folder"])
def test_read_only_is_said_clearly_and_nothing_is_granted(tmp_path_factory, place):
    """As an ordinary user: root may write anywhere."""
    script = Path(__file__).with_name("read_only.py")
    done = subprocess.run([sys.executable, script, place], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "nothing granted" in done.stdout


def test_size_limit_on_files_is_said_clearly(ledger, account):
    import resource

    account.take()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (os.stat(ledger.path).st_size + 40, limits[1]))
        with pytest.raises(LedgerUnwritable):
            take(account, 60)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    account.spend_up_to(60)
    assert on_record(ledger) >= 60


@pytest.mark.timing
def test_charging_costs_less_than_one_percent_of_a_step(tmp_path):
    """Steps of 5 ms, the fastest the MNIST network is trained with on two cores.

    Whoever else writes to the disk meanwhile is measured with it, so the least disturbed of three readings counts.
    """

    def charging(path: Path) -> float:
        spent = 0.0
        with Ledger(path, create=True) as ledger:
            unit = PoissonSampled(0.01, Gaussian(8.0))
            account = ledger.open_account("run", budget=Budget(epsilon=2.0, delta=1e-5), units=[(unit, 6000)])
            for _ in range(600):
                began = time.perf_counter()
                account.take()
                spent += time.perf_counter() - began
                time.sleep(0.005)
        return spent / 600

    assert min(charging(tmp_path / f"{reading}.hush") for reading in range(3)) < 0.01 * 0.005
