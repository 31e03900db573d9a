"""A process that uses a ledger as it is told, for ledger_machine.py: one command a line in, one answer a line out.

Every unit that it is given is written down in a file at once, as a release would be, before anything else happens.
`FAULTS` are ways to break the ledger on purpose; the machine has to find each of them.
"""

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from support.forgetful import watched

from hush.accounting import Budget, Gaussian
from hush.ledger import Account, Ledger, LedgerError, account, ledger_file, locks, opening, rules, witness

CAP = Budget(epsilon=3.0, delta=1e-5)
SLICE = Budget(epsilon=1.0, delta=1e-6)
UNIT, UNITS = Gaussian(200.0), 400


class Worker:
    """Ledgers and accounts in one process. What the ledger refuses is an answer; anything else ends the process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.released = os.open(folder / "released", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.ledgers: list[Ledger] = []
        self.accounts: list[Account] = []

    def serve(self, commands: int, answers: int) -> None:
        with os.fdopen(commands) as lines:
            for line in lines:
                name, *arguments = json.loads(line)
                try:
                    answer = getattr(self, name)(*arguments)
                except LedgerError as error:
                    answer = {"refused": type(error).__name__, "why": str(error)}
                os.write(answers, json.dumps(answer).encode() + b"\n")

    def open(self, path: str, into: str) -> None:
        os.chdir(into)
        self.ledgers.append(Ledger(path))

    def create(self, path: str) -> bool:
        with Ledger(path, budget=CAP, create=True) as made:
            return made.created

    def account(self, which: int, name: str) -> None:
        if self.ledgers:
            units = [(UNIT, UNITS)]
            self.accounts.append(self._pick(self.ledgers, which).open_account(name, budget=SLICE, units=units))

    def resume(self, which: int, name: str) -> None:
        if self.ledgers:
            self.accounts.append(self._pick(self.ledgers, which).resume_account(name))

    def take(self, which: int, units: int) -> None:
        for _ in range(units if self.accounts else 0):
            self._release(self._pick(self.accounts, which))

    def take_and_settle(self, which: int, units: int) -> None:
        for _ in range(units if self.accounts else 0):
            self._release(self._pick(self.accounts, which))
            self._pick(self.accounts, which).settle()

    def take_in_threads(self, which: int, units: int) -> None:
        def takes() -> None:
            with suppress(LedgerError):
                self.take(which, units)

        threads = [threading.Thread(target=takes) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def settle(self, which: int) -> None:
        if self.accounts:
            self._pick(self.accounts, which).settle()

    def close_account(self, which: int) -> None:
        if self.accounts:
            self._pick(self.accounts, which).close()

    def close_ledger(self, which: int) -> None:
        if len(self.ledgers) > 1:
            self._pick(self.ledgers, which).close()

    def read(self, path: str) -> None:
        """What `hush ledger show` does, and what a copy or an upload does in the process of a run."""
        with Ledger(path) as other:
            other.accounts()
        Path(path).read_bytes()

    def balance(self, path: str) -> dict[str, int]:
        with Ledger(path) as other:
            return {record.name: record.spent for record in other.accounts()}

    def copy(self, path: str, to: str) -> None:
        shutil.copyfile(path, to)

    def fork(self, which: int, path: str, name: str) -> int:
        """A child that tries to go on with its parent's accounts, then resumes one in its own name."""
        child = os.fork()
        if child:
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        try:
            if self.accounts:
                inherited = self._pick(self.accounts, which)
                for use in (lambda: self._release(inherited), inherited.settle, lambda: self._release(inherited)):
                    with suppress(LedgerError):
                        use()
            with suppress(LedgerError):
                own = Ledger(path).resume_account(name)
                self._release(own)
                self._release(own)
        finally:
            os._exit(0)

    def _release(self, one: Account) -> None:
        unit = one.take()
        os.write(self.released, f"{one.name} {unit}\n".encode())

    @staticmethod
    def _pick(among: list[Any], which: int) -> Any:
        return among[-1] if which % 3 else among[which // 3 % len(among)]  # those before are often taken over


@contextmanager
def journal(folder: Path) -> Iterator[None]:
    """What this process writes and syncs is noted, so that a power cut can forget it."""
    notes = os.open(folder / "journal", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(event: tuple[str, int, int, bytes]) -> None:
        kind, inode, offset, data = event
        os.write(notes, f"{kind} {inode} {offset} {data.hex()}\n".encode())

    try:
        with watched(note):
            yield
    finally:
        os.close(notes)


def run(folder: Path, commands: int, answers: int, fault: str | None) -> None:
    """The life of a worker process."""
    with journal(folder):
        if fault is not None:
            FAULTS[fault]()
        Worker(folder).serve(commands, answers)


# Faults ----------------------------------------------------------------------------------------------------------


def no_fsync() -> None:
    ledger_file._sync = lambda descriptor: None


def posix_locks() -> None:
    """Locks that belong to the process: any close of the file drops them (S1). Held while the file is read raw."""

    @contextmanager
    def held(descriptor: int, path: Path, *, alone: bool) -> Iterator[None]:
        locks.fcntl.lockf(descriptor, locks.fcntl.LOCK_EX)
        os.close(os.open(path, os.O_RDONLY))
        yield

    _replace_locks(held)


def no_locks() -> None:
    _replace_locks(lambda descriptor, path, alone: nullcontext())


def unit_twice() -> None:
    """The account of a killed run goes on where its checkpoint stood."""
    begin = Account.__init__

    def init(self: Account, ledger: Any, record: Any) -> None:
        begin(self, ledger, record)
        self._next = max(0, self._next - 5)

    Account.__init__ = init  # type: ignore[method-assign]


def at_least() -> None:
    """S2: everybody who asks for the first n units is told yes."""

    def take(self: Account) -> int:
        self._cover(self._next + 1)
        unit = self._next
        os.stat("/")  # somebody else's turn
        for _ in range(200):
            pass
        threading.Event().wait(0.0002)
        self._next = unit + 1
        return unit

    Account.take = take  # type: ignore[method-assign]


def refund() -> None:
    settle = Account.settle

    def less(self: Account) -> None:
        kept, self._next = self._next, max(self._record.owned_from, self._next - 3)
        try:
            settle(self)
        finally:
            self._next = kept

    Account.settle = less  # type: ignore[method-assign]


def stale_cover() -> None:
    """What was freed is still handed out from memory."""

    def give_back(self: Account, kind: str) -> None:
        self._record = self._write(kind, self._next)

    Account._give_back = give_back  # type: ignore[method-assign]


def lost_witness() -> None:
    witness.advance = lambda path, ledger, head: None


def no_heads() -> None:
    ledger_file.LedgerFile._must_hold_heads = lambda self: None  # type: ignore[method-assign]


def forked_goes_on() -> None:
    account._Units._own_process = lambda self: None  # type: ignore[method-assign]
    ledger_file.LedgerFile.own_process = lambda self: None  # type: ignore[method-assign]


def no_cap() -> None:
    rules.Slices.admit = lambda self, balances, record: None  # type: ignore[method-assign]


def any_owner() -> None:
    record_units = Ledger.record_units

    def anybody(self: Ledger, name: str, *, owner: str, kind: str, units: int) -> Any:
        current = self.accounts()
        owner = next(record.owner for record in current if record.name == name)
        return record_units(self, name, owner=owner, kind=kind, units=units)

    Ledger.record_units = anybody  # type: ignore[method-assign]


def replaced_unnoticed() -> None:
    ledger_file.LedgerFile._must_be_writable = lambda self: None  # type: ignore[method-assign]


def made_unasked() -> None:
    opening.must_be_asked_for = lambda path, asked, seen: None
    witness.must_be_new = lambda path: None


def granted_first() -> None:
    """Units are handed out, and written down afterwards."""
    cover = account._Units._cover

    def later(self: Account, units: int) -> None:
        if units > self._covered + 3 or units > self._record.total or self.closed:
            cover(self, units)

    account._Units._cover = later  # type: ignore[method-assign]


def _replace_locks(held: Callable[..., Any]) -> None:
    locks.held = held
    locks.require_working = lambda descriptor, path: None


FAULTS: dict[str, Callable[[], None]] = {
    fault.__name__: fault
    for fault in (
        no_fsync, posix_locks, no_locks, unit_twice, at_least, refund, stale_cover, lost_witness, no_heads,
        forked_goes_on, no_cap, any_owner, replaced_unnoticed, made_unasked, granted_first,
    )
}  # fmt: skip
