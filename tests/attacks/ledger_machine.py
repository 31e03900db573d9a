"""A machine that attacks the ledger: real processes, random steps, and a count of its own of what was released.

    python tests/attacks/ledger_machine.py --histories 200 --steps 50 [--seed 0]
    python tests/attacks/ledger_machine.py --faults          breaks the ledger on purpose, and must find each fault

A history is one ledger and up to three processes that open it (by any of its names), open and resume accounts, take
units in loops, threads and forked children, settle, close, read, copy. In between processes are killed in the middle of
their work; the file is copied, moved, linked, replaced by older copies, cut short, and made anew under a mistyped name;
and the power fails, which forgets what was not synced. After each step:

  - no unit was handed out twice, and every unit that was handed out is on record (never below);
  - the accounts do not pass the cap, nor any account its plan (never over);
  - a ledger that is older than what was seen is refused, and a copy holds all that was released before it was made.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.forgetful import Content

from attacks import ledger_worker
from attacks.ledger_worker import CAP, FAULTS, SLICE, UNIT, UNITS
from hush.accounting import epsilon
from hush.ledger import Head, Ledger, LedgerError

SLICES = 3  # as many as the cap holds


class Violation(Exception):
    """The ledger broke its promise."""


class Process:
    """A worker and the pipes to it."""

    def __init__(self, folder: Path, fault: str | None) -> None:
        command, self._commands = os.pipe()
        answers, answer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._commands)
            os.close(answers)
            try:
                ledger_worker.run(folder, command, answer, fault)
            except BaseException as error:
                os.write(answer, json.dumps({"died": f"{type(error).__name__}: {error}"}).encode() + b"\n")
            finally:
                os._exit(0)
        os.close(command)
        os.close(answer)
        self._answers = os.fdopen(answers)
        self.busy = False

    def send(self, *command: Any) -> None:
        os.write(self._commands, json.dumps(command).encode() + b"\n")
        self.busy = True

    def answer(self) -> Any:
        said = json.loads(self._answers.readline())
        self.busy = False
        if isinstance(said, dict) and "died" in said:
            raise Violation(f"a process died: {said['died']}")
        return said

    def end(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._commands)
        self._answers.close()


class History:
    """One ledger, from its making to its end."""

    def __init__(self, folder: Path, chance: random.Random, fault: str | None = None) -> None:
        self.folder, self.chance, self.fault = folder, chance, fault
        self.path = folder / "data.hush"
        self.names = [str(self.path)]  # by which it can be opened
        self.processes: list[Process] = []
        self.disk: dict[int, Content] = {}
        self.journal_read = 0
        self.old: list[Path] = []  # copies
        self.seen = Head(0, "")
        self.opened = 0
        self.log: list[str] = []
        (folder / "released").touch()
        self._start()
        self._ask(self.processes[0], "create", str(self.path))
        self.start()

    def step(self) -> None:
        names, weights = zip(*STEPS.items(), strict=True)
        name = self.chance.choices(names, weights)[0]
        self.log.append(name)
        getattr(self, name)()
        if not self._any_busy() or self.chance.random() < 0.3:
            self.check()

    def end(self) -> None:
        for process in self.processes:
            process.end()
        self.processes = []

    # What is held against the ledger ----------------------------------------------------------------------------

    def check(self) -> None:
        released = self._released()  # before the ledger is read: what was handed out by now must be in it
        twice = [unit for unit, times in Counter(released).items() if times > 1]
        if twice:
            raise Violation(f"handed out more than once: {twice[:3]}")
        with self._opened(self.path, "the ledger cannot be opened") as ledger:
            records = {record.name: record for record in ledger.accounts()}
            for name, unit in released:
                if name not in records or unit >= records[name].spent:
                    raise Violation(f"unit {unit} of {name} was handed out and is not on record")
            if len(records) > SLICES or any(unit >= UNITS for _, unit in released):
                raise Violation(f"{len(records)} accounts, or a unit beyond its plan")
            if self.seen.sequence:
                self._must_include(ledger)
            self.seen = ledger.head()

    def _opened(self, path: Path, otherwise: str, seen: Head | None = None) -> Ledger:
        try:
            return Ledger(path, seen=seen)
        except LedgerError as error:
            raise Violation(f"{otherwise}: {error}") from None

    def _must_include(self, ledger: Ledger) -> None:
        try:
            ledger.must_include(self.seen)
        except LedgerError as error:
            raise Violation(f"an entry that was seen is gone: {error}") from None

    def _must_refuse(self, path: Path, why: str, *, seen: Head | None = None, create: bool = False) -> None:
        process = self._idle()
        if process is not None and seen is None:  # as a run would open it
            answer = self._ask(process, "create" if create else "read", str(path))
            refused = isinstance(answer, dict) and "refused" in answer
        else:
            try:
                Ledger(path, seen=seen, create=create).close()
                refused = False
            except LedgerError:
                refused = True
        if not refused:
            raise Violation(f"accepted {why}")

    def _released(self) -> list[tuple[str, int]]:
        lines = (self.folder / "released").read_text().splitlines()
        return [(name, int(unit)) for name, unit in (line.split() for line in lines)]

    # Steps ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        if len(self.processes) < 3:
            self._start()
            fresh = self.processes[-1]
            self._ask(fresh, "open", str(self.path), "/")
            if self.opened < SLICES:
                self.opened += 1
                self._ask(fresh, "account", 0, f"run{self.opened}")
            else:
                self._ask(fresh, "resume", 0, f"run{self.chance.randint(1, self.opened)}")

    def open(self) -> None:
        name = self.chance.choice(self.names)
        into = self.chance.choice([self.folder, Path("/"), Path(name).parent])
        self._tell("open", os.path.relpath(name, into) if self.chance.random() < 0.5 else name, str(into))

    def account(self) -> None:
        self.opened += 1
        self._tell("account", self._some(), f"run{self.opened}")

    def resume(self) -> None:
        self._tell("resume", self._some(), f"run{self.chance.randint(1, max(1, self.opened))}")

    def take(self) -> None:
        self._tell("take", self._some(), self.chance.randint(1, 9))

    def take_and_leave(self) -> None:
        """A process that goes on while other things happen to it and to the file."""
        process = self._idle()
        if process is not None:
            process.send(self.chance.choice(["take", "take_and_settle"]), self._some(), self.chance.randint(5, 40))

    def take_in_threads(self) -> None:
        self._tell("take_in_threads", self._some(), self.chance.randint(1, 6))

    def settle(self) -> None:
        self._tell("settle", self._some())

    def close_account(self) -> None:
        self._tell("close_account", self._some())

    def close_ledger(self) -> None:
        self._tell("close_ledger", self._some())

    def fork(self) -> None:
        self._tell("fork", self._some(), str(self.path), f"run{self.chance.randint(1, max(1, self.opened))}")

    def read(self) -> None:
        self._tell("read", self.chance.choice(self.names))

    def kill(self) -> None:
        if self.processes:
            time.sleep(self.chance.choice([0, 0, 0.0005, 0.002]))
            self.processes.pop(self._some() % len(self.processes)).end()

    def wait(self) -> None:
        for process in self.processes:
            if process.busy:
                process.answer()

    def copy(self) -> None:
        """Also while a process writes: the copy holds all that was released before it was begun."""
        released, to = self._released(), self.folder / f"copy{len(self.old)}"
        process = self._idle() if self.chance.random() < 0.3 else None
        if process is None:
            shutil.copyfile(self.path, to)
        else:
            self._ask(process, "copy", str(self.path), str(to))
        with self._opened(to, "a copy cannot be opened") as ledger:
            spent = self._balance(ledger)
            if any(unit >= spent.get(name, 0) for name, unit in released):
                raise Violation("a copy forgets what was released before it was made")
        self.old.append(to)

    def move(self) -> None:
        """Runs that have it open are refused from now on; its witness stays behind or comes along."""
        to = self.folder / f"moved{self._some()}"
        if self.chance.random() < 0.5 and Path(f"{self.path}-head").exists():
            os.rename(f"{self.path}-head", f"{to}-head")
        os.rename(self.path, to)
        for name in self.names:
            if os.path.islink(name):
                os.unlink(name)
        for process in [process for process in self.processes if not process.busy and self.chance.random() < 0.5]:
            self._ask(process, "open", str(to), "/")
        others = [name for name in self.names if name != str(self.path) and os.path.exists(name)]
        self.path, self.names = to, [str(to), *others]

    def link(self) -> None:
        name = self.folder / f"link{self._some()}"
        (os.symlink if self.chance.random() < 0.5 else os.link)(self.path, name)
        self.names.append(str(name))

    def restore(self) -> None:
        """An older copy in the ledger's place is refused, by its witness and by whoever has seen more."""
        if not self.old or not self._charged_at_its_path():
            return
        old = self.chance.choice(self.old)
        self._must_refuse(old, "a copy that is older than what was seen", seen=self.seen)
        with self._in_its_place(old):
            self._must_refuse(self.path, "an older copy in the ledger's place")

    def replace(self) -> None:
        """A copy of the same age in its place: a run that has the old file open charges neither behind its back."""
        self.wait()
        if os.stat(self.path).st_nlink > 1:
            return  # by its other name it is still the ledger
        shutil.copyfile(self.path, self.folder / "same")
        with self._in_its_place(self.folder / "same"):
            before = len(self._released())
            for process in self.processes:
                self._ask(process, "take", self._some(), 40)
            spent = self._balance(Ledger(self.path))
            if any(unit >= spent.get(name, 0) for name, unit in self._released()[before:]):
                raise Violation("a unit was handed out that the file in the ledger's place does not know")

    def make_anew(self) -> None:
        """With the ledger gone its witness still says that there was one."""
        if self._charged_at_its_path():
            with self._in_its_place(None):
                self._must_refuse(self.path, "a fresh ledger in place of one that was removed", create=True)
                self.path.unlink(missing_ok=True)

    def mistype(self) -> None:
        wrong = self.folder / "dat.hush"
        self._must_refuse(wrong, "a mistyped name as a new ledger")

    def damage(self) -> None:
        """A file that was cut short or changed is refused, or its balance is that of the sound one."""
        self.wait()
        self.check()  # an entry of a killed process, which nobody has seen, may go; from now on it has been seen
        process, broken = self._idle(), bytearray(self.path.read_bytes())
        if process is None:
            return
        if self.chance.random() < 0.5:
            del broken[self.chance.randrange(len(broken) // 2, len(broken)) :]
        else:
            broken[self.chance.randrange(len(broken))] ^= 1 << self.chance.randrange(8)
        (self.folder / "damaged").write_bytes(broken)
        found = self._ask(process, "balance", str(self.folder / "damaged"))
        if "refused" not in found and found != self._balance(Ledger(self.path)):
            raise Violation("a damaged file is accepted with another balance")

    def power_cut(self) -> None:
        if self.chance.random() < 0.5:  # right after a charge, which nobody has looked at and so made durable
            self._tell("take_and_settle", self._some(), self.chance.randint(1, 5))
        for process in self.processes:
            process.end()
        self.processes = []
        self._read_journal()
        for path in self.folder.iterdir():
            content = self.disk.get(path.stat().st_ino)
            if content is not None and not path.is_symlink():
                if path.name.endswith("-head"):  # one sector, never synced: as it was at some moment
                    left = content.at_some_moment(self.chance)
                else:
                    left = content.after_power_cut(self.chance if self.chance.random() < 0.8 else None)
                content.safe, content.pending = left, []
                path.write_bytes(left)
        self.check()

    # Inside -----------------------------------------------------------------------------------------------------

    def _charged_at_its_path(self) -> bool:
        """An entry more than any copy has, written by a process that opened the ledger where it lies now."""
        self.wait()
        fresh = Process(self.folder, self.fault)
        self._ask(fresh, "open", str(self.path), "/")
        answer = self._ask(fresh, "resume", 0, f"run{self.chance.randint(1, max(1, self.opened))}")
        fresh.end()
        self.check()
        return answer is None

    @contextmanager
    def _in_its_place(self, other: Path | None) -> Iterator[None]:
        aside = self.folder / "aside"
        os.rename(self.path, aside)
        try:
            if other is not None:
                shutil.copyfile(other, self.path)
            yield
        finally:
            os.replace(aside, self.path)

    @staticmethod
    def _balance(ledger: Ledger) -> dict[str, int]:
        with ledger:
            return {record.name: record.spent for record in ledger.accounts()}

    def _read_journal(self) -> None:
        journal = self.folder / "journal"
        with open(journal) as file:
            file.seek(self.journal_read)
            for line in file:
                kind, inode, offset, data = line[:-1].split(" ")
                self.disk.setdefault(int(inode), Content()).note(kind, int(offset), bytes.fromhex(data))
            self.journal_read = file.tell()

    def _start(self) -> None:
        self.processes.append(Process(self.folder, self.fault))

    def _tell(self, *command: Any) -> None:
        process = self._idle()
        if process is not None:
            self._ask(process, *command)

    def _ask(self, process: Process, *command: Any) -> Any:
        process.send(*command)
        return process.answer()

    def _idle(self) -> Process | None:
        idle = [process for process in self.processes if not process.busy]
        return self.chance.choice(idle) if idle else None

    def _any_busy(self) -> bool:
        return any(process.busy for process in self.processes)

    def _some(self) -> int:
        return self.chance.randrange(10**6)


STEPS = {
    "start": 8, "open": 5, "account": 2, "resume": 8, "take": 12, "take_and_leave": 12, "take_in_threads": 3,
    "settle": 5, "close_account": 1, "close_ledger": 1, "fork": 3, "read": 5, "kill": 5, "wait": 4, "copy": 4,
    "move": 2, "link": 1, "restore": 2, "replace": 1, "make_anew": 1, "mistype": 1, "damage": 3, "power_cut": 2,
}  # fmt: skip


def run_history(seed: int, steps: int, fault: str | None = None) -> tuple[int, list[str]]:
    """The units released, and the steps made; Violation where the ledger broke its promise."""
    with tempfile.TemporaryDirectory() as folder:
        history = History(Path(folder), random.Random(seed), fault)
        try:
            with ledger_worker.journal(Path(folder)):  # what the machine itself makes durable, by opening the ledger
                for _ in range(steps):
                    history.step()
                history.wait()
                history.check()
            return len(history._released()), history.log
        except Violation as violation:
            raise Violation(f"history {seed}, step {len(history.log)}: {violation}") from None
        finally:
            history.end()


def find(fault: str, *, histories: int, steps: int) -> str:
    """How the machine notices a fault; Violation where it does not."""
    for seed in range(histories):
        try:
            run_history(seed, steps, fault)
        except Violation as violation:
            return str(violation)
    raise Violation(f"the fault {fault} is not found in {histories} histories of {steps} steps")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--histories", type=int, default=200)
    parser.add_argument("--steps", type=int, default=50, help="of each history")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, help="go on with further histories for this long")
    parser.add_argument("--faults", nargs="*", metavar="FAULT", help="break the ledger: these faults, by default all")
    options = parser.parse_args()
    epsilon(UNIT * UNITS, delta=SLICE.delta)  # loaded and remembered once, for all processes
    assert SLICES * SLICE.epsilon == CAP.epsilon
    if options.faults is not None:
        for fault in options.faults or FAULTS:
            print(f"{fault}: {find(fault, histories=options.histories, steps=options.steps)}"[:160], flush=True)
        return
    began, seed, released, made = time.monotonic(), options.seed, 0, Counter[str]()
    while seed < options.seed + options.histories or time.monotonic() < began + (options.seconds or 0):
        units, log = run_history(seed, options.steps)
        seed, released, made = seed + 1, released + units, made + Counter(log)
        if (seed - options.seed) % 20 == 0:
            print(f"{seed - options.seed} histories, {made.total()} steps, {released} units released", flush=True)
    print(f"histories={seed - options.seed} steps={made.total()} released={released} violations=0")
    print(" ".join(f"{name}={made[name]}" for name in STEPS))


if __name__ == "__main__":
    try:
        main()
    except Violation as violation:
        sys.exit(f"VIOLATION: {violation}")
