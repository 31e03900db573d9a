"""The balances: what the entries of a ledger add up to. Pure bookkeeping; no file."""

import math
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from hush import accounting
from hush.accounting.approximate_noise import epsilon_of_inexact
from hush.accounting.bounds import Bounds, Budget
from hush.accounting.events import Event, compose, from_dict
from hush.ledger.chain import EMPTY, Head, is_digest

RULES = ("slices", "renyi", "odometer")
LONGEST_NAME, LONGEST_REASON = 200, 1000


class AccountRecord(NamedTuple):
    """One account as it is on record: its fixed plan, and how many units of it are spent."""

    name: str
    budget: Budget | None
    upfront: Event
    units: tuple[tuple[Event, int], ...]
    costs: tuple[tuple[float, ...], ...]  # Renyi cost per order: of upfront, then of one unit of each kind
    distance: float  # in total variation, between all that the plan releases and the law that is accounted
    data: str | None
    owner: str
    opened_at: str
    total: int  # units in the plan
    spent: int = 0
    owned_from: int = 0  # units before this one belong to earlier owners, and are never free again
    closed: bool = False

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

    def epsilon(self, units: int, *, delta: float) -> Bounds:
        """Epsilon of upfront and the first `units` units, with what the distance of the whole plan adds to delta."""
        event = self.event(units)
        return epsilon_of_inexact(
            lambda delta: accounting.epsilon(event, delta=delta), delta=delta, distance=self.distance
        )


@dataclass
class Balances:
    """What a chain adds up to. `judge` refuses a fact that makes no sense, and changes nothing."""

    head: Head = EMPTY
    rule: str = ""
    cap: Budget | None = None
    salt: bytes = b""
    orders: tuple[float, ...] = ()
    accounts: dict[str, AccountRecord] = field(default_factory=dict)
    linked: dict[str, int] = field(default_factory=dict)  # fingerprint -> entry that linked it
    refused: dict[int, str] = field(default_factory=dict)  # entry -> fingerprint of data that was not linked

    def judge(self, fact: Mapping[str, Any]) -> Callable[[], None]:
        """What the fact, as the next entry, changes: to be called once it is durable. ValueError and its like if not.

        Nothing is changed before all of the fact is understood, so that no half of an entry is ever in the balances.
        """
        kind, sequence = fact["kind"], self.head.sequence + 1
        if (kind == "created") != (sequence == 1):
            raise ValueError(f"{kind!r} is not what entry {sequence} can be")
        if kind in ("reserved", "settled", "closed"):
            return self._set(self._moved(kind, fact))
        if kind == "resumed":
            record = self._open(fact)
            return self._set(record._replace(owner=_owner(fact), owned_from=record.spent))
        if kind == "opened":
            return self._set(self._opened(fact))
        if kind == "created":
            return self._created(fact)
        if kind == "linked":
            mark, _ = _digest(fact, "data"), require_text("a reason", fact["reason"], LONGEST_REASON)
            return lambda: self.linked.update({mark: sequence})
        if kind == "refused":
            mark = _digest(fact, "data")
            return lambda: self.refused.update({sequence: mark})
        raise ValueError(f"unknown kind {kind!r}")

    def _set(self, record: AccountRecord) -> Callable[[], None]:
        return lambda: self.accounts.__setitem__(record.name, record)

    def _moved(self, kind: str, fact: Mapping[str, Any]) -> AccountRecord:
        """An account with more units on record, or, for the owner of the last ones, with fewer."""
        record, units = self._open(fact), fact["units"]
        if kind == "reserved":
            least, most = record.spent, record.total
        else:
            least, most = record.owned_from, record.spent
        if type(units) is not int or not least <= units <= most:
            raise ValueError(f"{kind} {units!r} units of account {record.name!r}, which can be {least} to {most}")
        return record._replace(spent=units, closed=kind == "closed")

    def _open(self, fact: Mapping[str, Any]) -> AccountRecord:
        record = self.accounts[fact["account"]]
        if record.closed:
            raise ValueError(f"account {record.name!r} used after it was closed")
        return record

    def _opened(self, fact: Mapping[str, Any]) -> AccountRecord:
        name = require_text("an account's name", fact["account"], LONGEST_NAME)
        if name in self.accounts:
            raise ValueError(f"account {name!r} opened twice")
        datetime.fromisoformat(fact["at"])
        units = tuple((from_dict(event), count) for event, count in fact["units"])
        if any(type(count) is not int or count < 0 for _, count in units):
            raise ValueError("a number of units that is no whole number >= 0")
        distance, costs = float(fact["distance"]), tuple(tuple(map(float, row)) for row in fact["costs"])
        if not 0 <= distance < 1 or not all(0 <= cost < math.inf for row in costs for cost in row):
            raise ValueError("a distance or a cost out of its range")
        return AccountRecord(
            name=name,
            budget=_budget(fact["budget"]),
            upfront=from_dict(fact["upfront"]),
            units=units,
            costs=costs,
            distance=distance,
            data=None if fact["data"] is None else _digest(fact, "data"),
            owner=_owner(fact),
            opened_at=fact["at"],
            total=sum(count for _, count in units),
        )

    def _created(self, fact: Mapping[str, Any]) -> Callable[[], None]:
        if fact["format"] != 2 or fact["rule"] not in RULES:
            raise ValueError(f"format {fact['format']!r} with rule {fact['rule']!r}")
        new = {
            "rule": fact["rule"],
            "cap": _budget(fact["cap"]),
            "salt": bytes.fromhex(_digest(fact, "salt")),
            "orders": tuple(float(order) for order in fact["orders"]),
        }
        return lambda: self.__dict__.update(new)


def require_text(what: str, value: Any, most: int) -> str:
    """The value, if it can be shown to a person: 1 to `most` printable characters in normal form (NFC).

    Control characters and marks of direction could make a terminal show another balance; two forms of one letter
    could make two accounts look like one.
    """
    if not isinstance(value, str) or not 1 <= len(value) <= most:
        raise ValueError(f"{what} has 1 to {most} characters, got {_short(value)}")
    if not value.isprintable() or value != unicodedata.normalize("NFC", value) or value != value.strip():
        raise ValueError(
            f"{what} has printable characters in normal form (NFC) and no blanks at its ends, got {_short(value)}"
        )
    return value


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _budget(values: Mapping[str, float] | None) -> Budget | None:
    return None if values is None else Budget(epsilon=values["epsilon"], delta=values["delta"])


def _digest(fact: Mapping[str, Any], key: str) -> str:
    value = fact[key]
    if not is_digest(value):
        raise ValueError(f"{key} is no hash")
    return str(value)


def _owner(fact: Mapping[str, Any]) -> str:
    owner = fact["owner"]
    if not isinstance(owner, str) or len(owner) != 32 or owner.strip("0123456789abcdef"):
        raise ValueError("an owner that is no token")
    return owner
