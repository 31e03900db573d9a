"""One run's account: each unit is durably on record before it is handed out, and is handed out once."""

import itertools
import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, Protocol

from hush.accounting.bounds import Bounds, Budget
from hush.accounting.events import NOTHING, Event
from hush.ledger.balances import AccountRecord
from hush.ledger.chain import Head
from hush.ledger.errors import AccountRefused, BudgetExhausted, LedgerError, LedgerMismatch

_LEAST_BLOCK = 16  # for plans so short that a share of them would be less
_COST_SHARE = 0.004  # of the time between two reservations may go into writing them: below 1 % with room to spare


class Book(Protocol):
    """What an account needs of its ledger."""

    def record_units(self, name: str, *, owner: str, kind: str, units: int) -> AccountRecord: ...
    def spent_by(self, record: AccountRecord, *, delta: float) -> Bounds: ...
    def head(self) -> Head: ...
    @property
    def path(self) -> os.PathLike[str]: ...


class _Units:
    """Units with numbers, each given to one caller in one process; abstract.

    Threads take turns. A forked child is refused: its memory says that the parent's next units are free. Copies are
    refused for the same reason.
    """

    def __init__(self, record: AccountRecord, *, new: bool) -> None:
        self.name = record.name
        self._upfront_is_due = new
        self._record = record
        self._next = record.spent  # all units before it were handed out, or lost with an earlier process
        self._covered = record.spent  # on record, whatever has happened since: may be handed out from memory
        self._lock = threading.Lock()
        self._pid = os.getpid()

    @property
    def total(self) -> int:
        """Units in the plan."""
        return self._record.total

    @property
    def taken(self) -> int:
        """The number of the next unit: all before it were handed out, here or in an earlier process, or are lost."""
        return self._next

    @property
    def left(self) -> int:
        """Units that can still be taken."""
        return 0 if self.closed else self._record.total - self._next

    @property
    def reserved(self) -> int:
        """Units on record as spent: those taken, and a block ahead of them."""
        return self._record.spent

    @property
    def distance(self) -> float:
        """How far all that the plan releases may lie from the law of its events, in total variation."""
        return self._record.distance

    @property
    def closed(self) -> bool:
        return self._record.closed

    def take(self) -> int:
        """The number (0, 1, ...) of a unit of the plan that is on record as spent and that nobody else is given.

        Raises BudgetExhausted, and records nothing, when the plan has no more units.
        """
        self._own_process()
        with self._lock:
            self._cover(self._next + 1)
            unit = self._next
            self._next = unit + 1  # an interrupt from here on loses the unit: it is spent, and nobody gets it
            return unit

    def take_upfront(self) -> None:
        """Use up the upfront access, which a new account pays for once; refused in one that was resumed."""
        self._own_process()
        with self._lock:
            if not self._upfront_is_due:
                raise AccountRefused(
                    f"a new account for the preprocessing, of which account {self.name!r} has paid for one",
                    "an account whose preprocessing was done before, or may have been",
                    "go on with what was saved of it (Private.resume), or open another account",
                )
            self._upfront_is_due = False

    def must_cover(self, upfront: Event, units: Sequence[tuple[Event, int]]) -> None:
        """Refuse another plan than the account was opened for: what that releases was never charged."""
        if (upfront, _in_runs(units)) != (self._record.upfront, _in_runs(self._record.units)):
            raise LedgerMismatch(
                f"the plan that account {self.name!r} was opened for ({self.total} units)",
                f"another plan ({sum(count for _, count in units)} units)",
                "follow that plan, or open an account for this one: units=plan.units, upfront=plan.preprocessing",
            )

    def spend_up_to(self, units: int) -> None:
        """Count the first `units` units as spent and handed out: an earlier run has used them."""
        self._own_process()
        if isinstance(units, bool) or not isinstance(units, int) or units < 0:
            raise ValueError(f"units are a whole number >= 0, got {units!r}")
        with self._lock:
            if units > self._next:
                self._cover(units)
                self._next = units

    def so_far(self, *, delta: float) -> Bounds:
        """Epsilon of the units handed out so far: a true statement if the run was always meant to end here."""
        return self._record.epsilon(self._next, delta=delta)

    def _cover(self, units: int) -> None:
        """Return once the first `units` units are on record."""
        if self.closed:
            raise AccountRefused(f"account {self.name!r} to be open", "a closed account", "open a new account")
        if units > self._record.total:
            raise BudgetExhausted(
                f"at most {self._record.total} units from account {self.name!r}",
                f"a request for {units}",
                "the run ends here: its budget is used up",
            )
        if units > self._covered:
            self._record = self._reserve(units)
            self._covered = self._record.spent

    def _reserve(self, units: int) -> AccountRecord:
        raise NotImplementedError

    def _own_process(self) -> None:
        if os.getpid() != self._pid:
            raise LedgerError(
                f"the process that opened account {self.name!r}",
                "a forked copy of it",
                "open an account of its own in the new process",
            )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(f"an account cannot be copied: account {self.name!r} would hand out a unit twice")


class Account(_Units):
    """A fixed plan on a ledger, unit by unit; made by `Ledger.open_account` and `Ledger.resume_account`.

    Guarantee: `take` gives each unit to one caller, after the unit is durably on record as spent. Blocks of units are
    recorded ahead, so a crash can only leave more on record than was used. One `Account` owns an account at a time:
    whoever resumes it takes it over after all units on record, and the earlier owner is refused at its next block.
    """

    def __init__(self, ledger: Book, record: AccountRecord, *, new: bool) -> None:
        super().__init__(record, new=new)
        self._ledger = ledger
        self._owner = record.owner
        self._blocks = _Blocks(record.total)

    def settle(self) -> None:
        """Free what was reserved ahead and never handed out; call it before a checkpoint is written."""
        self._own_process()
        with self._lock:
            if self._next != self._record.spent:
                self._give_back("settled")

    def close(self) -> None:
        """End the account at the units handed out; idempotent."""
        self._own_process()
        with self._lock:
            if not self._record.closed:
                self._give_back("closed")

    def spent(self, *, delta: float) -> Bounds:
        """Epsilon charged to this account at the given delta.

        Under the rule "slices" that is the whole plan from the beginning (a run that stops early for a reason it saw
        in the data has paid for all of it); under the other rules, upfront and the units on record.
        """
        return self._ledger.spent_by(self._record, delta=delta)

    def head(self) -> Head:
        """The head of the ledger as this account last saw it; put it into checkpoints and reports."""
        return self._ledger.head()

    def to_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: the name, the ledger, and the head that has been seen."""
        return {"name": self.name, "ledger": str(self._ledger.path), "seen": self.head().to_dict()}

    def _reserve(self, units: int) -> AccountRecord:
        began = time.perf_counter()
        record = self._write("reserved", min(self._record.total, units + self._blocks.ahead()))
        self._blocks.wrote(units, time.perf_counter() - began)
        return record

    def _give_back(self, kind: str) -> None:
        self._covered = self._next  # first: an interrupt after the write must not leave a freed unit to be handed out
        self._record = self._write(kind, self._next)

    def _write(self, kind: str, units: int) -> AccountRecord:
        return self._ledger.record_units(self.name, owner=self._owner, kind=kind, units=units)


class MemoryAccount(_Units):
    """The same account without a file, for a run that nobody charges: a crash forgets it.

    >>> from hush.accounting.events import Gaussian
    >>> account = MemoryAccount(units=[(Gaussian(4.0), 3)])
    >>> account.take(), account.take(), account.left
    (0, 1, 1)
    """

    def __init__(
        self,
        name: str = "memory",
        *,
        budget: Budget | None = None,
        upfront: Event = NOTHING,
        units: Sequence[tuple[Event, int]],
        spent: int = 0,
        distance: float = 0.0,
    ) -> None:
        plan, total = tuple(units), sum(count for _, count in units)
        record = AccountRecord(name, budget, upfront, plan, (), distance, None, "", "", total, spent)
        super().__init__(record, new=spent == 0)

    def settle(self) -> None:
        """Nothing is reserved ahead."""

    def close(self) -> None:
        """End the account; idempotent."""
        self._own_process()
        with self._lock:
            self._record = self._record._replace(closed=True)

    def spent(self, *, delta: float) -> Bounds:
        """Epsilon of the whole plan, as for an account on slices."""
        return self._record.epsilon(self._record.total, delta=delta)

    def head(self) -> None:
        """There is no ledger to have seen."""
        return None

    def to_dict(self) -> Mapping[str, Any]:
        return {"name": self.name, "ledger": None, "seen": None, "spent": self._next}

    def _reserve(self, units: int) -> AccountRecord:
        return self._record._replace(spent=units)


def _in_runs(units: Sequence[tuple[Event, int]]) -> list[tuple[Event, int]]:
    """The same units in their order, equal neighbours together."""
    used = [unit for unit in units if unit[1]]
    return [(event, sum(count for _, count in same)) for event, same in itertools.groupby(used, key=lambda u: u[0])]


class _Blocks:
    """How many units to reserve ahead: few, to lose little in a crash; enough to cost well below 1 % of a step."""

    def __init__(self, total: int) -> None:
        # A crash loses at most 5 % of a plan; of a short one up to 100 units, which fast steps make again in a second.
        self._most = max(_LEAST_BLOCK, total // 20, min(100, total // 10))
        self._block = max(_LEAST_BLOCK, total // 64)
        self._last: tuple[int, float] | None = None
        self._seconds = 0.0

    def ahead(self) -> int:
        return self._block - 1

    def wrote(self, units: int, seconds: float) -> None:
        """Learn from one reservation: at which unit it was needed, and how long the disk took."""
        now = time.perf_counter()
        # A disk is slow now and then; the slow writes of late make up the cost, and blocks follow them.
        self._seconds = max(seconds, 0.8 * self._seconds)
        if self._last is not None and units > self._last[0]:
            per_unit = max((now - self._last[1] - seconds) / (units - self._last[0]), 1e-9)
            wanted = math.ceil(self._seconds / (_COST_SHARE * per_unit))
            self._block = max(1, self._block // 2, min(self._most, 4 * self._block, wanted))
        self._last = (units, now)
