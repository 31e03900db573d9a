"""One run's account: units are reserved durably before they are used, and settled at checkpoints."""

import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hush import accounting
from hush.accounting.bounds import Bounds, Budget
from hush.accounting.events import NOTHING, Event
from hush.ledger.books import Page
from hush.ledger.chain import Head
from hush.ledger.errors import AccountRefused, BudgetExhausted

if TYPE_CHECKING:
    from hush.ledger.book import Ledger

_LEAST_BLOCK = 16  # for plans so short that a share of them would be less
_COST_SHARE = 0.004  # of the time between two reservations may go into writing them: below 1 % with room to spare


class Account:
    """A fixed plan on a ledger, unit by unit; made by `Ledger.open_account` and `Ledger.resume_account`.

    After `reserve(n)` returns, the first n units are durably on record as spent. Blocks are recorded ahead, so a crash
    can only leave more on record than was used. One process owns an account: whoever resumes it takes it over, and
    the earlier owner is refused at its next block.
    """

    def __init__(self, ledger: "Ledger", page: Page) -> None:
        self.name = page.name
        self._ledger = ledger
        self._page = page
        self._owner = page.owner
        self._pid = os.getpid()
        self._used = page.spent  # units this process may have used; what came before it is used as well
        self._covered = page.spent  # units that `reserve` may grant from memory
        self._blocks = _Blocks(page.total)

    @property
    def total(self) -> int:
        """Units in the plan."""
        return self._page.total

    @property
    def reserved(self) -> int:
        """Units on record as spent. A resumed run goes on after them."""
        return self._page.spent

    @property
    def left(self) -> int:
        """Units that were never reserved."""
        return self._page.total - self._page.spent

    @property
    def closed(self) -> bool:
        return self._page.closed

    def reserve(self, units: int) -> None:
        """Return once the first `units` units are durably recorded as spent.

        Raises BudgetExhausted, and records nothing, when the plan has fewer units. Costs a comparison when an earlier
        block covers the units already.
        """
        if units <= self._covered and os.getpid() == self._pid:
            if units > self._used:
                self._used = units
            return
        _whole(units)
        if units > self._page.total:
            raise BudgetExhausted(
                f"at most {self._page.total} units from account {self.name!r}",
                f"a request for {units}",
                "the run ends here: its budget is used up",
            )
        target = min(self._page.total, units + self._blocks.ahead())
        began = time.perf_counter()
        self._turn("reserved", max(target, units))
        self._blocks.wrote(units, time.perf_counter() - began)
        self._used = max(self._used, units)

    def settle(self, units: int) -> None:
        """Say that exactly the first `units` units were used; what was reserved ahead of them is free again.

        Call it at checkpoints, before the checkpoint is written. Fewer units than this process has asked for, or than
        an earlier process left on record, are refused: they may have been used.
        """
        self._must_cover(units)
        if units != self._page.spent:
            self._turn("settled", units)

    def close(self, units: int | None = None) -> None:
        """End the account at the units used (by default all that this process asked for); idempotent."""
        if self._page.closed:
            return
        units = self._used if units is None else units
        self._must_cover(units)
        self._turn("closed", units)

    def spent(self, *, delta: float) -> Bounds:
        """Epsilon charged to this account at the given delta.

        Under the rule "slices" that is the whole plan from the beginning (a run that stops early for a reason it saw
        in the data has paid for all of it); under the other rules, upfront and the units on record.
        """
        return self._ledger.spent_by(self._page, delta=delta)

    def so_far(self, *, delta: float) -> Bounds:
        """Epsilon of the units asked for so far: a true statement if the run was always meant to end here."""
        return accounting.epsilon(self._page.event(self._used), delta=delta)

    def head(self) -> Head:
        """The head of the ledger as this account last saw it; put it into checkpoints and reports."""
        return self._ledger.head()

    def to_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: the name, the ledger, and the head that has been seen."""
        return {"name": self.name, "ledger": str(self._ledger.path), "seen": self.head().to_dict()}

    def _must_cover(self, units: int) -> None:
        _whole(units)
        if not self._used <= units <= self._page.spent:
            raise AccountRefused(
                f"between {self._used} (asked for) and {self._page.spent} (reserved) units of account {self.name!r}",
                str(units),
                "settle what was really used",
            )

    def _turn(self, kind: str, units: int) -> None:
        self._page = self._ledger.turn(self.name, owner=self._owner, kind=kind, units=units)
        self._covered = -1 if self._page.closed else self._page.spent


class MemoryAccount:
    """The same account without a file, for a run that nobody charges: a crash forgets it.

    >>> from hush.accounting.events import Gaussian
    >>> account = MemoryAccount(units=[(Gaussian(4.0), 3)])
    >>> account.reserve(2)
    >>> account.reserved, account.left
    (2, 1)
    """

    def __init__(
        self,
        name: str = "memory",
        *,
        budget: Budget | None = None,
        upfront: Event = NOTHING,
        units: Sequence[tuple[Event, int]],
        spent: int = 0,
    ) -> None:
        self.name = name
        self.closed = False
        self._page = Page(name, budget, upfront, tuple(units), (), None, "", "", spent)
        self.total = self._page.total
        self._used = spent

    @property
    def reserved(self) -> int:
        return self._used

    @property
    def left(self) -> int:
        return self.total - self._used

    def reserve(self, units: int) -> None:
        """Count the first `units` units as used; BudgetExhausted when the plan has fewer."""
        if units > self.total or self.closed:
            raise BudgetExhausted(
                f"at most {self.total} units from an open account", f"a request for {units}", "the run ends here"
            )
        _whole(units)
        self._used = max(self._used, units)

    def settle(self, units: int) -> None:
        _whole(units)
        if units != self._used:
            raise AccountRefused(f"{self._used} units, as asked for", str(units), "settle what was really used")

    def close(self, units: int | None = None) -> None:
        self.settle(self._used if units is None else units)
        self.closed = True

    def spent(self, *, delta: float) -> Bounds:
        """Epsilon of the whole plan, as for an account on slices."""
        return accounting.epsilon(self._page.event(self._page.total), delta=delta)

    def so_far(self, *, delta: float) -> Bounds:
        """Epsilon of the units asked for so far: a true statement if the run was always meant to end here."""
        return accounting.epsilon(self._page.event(self._used), delta=delta)

    def head(self) -> None:
        """There is no ledger to have seen."""
        return None

    def to_dict(self) -> Mapping[str, Any]:
        return {"name": self.name, "ledger": None, "seen": None, "spent": self._used}


class _Blocks:
    """How many units to reserve ahead: few, to lose little in a crash; enough to cost well below 1 % of a step."""

    def __init__(self, total: int) -> None:
        self._most = max(_LEAST_BLOCK, total // 20)  # a crash loses at most 5 % of the plan
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


def _whole(units: int) -> None:
    if isinstance(units, bool) or not isinstance(units, int) or units < 0:
        raise ValueError(f"units are a whole number >= 0, got {units!r}")
