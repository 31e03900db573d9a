"""The account of a run: on the ledger that was given, else on one of the run's own beside its checkpoints."""

import secrets
import sys
import unicodedata
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hush.ledger import Account, Ledger, LedgerMismatch, MemoryAccount
from hush.ledger.charging import ChargeAccount
from hush.ledger.checkpoints import Checkpoint
from hush.ledger.plain import plain
from hush.plan import Plan
from hush.training.run import Run

OWN_LEDGER = "ledger.hush"


@dataclass
class Charged:
    """An account, the ledger behind it (None in memory), and whether that ledger was made for this run alone."""

    account: ChargeAccount
    book: Ledger | None
    own: bool

    def to_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        known = self.account.to_dict() if isinstance(self.account, Account | MemoryAccount) else {}
        where = None if self.book is None else str(self.book.path)
        return {**known, "ledger": where, "own_ledger": self.own}


def open_charged(plan: Plan, run: Run, folder: Path | None, data: Any, *, distance: float) -> Charged:
    """A new account. With a folder there is always a ledger, so that a crash cannot hide what was spent.

    `distance` is how far all that is released may lie from the law of the plan.
    """
    own = run.ledger is None
    if own and folder is None:
        memory = MemoryAccount(units=plan.units, upfront=plan.preprocessing, budget=plan.budget, distance=distance)
        return Charged(memory, None, own)
    book = _book(run, folder, new=True)
    moment = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S}-{secrets.token_hex(4)}"
    name = moment if folder is None else f"{_shown(folder.name)} {moment}".strip()
    if run.seed is not None:
        name += " (seeded, NOT PRIVATE)"
    account = book.open_account(
        name, budget=plan.budget, units=plan.units, upfront=plan.preprocessing, data=data, distance=distance
    )
    return Charged(account, book, own)


def resume_charged(saved: Checkpoint, run: Run, folder: Path, data: Any) -> Charged:
    """The account of a saved run, taken over after all units on record; other data is refused."""
    facts = saved.facts["account"]
    own = run.ledger is None
    if own != facts["own_ledger"]:
        raise LedgerMismatch(
            f"the ledger that the run has charged, {facts['ledger']}",
            "no ledger" if own else "a ledger where the run has one of its own",
            "resume with the same ledger, or without one where there was none",
        )
    if not isinstance(run.ledger, Ledger) and not (place := _place(run, folder)).exists():
        raise LedgerMismatch(
            f"the ledger that the run has charged, {facts['ledger']}", f"{place}, where there is none", "resume with it"
        )
    book = _book(run, folder, new=False)
    if saved.seen is not None:
        book.must_include(saved.seen)
    if saved.facts["ended"] is not None and any(one.name == facts["name"] and one.closed for one in book.accounts()):
        plan = Plan.from_dict(saved.facts["run"]["plan"])  # nothing is left to charge; only the report is written again
        done = MemoryAccount(
            facts["name"],
            units=plan.units,
            upfront=plan.preprocessing,
            budget=plan.budget,
            spent=saved.facts["run"]["charged"],
        )
        return Charged(done, book, own)
    return Charged(book.resume_account(facts["name"], seen=saved.seen, data=data), book, own)


def _shown(folder: str) -> str:
    """A folder's name as the name of an account has to be: whatever a file system allows, in characters that show."""
    return " ".join(unicodedata.normalize("NFC", plain(folder, most=100)).split())


def _book(run: Run, folder: Path | None, *, new: bool) -> Ledger:
    if isinstance(run.ledger, Ledger):
        return run.ledger
    book = Ledger(_place(run, folder), create=new and (run.create_ledger or run.ledger is None))
    if book.created and run.ledger is not None:
        print(f"created the ledger {plain(book.path)}", file=sys.stderr)
    return book


def _place(run: Run, folder: Path | None) -> Path:
    """Where the ledger lies: where it was said to, or in the run's folder."""
    if run.ledger is not None:
        assert not isinstance(run.ledger, Ledger)
        return Path(run.ledger)
    assert folder is not None
    return folder / OWN_LEDGER
