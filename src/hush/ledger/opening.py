"""How a ledger and an account begin: what must be asked for, what must match, what is refused at once."""

import os
import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hush.accounting.bounds import Budget
from hush.accounting.events import Event
from hush.ledger import rules, witness
from hush.ledger.balances import LONGEST_NAME, Balances, require_text
from hush.ledger.chain import Head
from hush.ledger.errors import AccountRefused, LedgerMismatch, LedgerMissing, LedgerUnwritable


def find(path: str | os.PathLike[str]) -> tuple[bool, Path]:
    """Whether there is something at the path, and the place itself: absolute, links resolved."""
    try:
        place = Path(os.path.realpath(path))
        try:
            place.stat()
        except FileNotFoundError:
            return False, place
        return True, place
    except (OSError, ValueError) as error:
        raise LedgerUnwritable(
            f"{path} to be readable", getattr(error, "strerror", None) or str(error), "mend that and try again"
        ) from error


def must_be_asked_for(path: str | os.PathLike[str], asked: bool, seen: Head | None) -> None:
    """A ledger is never made by a mistyped name, in place of one that was seen, or behind a link to nothing.

    Nor under the name that the witness of another one has: whoever removes that would remove a ledger.
    """
    if os.path.islink(path):
        where = os.path.realpath(path)
        raise LedgerMissing(f"a ledger at {path}", f"a link to {where}, which is not there", "mount or restore that")
    if seen is not None:
        raise LedgerMissing(
            f"the ledger that was seen before at {path}", "no file", "put it back; no other has its charges"
        )
    if not asked:
        raise LedgerMissing(
            f"a ledger at {path}",
            "no file",
            "mend the path; or make a new one with Ledger(path, create=True), a budget or a rule (hush ledger open)",
        )
    if os.fspath(path).endswith(witness.ENDING):
        raise LedgerMissing(
            f"a ledger whose name does not end in {witness.ENDING}, as the files beside ledgers do",
            str(path),
            "choose another name",
        )


def must_be_plan(name: str, units: Sequence[tuple[Event, int]], distance: float) -> None:
    try:
        require_text("an account's name", name, LONGEST_NAME)
    except ValueError as error:
        raise AccountRefused("a name that can be shown", str(error), "choose another") from None
    for _, count in units:
        if type(count) is not int or count < 0:
            raise LedgerMismatch("units as (event, whole number >= 0)", repr(count), "give the plan's units")
    if not 0 <= distance < 1:
        raise LedgerMismatch("a distance in total variation, 0 to 1", repr(distance), "give the noise's own")


def created(rule: str, budget: Budget | None) -> Mapping[str, Any]:
    orders = rules.named(rule).orders(budget)
    return {
        "kind": "created",
        "format": 2,
        "rule": rule,
        "cap": plain(budget),
        "salt": secrets.token_hex(32),
        "orders": orders,
        "at": now(),
    }


def must_match(balances: Balances, rule: str | None, budget: Budget | None) -> None:
    if rule is not None and rule != balances.rule:
        raise LedgerMismatch(
            f"the rule {balances.rule!r} that the file has fixed", repr(rule), "leave it out, or use another file"
        )
    if budget is not None and budget != balances.cap:
        raise LedgerMismatch(
            f"the cap {balances.cap} that the file has fixed", str(budget), "leave it out, or use another file"
        )


def plain(budget: Budget | None) -> Mapping[str, float] | None:
    return None if budget is None else {"epsilon": float(budget.epsilon), "delta": float(budget.delta)}


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
