"""The ledger of a dataset: one file, many runs, many processes, one cap."""

import os
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, NoReturn

from hush.accounting.bounds import Bounds, Budget
from hush.accounting.events import NOTHING, Event, to_dict
from hush.ledger import ledger_file, opening, rules, witness
from hush.ledger.account import Account
from hush.ledger.balances import LONGEST_REASON, RULES, AccountRecord, Balances, require_text
from hush.ledger.chain import Entry, Head
from hush.ledger.errors import (
    AccountRefused,
    BudgetExhausted,
    DataNotLinked,
    LedgerMismatch,
)
from hush.ledger.fingerprint import fingerprint


class Ledger:
    """The durable account of a dataset; give the same file to every run on the same data.

    Guarantee: nothing that a run was allowed to release is missing from the file, whatever crashes, and with a cap
    the accounts together never pass it. The rule and the cap are fixed when the file is made; opening it with others
    is refused, and so is a file that was edited, cut short or rolled back behind `seen`.

    A file that is not there is made when that is asked for, by `budget`, `rule` or `create=True`, and is LedgerMissing
    otherwise: a mistyped path is no fresh budget.

    >>> import tempfile
    >>> from hush.accounting.events import Gaussian
    >>> path = tempfile.mkdtemp() + "/data.hush"
    >>> with Ledger(path, budget=Budget(epsilon=3.0, delta=1e-5)) as ledger:
    ...     account = ledger.open_account("first", budget=Budget(epsilon=2.0, delta=5e-6), units=[(Gaussian(8.0), 9)])
    ...     account.take()
    ...     ledger.remaining()
    0
    Budget(epsilon=1.0, delta=5e-06)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        budget: Budget | None = None,
        rule: Literal["slices", "renyi", "odometer"] | None = None,
        create: bool = False,
        seen: Head | None = None,
    ) -> None:
        if rule is not None and rule not in RULES:
            raise LedgerMismatch(f"one of the rules {', '.join(RULES)}", repr(rule), "choose one of them")
        there, self.path = opening.find(path)
        """Where the file was when it was opened: absolute, links resolved."""
        self.created = False
        """Whether this object has made the file."""
        if not there:
            opening.must_be_asked_for(path, create or budget is not None or rule is not None, seen)
            self.created = ledger_file.create(self.path, opening.created(rule or "slices", budget))
        self._lock = threading.RLock()
        self._file = ledger_file.LedgerFile(self.path)
        try:
            opening.must_match(self._file.balances, rule, budget)
            if seen is not None:
                self.must_include(seen)
        except BaseException:
            self._file.close()
            raise
        self._rule = rules.named(self._file.balances.rule)

    @property
    def budget(self) -> Budget | None:
        """The cap over all accounts, None where there is none."""
        return self._file.balances.cap

    @property
    def rule_name(self) -> str:
        return self._file.balances.rule

    def head(self) -> Head:
        """The last entry this object has seen."""
        return self._file.balances.head

    def must_include(self, seen: Head) -> None:
        """Refuse a file that is older than, or another than, the one whose head was seen before."""
        with self._turn() as file:
            file.refresh()
            witness.must_hold(self.path, seen, self.head(), file.hash_at, who="a checkpoint or report")

    def open_account(
        self,
        name: str,
        *,
        budget: Budget | None,
        units: Sequence[tuple[Event, int]],
        upfront: Event = NOTHING,
        data: Any = None,
        distance: float = 0.0,
    ) -> Account:
        """Take an account for one fixed plan: `upfront` once, then the units in their order.

        Refused, before anything is computed on the data: a plan that does not fit its slice, an account that would
        pass the cap, a name in use, data that is not the ledger's. `upfront` counts as spent from here on. `distance`
        is how far all that the plan releases may lie from the law of its events, in total variation.
        """
        opening.must_be_plan(name, units, distance)
        plan, total, owner = tuple(units), sum(count for _, count in units), secrets.token_hex(16)
        record = AccountRecord(name, budget, upfront, plan, (), distance, None, owner, opening.now(), total)
        with self._turn() as file:
            record = record._replace(costs=self._rule.costs(record, file.balances.orders))
            self._must_be_admitted(file.refresh(), record)  # what is refused leaves no trace, its data neither
            if data is not None:
                record = record._replace(data=self._admit_data(data))
            file.append(lambda balances: self._opened(balances, record))
            return Account(self, file.balances.accounts[name], new=True)

    def resume_account(self, name: str, *, seen: Head | None = None, data: Any = None) -> Account:
        """Take over an account that is still open, after all units on record; `left` says how many remain.

        An account with nothing left is given back all the same: its first `take` raises BudgetExhausted. `data`
        that is not the ledger's is refused, as it is for a new account.
        """
        if seen is not None:
            self.must_include(seen)
        with self._turn() as file:
            _open_record(file.refresh(), name)
            if data is not None:
                self._admit_data(data)
            owner = secrets.token_hex(16)
            file.append(
                lambda now: {
                    "kind": "resumed",
                    "account": _open_record(now, name).name,
                    "owner": owner,
                    "at": opening.now(),
                }
            )
            return Account(self, file.balances.accounts[name], new=False)

    def close_account(self, name: str) -> None:
        """Close an account whose run is gone; all units on record stay spent."""
        with self._turn() as file:
            file.append(lambda balances: _step("closed", record := _open_record(balances, name), record.spent))

    def record_units(self, name: str, *, owner: str, kind: str, units: int) -> AccountRecord:
        """Record one step of an account for its owner; used by Account."""

        def decide(balances: Balances) -> Mapping[str, Any]:
            record = _open_record(balances, name)
            if record.owner != owner:
                raise AccountRefused(
                    f"account {name!r} to belong to this process",
                    "an account that another process has resumed",
                    "end this run; the other one goes on",
                )
            # A reservation that was interrupted after it became durable is still there, and larger.
            return _step(kind, record, max(units, record.spent) if kind == "reserved" else units)

        with self._turn() as file:
            file.append(decide)
            return file.balances.accounts[name]

    def link(self, *, data: Any = None, refusal: int | None = None, reason: str) -> None:
        """Declare that other data (grown, cleaned, converted) is the same people's, and shares this ledger.

        Give the data, or the number that the refusal named.
        """
        require_text("a reason", reason, LONGEST_REASON)
        with self._turn() as file:
            if data is not None:
                mark = fingerprint(data, salt=file.balances.salt)
            else:
                refused = file.refresh().refused
                if refusal not in refused:
                    known = ", ".join(map(str, refused)) or "none"
                    raise DataNotLinked(f"the number of a refusal (here: {known})", repr(refusal), "give one of them")
                mark = refused[refusal]
            file.append(lambda balances: {"kind": "linked", "data": mark, "reason": reason, "at": opening.now()})

    def accounts(self) -> list[AccountRecord]:
        """The accounts as they are on record now, oldest first."""
        with self._turn() as file:
            return list(file.refresh().accounts.values())

    def entries(self) -> list[Entry]:
        """Every entry of the chain, for a report or an auditor; fingerprints and the salt are among them."""
        with self._turn() as file:
            return file.entries()

    def spent(self, *, delta: float) -> Bounds:
        """Epsilon charged to the whole dataset at the given delta, over all accounts.

        Choose delta before looking: under "odometer", and under "slices" at a delta smaller than the slices' own, the
        reading holds at every moment at once for a delta that was fixed beforehand.
        """
        with self._turn() as file:
            return self._rule.spent(file.refresh(), delta)

    def spent_by(self, record: AccountRecord, *, delta: float) -> Bounds:
        """Epsilon charged to one account at the given delta."""
        return self._rule.spent_by(self._file.balances, record, delta)

    def remaining(self) -> Budget | None:
        """What a new slice may take; None without a cap. Raises BudgetExhausted when nothing is left."""
        with self._turn() as file:
            left = rules.remaining(file.refresh())
        if left is None or self.rule_name != "slices":
            return None
        epsilon, delta = (rules.down(value) for value in left)
        if epsilon <= 0 or delta <= 0:
            raise BudgetExhausted("some of the cap to be left", "a cap that is fully taken", "the data is used up")
        return Budget(epsilon=epsilon, delta=delta)

    def close(self) -> None:
        """Close the file; open accounts stay open on record and can be resumed."""
        self._file.close()

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(f"an open ledger cannot be copied: open {self.path} again")

    @contextmanager
    def _turn(self) -> Iterator[ledger_file.LedgerFile]:
        self._file.own_process()  # before the lock, which a forked child may never get
        with self._lock:
            yield self._file

    def _must_be_admitted(self, balances: Balances, record: AccountRecord) -> None:
        if record.name in balances.accounts:
            raise AccountRefused(
                "a new name for a new account",
                f"{record.name!r}, already on record",
                "resume it, or choose another",
            )
        self._rule.admit(balances, record)

    def _opened(self, balances: Balances, record: AccountRecord) -> Mapping[str, Any]:
        self._must_be_admitted(balances, record)
        return {
            "kind": "opened",
            "account": record.name,
            "at": record.opened_at,
            "budget": opening.plain(record.budget),
            "upfront": to_dict(record.upfront),
            "units": [[to_dict(event), count] for event, count in record.units],
            "costs": record.costs,
            "distance": record.distance,
            "data": record.data,
            "owner": record.owner,
        }

    def _admit_data(self, data: Any) -> str:
        """The first data becomes the ledger's; other data is refused until it is linked, and the refusal recorded."""
        mark = fingerprint(data, salt=self._file.balances.salt)

        def decide(balances: Balances) -> Mapping[str, Any] | None:
            if mark in balances.linked:
                return None
            if not balances.linked:
                return {"kind": "linked", "data": mark, "reason": "first data of the ledger", "at": opening.now()}
            return {"kind": "refused", "data": mark, "at": opening.now()}

        entry = self._file.append(decide)
        if entry is not None and entry.fact["kind"] == "refused":
            raise DataNotLinked(
                "the data that this ledger keeps account of",
                "other data",
                "use the ledger of that data; if it is the same people's data, grown or changed, link it: "
                f"hush ledger link {self.path} {entry.sequence} --reason WHY",
            )
        return mark


def _open_record(balances: Balances, name: str) -> AccountRecord:
    record = balances.accounts.get(name)
    if record is None:
        known = ", ".join(list(balances.accounts)[-8:]) or "none"
        raise AccountRefused(f"an account on record ({known})", repr(name), "give one of these names")
    if record.closed:
        raise AccountRefused(f"account {name!r} to be open", "a closed account", "open a new account")
    return record


def _step(kind: str, record: AccountRecord, units: int) -> Mapping[str, Any]:
    return {"kind": kind, "account": record.name, "units": units, "at": opening.now()}
