"""What can be said about a run: what was spent, the statement, the report."""

from os import PathLike
from pathlib import Path
from typing import Any

from hush.accounting.bounds import Bounds
from hush.ledger.charging import ChargeAccount, ledger_of
from hush.plan import Plan
from hush.report.about import About
from hush.report.facts import facts_of
from hush.report.statement import Statement, statement_of
from hush.report.write import Report, write_report


class Spoken:
    """The part of `Private` that speaks: nothing here changes a run, but for the notes that its statement keeps."""

    plan: Plan
    notes: list[str]
    seeded_parts: bool
    _course: Any
    _watch: Any

    @property
    def steps_done(self) -> int:
        """Steps of the plan that are behind, abandoned ones included."""
        return int(self._course.step)

    @property
    def account(self) -> ChargeAccount | None:
        """The account that is charged; None for a plan without noise."""
        account: ChargeAccount | None = self._course.account
        return account

    @property
    def protects(self) -> bool:
        """Whether the run protects anybody: a plan with noise, and randomness that nobody can repeat."""
        return self.plan.private and bool(self._course.key.private) and not self.seeded_parts

    def spent(self, *, delta: float) -> Bounds:
        """Epsilon of all that was charged so far, with what float-safe noise adds to delta in the whole plan.

        Infinite for a run that protects nobody. True for a run that was always meant to end here. If it ends early
        because of something seen in the data, its guarantee is `plan.epsilon(delta=delta)`, the whole plan's.
        """
        found: Bounds = self._course.spent(delta) if self.protects else Bounds(float("inf"), float("inf"))
        return found

    def statement(self, about: About | None = None) -> Statement:
        """What can be said about this run, whole plan and all; `about` is what you state beside it."""
        return statement_of(facts_of(self, about), ledger=ledger_of(self._course.account))

    def report(self, folder: str | PathLike[str], about: About | None = None) -> Report:
        """The statement as report.txt, report.json and report.html in a folder."""
        return write_report(Path(folder), self.statement(about))

    def explain(self) -> str:
        """How the gradient of each trainable parameter is found, and what was checked of losses_of."""
        return str(self._watch.explain())

    def note(self, sentence: str) -> None:
        """Have the statement say this; it stays through every resume."""
        if sentence not in self.notes:
            self.notes.append(sentence)
