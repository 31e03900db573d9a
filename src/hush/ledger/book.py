"""The ledger of a dataset: one file, many runs, many processes, one cap."""

import os
import secrets
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from hush.accounting.bounds import Bounds, Budget
from hush.accounting.events import NOTHING, Event, to_dict
from hush.ledger import rules, store, witness
from hush.ledger.account import Account
from hush.ledger.books import RULES, Books, Page
from hush.ledger.chain import Entry, Head
from hush.ledger.errors import AccountRefused, BudgetExhausted, DataNotLinked, LedgerMismatch
from hush.ledger.fingerprint import fingerprint


class Ledger:
    """The durable account of a dataset; give the same file to every run on the same data.

    Guarantee: nothing that a run was allowed to release is missing from the file, whatever crashes, and with a cap
    the accounts together never pass it. The rule and the cap are fixed when the file is made; opening it with others
    is refused, and so is a file that was edited, cut short or rolled back behind `seen`.

    >>> import tempfile
    >>> from hush.accounting.events import Gaussian
    >>> path = tempfile.mkdtemp() + "/data.hush"
    >>> with Ledger(path, budget=Budget(epsilon=3.0, delta=1e-5)) as ledger:
    ...     account = ledger.open_account("first", budget=Budget(epsilon=2.0, delta=5e-6), units=[(Gaussian(8.0), 9)])
    ...     account.reserve(1)
    ...     ledger.remaining()
    Budget(epsilon=1.0, delta=5e-06)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        budget: Budget | None = None,
        rule: Literal["slices", "renyi", "odometer"] | None = None,
        seen: Head | None = None,
    ) -> None:
        self.path = Path(path)
        if rule is not None and rule not in RULES:
            raise LedgerMismatch(f"one of the rules {', '.join(RULES)}", repr(rule), "choose one of them")
        if seen is None and not self.path.exists():
            store.create(self.path, _created(rule or "slices", budget))
        self._lock = threading.RLock()
        self._store = store.Store(self.path)
        try:
            _must_match(self._store.books, rule, budget)
            if seen is not None:
                self.must_include(seen)
        except BaseException:
            self._store.close()
            raise
        self.rule = rules.named(self._store.books.rule)

    @property
    def budget(self) -> Budget | None:
        """The cap over all accounts, None where there is none."""
        return self._store.books.cap

    @property
    def rule_name(self) -> str:
        return self._store.books.rule

    def head(self) -> Head:
        """The last entry this object has seen."""
        return self._store.books.head

    def must_include(self, seen: Head) -> None:
        """Refuse a file that is older than, or another than, the one whose head was seen before."""
        with self._lock:
            witness.must_hold(self.path, seen, self.head(), self._store.hash_at, who="a checkpoint or report")

    def open_account(
        self,
        name: str,
        *,
        budget: Budget | None,
        units: Sequence[tuple[Event, int]],
        upfront: Event = NOTHING,
        data: Any = None,
    ) -> Account:
        """Take an account for one fixed plan: `upfront` once, then the units in their order.

        Refused, before anything is computed on the data: a plan that does not fit its slice, an account that would
        pass the cap, a name in use, data that is not the ledger's. `upfront` counts as spent from here on.
        """
        page = Page(name, budget, upfront, tuple(units), (), None, secrets.token_hex(16), _now())
        for _, count in page.units:
            if type(count) is not int or count < 0:
                raise LedgerMismatch("units as (event, whole number >= 0)", repr(count), "give the plan's units")
        with self._lock:
            books = self._store.books
            page = replace(page, costs=self.rule.costs(page, books.orders))
            if data is not None:
                page = replace(page, data=self._admit_data(fingerprint(data, salt=books.salt)))
            self._store.append(lambda books: self._opened(books, page))
            return Account(self, self._store.books.pages[name])

    def resume_account(self, name: str, *, seen: Head | None = None, data: Any = None) -> Account:
        """Take over an account that is still open, after all units on record; `left` says how many remain.

        An account with nothing left is given back all the same: its first `reserve` raises BudgetExhausted. `data`
        that is not the ledger's is refused, as it is for a new account.
        """
        if seen is not None:
            self.must_include(seen)
        with self._lock:
            if data is not None:
                self._admit_data(fingerprint(data, salt=self._store.books.salt))
            owner = secrets.token_hex(16)
            self._store.append(
                lambda books: {"kind": "resumed", "account": _open_page(books, name).name, "owner": owner, "at": _now()}
            )
            return Account(self, self._store.books.pages[name])

    def close_account(self, name: str) -> None:
        """Close an account whose run is gone; all units on record stay spent."""
        with self._lock:
            self._store.append(lambda books: _step("closed", page := _open_page(books, name), page.spent))

    def turn(self, name: str, *, owner: str, kind: str, units: int) -> Page:
        """Record one step of an account for its owner; used by Account."""

        def decide(books: Books) -> Mapping[str, Any]:
            page = _open_page(books, name)
            if page.owner != owner:
                raise AccountRefused(
                    f"account {name!r} to belong to this process",
                    "an account that another process has resumed",
                    "end this run; the other one goes on",
                )
            # A reservation that was interrupted after it became durable is still there, and larger.
            return _step(kind, page, max(units, page.spent) if kind == "reserved" else units)

        with self._lock:
            self._store.append(decide)
            return self._store.books.pages[name]

    def link(self, *, data: Any = None, refusal: int | None = None, reason: str) -> None:
        """Declare that other data (grown, cleaned, converted) is the same people's, and shares this ledger.

        Give the data, or the number that the refusal named.
        """
        with self._lock:
            if data is not None:
                mark = fingerprint(data, salt=self._store.books.salt)
            else:
                refused = self._store.refresh().refused
                if refusal not in refused:
                    known = ", ".join(map(str, refused)) or "none"
                    raise DataNotLinked(f"the number of a refusal (here: {known})", repr(refusal), "give one of them")
                mark = refused[refusal]
            self._store.append(lambda books: {"kind": "linked", "data": mark, "reason": reason, "at": _now()})

    def pages(self) -> list[Page]:
        """The accounts as the books know them now, oldest first."""
        with self._lock:
            return list(self._store.refresh().pages.values())

    def entries(self) -> list[Entry]:
        """Every entry of the chain, for a report or an auditor; fingerprints and the salt are among them."""
        with self._lock:
            return self._store.entries()

    def spent(self, *, delta: float) -> Bounds:
        """Epsilon charged to the whole dataset at the given delta, over all accounts."""
        with self._lock:
            return self.rule.spent(self._store.refresh(), delta)

    def spent_by(self, page: Page, *, delta: float) -> Bounds:
        """Epsilon charged to one account at the given delta."""
        return self.rule.spent_by(self._store.books, page, delta)

    def remaining(self) -> Budget | None:
        """What a new slice may take; None without a cap. Raises BudgetExhausted when nothing is left."""
        with self._lock:
            left = rules.remaining(self._store.refresh())
        if left is None or self.rule_name != "slices":
            return None
        epsilon, delta = (rules.down(value) for value in left)
        if epsilon <= 0 or delta <= 0:
            raise BudgetExhausted("some of the cap to be left", "a cap that is fully taken", "the data is used up")
        return Budget(epsilon=epsilon, delta=delta)

    def close(self) -> None:
        """Close the file; open accounts stay open on record and can be resumed."""
        self._store.close()

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        with suppress(Exception):
            self._store.close()

    def _opened(self, books: Books, page: Page) -> Mapping[str, Any]:
        if page.name in books.pages:
            raise AccountRefused(
                "a new name for a new account",
                f"{page.name!r}, already on record",
                "resume it, or choose another",
            )
        self.rule.admit(books, page)
        return {
            "kind": "opened",
            "account": page.name,
            "at": page.opened_at,
            "budget": _plain(page.budget),
            "upfront": to_dict(page.upfront),
            "units": [[to_dict(event), count] for event, count in page.units],
            "costs": page.costs,
            "data": page.data,
            "owner": page.owner,
        }

    def _admit_data(self, mark: str) -> str:
        """The first data becomes the ledger's; other data is refused until it is linked, and the refusal recorded."""

        def decide(books: Books) -> Mapping[str, Any] | None:
            if mark in books.linked:
                return None
            if not books.linked:
                return {"kind": "linked", "data": mark, "reason": "first data of the ledger", "at": _now()}
            return {"kind": "refused", "data": mark, "at": _now()}

        entry = self._store.append(decide)
        if entry is not None and entry.fact["kind"] == "refused":
            raise DataNotLinked(
                "the data that this ledger keeps account of",
                "other data",
                "use the ledger of that data; if it is the same people's data, grown or changed, link it: "
                f"hush ledger link {self.path} {entry.sequence} --reason WHY",
            )
        return mark


def _created(rule: str, budget: Budget | None) -> Mapping[str, Any]:
    orders = rules.named(rule).orders(budget)
    return {
        "kind": "created",
        "format": 1,
        "rule": rule,
        "cap": _plain(budget),
        "salt": secrets.token_hex(32),
        "orders": orders,
        "at": _now(),
    }


def _must_match(books: Books, rule: str | None, budget: Budget | None) -> None:
    if rule is not None and rule != books.rule:
        raise LedgerMismatch(
            f"the rule {books.rule!r} that the file has fixed", repr(rule), "leave it out, or use another file"
        )
    if budget is not None and budget != books.cap:
        raise LedgerMismatch(
            f"the cap {books.cap} that the file has fixed", str(budget), "leave it out, or use another file"
        )


def _open_page(books: Books, name: str) -> Page:
    page = books.pages.get(name)
    if page is None:
        known = ", ".join(books.pages) or "none"
        raise AccountRefused(f"an account on record ({known})", repr(name), "give one of these names")
    if page.closed:
        raise AccountRefused(f"account {name!r} to be open", "a closed account", "open a new account")
    return page


def _step(kind: str, page: Page, units: int) -> Mapping[str, Any]:
    return {"kind": kind, "account": page.name, "units": units, "at": _now()}


def _plain(budget: Budget | None) -> Mapping[str, float] | None:
    return None if budget is None else {"epsilon": budget.epsilon, "delta": budget.delta}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
