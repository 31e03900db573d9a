"""The statement: what is guaranteed, by which accountant, for what was really run, and what is not covered.

It is computed from the facts of a run alone. Its content follows the lists of Ponomareva et al. 2023 (section 5.3.3)
and NIST SP 800-226: unit, adjacency, trust model, parameters and their lower bound, sampling, every access to the data,
constants taken as public, source of the noise, side channels, versions.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hush import accounting
from hush.accounting import Accountant, Bounds, rounded_up
from hush.accounting.approximate_noise import epsilon_of_inexact
from hush.ledger import Ledger
from hush.plan import Plan
from hush.report import words
from hush.report.charges import Access, Answer, accesses, answers


@dataclass(frozen=True)
class Statement:
    """What can be said about a run; `print(statement)` gives the text, `to_dict()` the JSON."""

    cost: Bounds
    """Epsilon of the whole plan, for whoever cannot repeat its randomness."""
    delta: float
    accountant: Accountant
    private: bool
    plan: Plan
    facts: Mapping[str, Any]
    accesses: tuple[Access, ...]
    answers: tuple[Answer, ...]
    ledger: Mapping[str, Any] | None

    @property
    def epsilon(self) -> Bounds:
        """The guarantee: infinite for a run that protects nobody."""
        return self.cost if self.private else Bounds(math.inf, math.inf)

    @property
    def headline(self) -> str:
        """The one sentence to quote."""
        who, size = self.facts["data"]["name"], self.facts["data"]["examples"]
        cost = f"epsilon = {rounded_up(self.cost.upper)} at delta = {rounded_up(self.delta, 6)}"
        if not self.private:
            why = f"NOT PRIVATE, epsilon is infinite: {words.why_not_private(self.facts)}"
            return f"{why} (It would cost {cost}.)" if math.isfinite(self.cost.upper) else why
        return (
            f"This run is differentially private for each of the {size:,} records of {who}, with {cost} "
            f"({words.ADJACENCY_SHORT} adjacency)."
        )

    @property
    def measured(self) -> float | None:
        """The held-out metric of the model that was given back."""
        held_out, chosen = self.facts["held_out"], self.facts["chosen"]
        value = None if held_out is None or chosen is None else chosen[held_out["label"]]
        return None if value is None else float(value)

    @property
    def steps(self) -> int:
        return int(self.facts["run"]["step"])

    def sections(self) -> tuple[tuple[str, tuple[tuple[str, str], ...]], ...]:
        """Titled lists of (label, words): the same for text and page."""
        return (
            ("Guarantee", words.guarantee(self)),
            ("What was run", words.mechanism(self)),
            ("Result", words.outcome(self)),
            ("Ledger", words.ledger(self)),
            ("Versions", tuple(self.facts["versions"].items())),
        )

    @property
    def not_covered(self) -> tuple[str, ...]:
        """What the guarantee does not speak about."""
        return words.not_covered(self)

    @property
    def assumed_public(self) -> tuple[str, ...]:
        """Constants that anybody may know."""
        return words.assumed_public(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        return {
            "headline": self.headline,
            "private": self.private,
            "epsilon": self.epsilon.upper if self.private else None,
            "epsilon_lower": self.epsilon.lower if self.private else None,
            "would_cost": None if self.private or not math.isfinite(self.cost.upper) else self.cost.upper,
            "delta": self.delta,
            "accountant": self.accountant,
            "adjacency": accounting.ADJACENCY,
            "unit": self.facts["about"]["unit"],
            "accountants": [answer.to_dict() for answer in self.answers],
            "accesses": [access.to_dict() for access in self.accesses],
            "not_covered": list(self.not_covered),
            "assumed_public": list(self.assumed_public),
            "sections": {title: dict(rows) for title, rows in self.sections()},
            "ledger": None if self.ledger is None else dict(self.ledger),
            "facts": {
                **self.facts,
                "account": _without_place(self.facts["account"]),
                "run": {**self.facts["run"], "account": _without_place(self.facts["run"].get("account"))},
            },
        }

    def __str__(self) -> str:
        from hush.report.text import text_of

        return text_of(self)


def _without_place(account: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The account with its ledger's name, not the place: a report is given to others."""
    if account is None or account.get("ledger") is None:
        return None if account is None else dict(account)
    return {**account, "ledger": Path(account["ledger"]).name}


def statement_of(facts: Mapping[str, Any], *, ledger: Ledger | None = None) -> Statement:
    """The statement for a run's facts; epsilon is the whole plan's, reserve included, wherever the run ended."""
    plan = Plan.from_dict(facts["run"]["plan"])
    delta = min(1e-5, 0.1 / plan.lots.examples) if plan.budget is None else plan.budget.delta
    accountant = plan.accountant
    return Statement(
        cost=epsilon_of_inexact(
            lambda delta: plan.epsilon(delta=delta), delta=delta, distance=facts.get("distance", 0.0)
        ),
        delta=delta,
        accountant=accountant,
        private=plan.private and facts["seed"] is None and not facts["seeded_parts"],
        plan=plan,
        facts=facts,
        accesses=accesses(plan, facts, delta=delta) if plan.private else (),
        answers=answers(plan, delta=delta, chosen=accountant) if plan.private else (),
        ledger=None if ledger is None else _ledger_facts(ledger, facts, delta),
    )


def _ledger_facts(ledger: Ledger, facts: Mapping[str, Any], delta: float) -> dict[str, Any]:
    total = ledger.spent(delta=delta)
    accounts = {record.name: record for record in ledger.accounts()}
    record = accounts.get(facts["account"]["name"])
    cap = ledger.budget
    return {
        "file": ledger.path.name,
        "own": facts["account"]["own_ledger"],
        "rule": ledger.rule_name,
        "cap": None if cap is None else {"epsilon": cap.epsilon, "delta": cap.delta},
        "account": facts["account"]["name"],
        "units": None if record is None else record.total,
        "units_spent": None if record is None else record.spent,
        "closed": None if record is None else record.closed,
        "accounts": len(accounts),
        "spent": {"epsilon": total.upper, "epsilon_lower": total.lower, "delta": delta},
        "head": ledger.head().to_dict(),
    }
