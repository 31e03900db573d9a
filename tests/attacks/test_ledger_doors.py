"""The doors through which charges were lost once: second openings, copies, moves, links, wrong paths, shared accounts.

Each test is a situation in which an earlier ledger (a database with its journal beside it) forgot what was released,
gave out a unit twice or let a cap be passed. The processes are real and die by SIGKILL.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.long_ledger import write_long_ledger
from torch import nn

from hush.accounting import Budget, Gaussian
from hush.clipping.clips import FlatClip
from hush.ledger import (
    BudgetExhausted,
    Ledger,
    LedgerDamaged,
    LedgerMissing,
    LedgerRolledBack,
    LedgerUnwritable,
    MemoryAccount,
    locks,
)
from hush.plan import Plan
from hush.private import Private
from hush.sampling.lots import PoissonLots

CAP = Budget(epsilon=3.0, delta=1e-5)
SLICE = Budget(epsilon=1.0, delta=1e-6)
UNITS = [(Gaussian(200.0), 400)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    Ledger(tmp_path / "patients.hush", budget=CAP).close()
    return tmp_path / "patients.hush"


def in_a_process(body: Callable[[], None]) -> int:
    """Fork, run the body, end with its verdict."""
    child = os.fork()
    if child == 0:
        try:
            body()
            os._exit(0)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            os._exit(1)
    return child


def ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_after(child: int, log: Path, lines: int) -> int:
    """SIGKILL once the process has released so much; what it has released by then."""
    until = time.monotonic() + 30
    while not log.exists() or log.read_text().count("\n") < lines:
        assert time.monotonic() < until and os.waitpid(child, os.WNOHANG) == (0, 0), "the run did not get that far"
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return log.read_text().count("\n")


def show(path: Path) -> None:
    """What `hush ledger show` does in a shell, as a process of its own."""
    assert ended(in_a_process(lambda: Ledger(path).close())) == 0


def on_record(path: Path, name: str = "run") -> int:
    with Ledger(path) as ledger:
        return {record.name: record.spent for record in ledger.accounts()}[name]


def release(account: object, log: Path, units: int) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for _ in range(units):
        unit = account.take()  # type: ignore[attr-defined]
        os.write(descriptor, f"{unit}\n".encode())
        account.settle()  # type: ignore[attr-defined]
        time.sleep(0.001)


def raw_read(path: Path) -> None:
    path.read_bytes()


def copy(path: Path) -> None:
    shutil.copy(path, path.with_name("upload"))


def second_ledger(path: Path) -> None:
    Ledger(path).accounts()


@pytest.mark.parametrize("door", [second_ledger, raw_read, copy])
def test_s1_hazard_36_a_second_opening_in_the_process_loses_no_charge(path: Path, door: Callable[[Path], None]) -> None:
    """Closing any descriptor of a file drops a process's record locks on it; then others thought the run was gone."""
    log = path.with_name("log")

    def run() -> None:
        account = Ledger(path).open_account("run", budget=SLICE, units=UNITS)
        door(path)
        release(account, log, 300)

    child = in_a_process(run)
    while not log.exists():
        time.sleep(0.002)
    show(path)
    released = killed_after(child, log, 60)
    show(path)
    assert on_record(path) >= released >= 60


def test_s1_two_processes_that_read_the_file_raw_do_not_both_take_the_whole_cap(path: Path) -> None:
    def run(name: str) -> Callable[[], None]:
        def body() -> None:
            opened = 0
            with Ledger(path) as ledger, Ledger(path):
                for number in range(3):
                    raw_read(path)
                    try:
                        ledger.open_account(f"{name} {number}", budget=SLICE, units=UNITS).take()
                        opened += 1
                    except BudgetExhausted:
                        break
            path.with_name(f"{name}.opened").write_text(str(opened))

        return body

    children = [in_a_process(run(name)) for name in "ab"]
    assert [ended(child) for child in children] == [0, 0]
    assert sum(int(path.with_name(f"{name}.opened").read_text()) for name in "ab") == 3
    with Ledger(path) as ledger:
        assert len(ledger.accounts()) == 3 and ledger.spent(delta=1e-5).upper == 3.0


@pytest.mark.parametrize("where", ["memory", "ledger"])
def test_s2_hazard_37_one_account_for_several_runs_pays_for_each_release(path: Path, where: str) -> None:
    plan = Plan(lots=PoissonLots(examples=30, lot_size=6), steps=8, clip=FlatClip(1.0), noise_multiplier=20.0)
    ledger = Ledger(path)
    account = (
        MemoryAccount(units=plan.units)
        if where == "memory"
        else ledger.open_account("run", budget=SLICE, units=plan.units)
    )
    models = [nn.Linear(4, 1) for _ in range(3)]
    with pytest.raises(TypeError, match="a ledger is given by name"):
        Private(models[0], plan, account)  # type: ignore[arg-type]
    x = torch.ones(30, 4)
    runs = [Private(one, plan, lambda model, x: model(x).squeeze(1), data=x, ledger=account) for one in models]
    released = 0
    for run, model in zip(runs, models, strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            for lot in run.lots():
                for batch in lot.batches(6):
                    run.add(batch)
                run.step(optimizer)
                released += 1
                if released == 5:
                    break  # a second run begins while the first one is not done
        except BudgetExhausted:
            continue
    assert released == 8 == account.taken
    assert where == "memory" or on_record(path) == 8


def test_s4_hazard_40_a_copy_made_while_a_run_is_open_is_complete(path: Path) -> None:
    log = path.with_name("log")
    child = in_a_process(lambda: release(Ledger(path).open_account("run", budget=SLICE, units=UNITS), log, 400))
    while not log.exists():
        time.sleep(0.002)
    for number in range(40):
        before = log.read_text().count("\n")
        to = path.with_name(f"backup{number}")
        shutil.copyfile(path, to)
        assert on_record(to) >= before
    killed_after(child, log, 1)
    assert not list(path.parent.glob("*-wal")) and on_record(to) > 10, "the run went on meanwhile"


@pytest.mark.parametrize("whole_folder", [False, True])
def test_s4_a_ledger_that_is_moved_while_a_run_is_open_knows_all(path: Path, whole_folder: bool) -> None:
    """The run ends at its next block, so that no charge is made to a file that nobody looks for."""
    folder, elsewhere = path.parent, path.parent.with_name("elsewhere")
    with Ledger(path) as ledger:
        account = ledger.open_account("run", budget=SLICE, units=UNITS)
        account.take()
        if whole_folder:
            folder.rename(elsewhere)
            moved = elsewhere / path.name
        else:
            moved = path.rename(path.with_name("moved.hush"))
        taken = 1
        with pytest.raises(LedgerUnwritable, match="moved, removed or replaced since; put it back"):
            while True:
                account.take()
                taken += 1
        assert on_record(moved) >= taken > 1
        if whole_folder:
            elsewhere.rename(folder)
        else:
            with pytest.raises(LedgerRolledBack, match="without its ledger"):
                Ledger(path, create=True)
            moved.rename(path)
        assert account.take() == taken, "put back, it goes on"


def test_s4_a_hard_link_is_the_same_ledger(path: Path) -> None:
    os.link(path, path.with_name("second.hush"))
    names = [path, path.with_name("second.hush")]
    for number in range(3):
        with Ledger(names[number % 2]) as ledger:
            ledger.open_account(f"run {number}", budget=SLICE, units=UNITS).take()
    for name in names:
        with Ledger(name) as ledger, pytest.raises(BudgetExhausted):
            ledger.open_account("more", budget=SLICE, units=UNITS)


def test_s4_a_bind_mount_is_the_same_ledger(path: Path) -> None:
    inside = path.with_name("container")
    inside.mkdir()
    (inside / "data.hush").touch()
    if subprocess.run(["mount", "--bind", path, inside / "data.hush"], capture_output=True).returncode:
        pytest.skip("this user may not mount")
    try:
        with Ledger(inside / "data.hush") as one, Ledger(path) as other:
            one.open_account("a", budget=SLICE, units=UNITS).take()
            other.open_account("b", budget=Budget(epsilon=2.0, delta=1e-6), units=UNITS).take()
            for ledger in (one, other):
                with pytest.raises(BudgetExhausted):
                    ledger.open_account("c", budget=SLICE, units=UNITS)
    finally:
        subprocess.run(["umount", inside / "data.hush"], check=True)


@pytest.mark.parametrize("how", ["removed", "replaced", "replaced while a hard link lives on"])
def test_s4_a_run_whose_ledger_was_taken_away_ends(path: Path, how: str) -> None:
    with Ledger(path) as ledger:
        account = ledger.open_account("run", budget=SLICE, units=UNITS)
        account.take()
        shutil.copy(path, path.with_name("copy"))
        if "hard link" in how:
            os.link(path, path.with_name("snapshot"))
        if how == "removed":
            path.unlink()
        else:
            os.replace(path.with_name("copy"), path)
        with pytest.raises(LedgerUnwritable, match="moved, removed or replaced since"):
            account.spend_up_to(300)
    if how != "removed":
        assert on_record(path) < 300


def test_s9_a_relative_path_stays_where_it_was_when_the_folder_changes(
    path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path_factory.mktemp("other")
    Ledger(other / path.name, budget=CAP).close()
    before = {file.name: file.read_bytes() for file in other.iterdir()}
    monkeypatch.chdir(path.parent)
    with Ledger(path.name) as ledger:
        monkeypatch.chdir(other)
        ledger.open_account("run", budget=SLICE, units=UNITS).take()
        assert ledger.path == path
    assert {file.name: file.read_bytes() for file in other.iterdir()} == before
    assert on_record(path) >= 1


def test_s9_a_link_is_resolved_once_and_a_link_to_nothing_is_no_new_ledger(path: Path) -> None:
    link, lost = path.with_name("link"), path.with_name("lost")
    link.symlink_to(path)
    with Ledger(link) as ledger:
        ledger.open_account("run", budget=SLICE, units=UNITS).take()
    assert path.with_name("patients.hush-head").exists() and not path.with_name("link-head").exists()
    lost.symlink_to("/mnt/drive that is not mounted/data.hush")
    for asked in ({}, {"create": True}, {"budget": CAP}):
        with pytest.raises(LedgerMissing, match="a link to /mnt/drive that is not mounted"):
            Ledger(lost, **asked)  # type: ignore[arg-type]
    assert lost.is_symlink() and not lost.exists()


def test_s9_a_mistyped_path_is_no_new_ledger(path: Path) -> None:
    files = sorted(path.parent.iterdir())
    with pytest.raises(LedgerMissing, match=r"came no file; mend .* new one with Ledger\(path, create"):
        Ledger(path.with_name("patient.hush"))
    assert sorted(path.parent.iterdir()) == files
    for number, asked in enumerate(({"create": True}, {"budget": CAP}, {"rule": "odometer"})):
        with Ledger(path.with_name(f"new{number}"), **asked) as made, Ledger(made.path) as again:  # type: ignore[arg-type]
            assert made.created and not again.created


def test_locks_that_exclude_nobody_are_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(locks.fcntl, "flock", lambda descriptor, kind: None)
        with pytest.raises(LedgerUnwritable, match="a lock given to two at once; keep the ledger on a disk"):
            Ledger(path)

    def unsupported(descriptor: int, kind: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(locks.fcntl, "flock", unsupported)
    with pytest.raises(LedgerUnwritable, match=r"locks that work for .*; came Operation not supported"):
        Ledger(path)
    monkeypatch.setattr(locks, "fcntl", None)
    with pytest.raises(LedgerUnwritable, match="a system with flock"):
        Ledger(path)


@pytest.mark.parametrize(
    ("kind", "options", "refused"),
    [
        ("ext4", "rw", False),
        ("nfs4", "rw,vers=4.2,local_lock=none", False),
        ("nfs", "rw,nolock,vers=3", True),
        ("nfs", "rw,local_lock=flock", True),
        ("cifs", "rw,nobrl", True),
        ("cifs", "rw", False),
        ("fuse.sshfs", "rw", True),
    ],
)
def test_a_share_that_keeps_its_locks_on_one_machine_is_refused(
    path: Path, kind: str, options: str, refused: bool
) -> None:
    device = path.stat().st_dev
    place = f"{os.major(device)}:{os.minor(device)}"
    mounts = path.with_name("mountinfo")
    mounts.write_text(
        "20 1 0:3 / /proc rw shared:1 - proc proc rw,nolock\n"
        f"36 35 {place} / /mnt rw,noatime master:1 - {kind} server:/share {options}\n"
    )
    if not refused:
        return locks._require_shared(device, path, str(mounts))
    with pytest.raises(LedgerUnwritable, match="keeps them on this machine"):
        locks._require_shared(device, path, str(mounts))


def test_a_turn_that_never_comes_is_said(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "WAIT_SECONDS", 0.05)
    with Ledger(path) as ledger, open(path, "rb") as other:
        locks.fcntl.flock(other.fileno(), locks.fcntl.LOCK_EX)
        with pytest.raises(LedgerUnwritable, match="a lock that is not given back; end the process that holds it"):
            ledger.open_account("run", budget=SLICE, units=UNITS)
        locks.fcntl.flock(other.fileno(), locks.fcntl.LOCK_UN)
        assert not ledger.accounts()


def test_a_file_that_calls_itself_a_ledger_and_hides_something_is_refused(path: Path) -> None:
    """There is no schema to hide a trigger in: what is no entry is refused, wherever it lies before the last one."""
    content = path.read_bytes().split(b"\n")
    for at in range(1, len(content) - 1):
        hidden = [*content[:at], b"CREATE TRIGGER t BEFORE INSERT ON entries", *content[at:]]
        path.write_bytes(b"\n".join(hidden))
        with pytest.raises(LedgerDamaged):
            Ledger(path)


def test_an_interrupt_at_any_moment_neither_loses_a_charge_nor_repeats_a_unit(tmp_path: Path) -> None:
    script = Path(__file__).with_name("interrupted_run.py")
    done = subprocess.run([sys.executable, script, tmp_path / "l", "1.5"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["interrupts"] > 20 and len(said["units"]) > 100
    assert len(set(said["units"])) == len(said["units"])
    assert on_record(tmp_path / "l") > max(said["units"])


@pytest.mark.timing
@pytest.mark.parametrize("alike", [True, False])
def test_s11_two_thousand_accounts_are_added_up_within_a_second(tmp_path: Path, alike: bool) -> None:
    write_long_ledger(tmp_path / "l", accounts=2000, entries=2001, alike=alike)
    with Ledger(tmp_path / "l") as ledger:
        for delta in (1e-4, 1e-12):
            began = time.process_time()
            assert ledger.spent(delta=delta).upper > 1
            assert time.process_time() - began < 1


@pytest.mark.long
def test_a_million_entries_are_opened_within_ten_seconds_and_500_mb(tmp_path: Path) -> None:
    write_long_ledger(tmp_path / "l", accounts=20, entries=10**6)
    code = (
        "import pathlib, re, sys, time; from hush.ledger import Ledger;"
        "began = time.process_time(); Ledger(sys.argv[1]);"
        "status = pathlib.Path('/proc/self/status').read_text();"
        "print(time.process_time() - began, int(re.search(r'VmHWM:\\s+(\\d+)', status)[1]) / 1024)"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "l"], capture_output=True, text=True, check=True)
    seconds, megabytes = map(float, done.stdout.split())
    assert seconds < 10 and megabytes < 500
