"""The books: what the entries of a ledger add up to. Pure bookkeeping; no file, no accountant."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hush.accounting.bounds import Budget
from hush.accounting.events import Event, compose, from_dict
from hush.ledger.chain import EMPTY, Entry, Head, check
from hush.ledger.errors import LedgerDamaged

RULES = ("slices", "renyi", "odometer")


@dataclass(frozen=True)
class Page:
    """One account as the books know it: its fixed plan, and how many units of it are spent."""

    name: str
    budget: Budget | None
    upfront: Event
    units: tuple[tuple[Event, int], ...]
    costs: tuple[tuple[float, ...], ...]  # Renyi cost per order: of upfront, then of one unit of each kind
    data: str | None
    owner: str
    opened_at: str
    spent: int = 0
    closed: bool = False

    @property
    def total(self) -> int:
        return sum(count for _, count in self.units)

    def first(self, units: int) -> tuple[int, ...]:
        """How many of the first `units` units are of each kind, in the plan's order."""
        counts = []
        for _, count in self.units:
            counts.append(min(count, units))
            units -= counts[-1]
        return tuple(counts)

    def event(self, units: int) -> Event:
        """What the account has done to the data once `units` units are used; upfront is always part of it."""
        kinds = [(event, count) for (event, _), count in zip(self.units, self.first(units), strict=True)]
        return compose([(self.upfront, 1), *kinds])


@dataclass
class Books:
    """The fold of a chain. `apply` checks the hash, then the sense, of each entry."""

    head: Head = EMPTY
    rule: str = ""
    cap: Budget | None = None
    salt: bytes = b""
    orders: tuple[float, ...] = ()
    pages: dict[str, Page] = field(default_factory=dict)
    linked: dict[str, int] = field(default_factory=dict)  # fingerprint -> entry that linked it
    refused: dict[int, str] = field(default_factory=dict)  # entry -> fingerprint of data that was not linked

    def copy(self) -> "Books":
        """Books of their own, to try an entry on."""
        return replace(self, pages=dict(self.pages), linked=dict(self.linked), refused=dict(self.refused))

    def apply(self, entry: Entry) -> None:
        check(entry, after=self.head)
        try:
            self._record(entry.sequence, entry.fact)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
            raise LedgerDamaged(
                f"entry {entry.sequence} to make sense",
                f"{type(error).__name__}: {str(error)[:200]}",
                "open the file with the version of hush that wrote it, or restore it from a copy",
            ) from None
        self.head = entry.head

    def _record(self, sequence: int, fact: Mapping[str, Any]) -> None:
        kind = fact["kind"]
        if (kind == "created") != (sequence == 1):
            raise ValueError(f"{kind!r} is not what entry {sequence} can be")
        if kind == "created":
            self._created(fact)
        elif kind == "opened":
            page = _page(fact)
            if page.name in self.pages:
                raise ValueError(f"account {page.name!r} opened twice")
            self.pages[page.name] = page
        elif kind == "resumed":
            self._turn(fact, owner=str(fact["owner"]))
        elif kind == "reserved":
            self._turn(fact, spent=_count(fact, at_least=self.pages[fact["account"]].spent))
        elif kind == "settled":
            self._turn(fact, spent=_count(fact, at_most=self.pages[fact["account"]].spent))
        elif kind == "closed":
            self._turn(fact, spent=_count(fact, at_most=self.pages[fact["account"]].spent), closed=True)
        elif kind == "linked":
            self.linked[str(fact["data"])] = sequence
        elif kind == "refused":
            self.refused[sequence] = str(fact["data"])
        else:
            raise ValueError(f"unknown kind {kind!r}")

    def _created(self, fact: Mapping[str, Any]) -> None:
        if fact["format"] != 1 or fact["rule"] not in RULES:
            raise ValueError(f"format {fact['format']!r} with rule {fact['rule']!r}")
        self.rule, self.cap, self.salt = fact["rule"], _budget(fact["cap"]), bytes.fromhex(fact["salt"])
        self.orders = tuple(float(order) for order in fact["orders"])

    def _turn(self, fact: Mapping[str, Any], **changes: Any) -> None:
        page = self.pages[fact["account"]]
        if page.closed:
            raise ValueError(f"account {page.name!r} used after it was closed")
        changed = replace(page, **changes)
        if not 0 <= changed.spent <= page.total:
            raise ValueError(f"account {page.name!r} holds {page.total} units, {changed.spent} recorded")
        self.pages[page.name] = changed


def _page(fact: Mapping[str, Any]) -> Page:
    units = tuple((from_dict(event), int(count)) for event, count in fact["units"])
    if any(count < 0 for _, count in units):
        raise ValueError("a negative number of units")
    return Page(
        name=str(fact["account"]),
        budget=_budget(fact["budget"]),
        upfront=from_dict(fact["upfront"]),
        units=units,
        costs=tuple(tuple(float(cost) for cost in row) for row in fact["costs"]),
        data=fact["data"],
        owner=str(fact["owner"]),
        opened_at=str(fact["at"]),
    )


def _budget(values: Mapping[str, float] | None) -> Budget | None:
    return None if values is None else Budget(epsilon=values["epsilon"], delta=values["delta"])


def _count(fact: Mapping[str, Any], *, at_least: int = 0, at_most: int | None = None) -> int:
    units = fact["units"]
    if type(units) is not int or units < at_least or (at_most is not None and units > at_most):
        raise ValueError(f"{fact['kind']} {units!r} units against the order of the books")
    return units
