"""Where the budget went: each access to the data with its share, and the answers of all accountants side by side."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hush import accounting
from hush.accounting import (
    NOT_VALID,
    NOTHING,
    Accountant,
    Allocated,
    Event,
    Gaussian,
    PoissonSampled,
    Shuffled,
    parts_of,
    renyi,
)
from hush.plan import Plan

ACCOUNTANT_NAMES: dict[Accountant, str] = {
    "pld": "Privacy loss distribution",
    "renyi": "Renyi, tight conversion",
    "moments": "Moments accountant (the paper's)",
    "strong": "Strong composition",
    "strong-paper": "Strong composition as the paper has it",
}


@dataclass(frozen=True)
class Access:
    """One kind of access to the data: what it was, how often, and its share of the cost.

    Shares are of the Renyi divergence at the order that decides epsilon: there, and only there, costs simply add up.
    """

    name: str
    mechanism: str
    times: int
    share: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Answer:
    """Epsilon of the whole plan by one accountant; `epsilon` is None where it has no answer, `why` says so."""

    accountant: Accountant
    epsilon: float | None
    lower: float | None
    valid: bool
    chosen: bool
    why: str = ""

    @property
    def name(self) -> str:
        return ACCOUNTANT_NAMES[self.accountant]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def accesses(plan: Plan, facts: Mapping[str, Any], *, delta: float) -> tuple[Access, ...]:
    """Preprocessing, training, and reserve, each with its share; they sum to one."""
    done = max(int(facts["run"].get("charged", 0)), 0)
    total = sum(count for _, count in plan.units)
    parts: list[tuple[str, Event, int]] = []
    if plan.preprocessing != NOTHING:
        name = facts["preprocessing"]["name"] or "before this run"
        parts += [(name, event, count) for event, count in parts_of(plan.preprocessing)]
    left = done
    for event, count in plan.units:
        used = min(count, left)
        left -= used
        if used:
            parts.append((_training(plan), event, used))
        if count - used:
            parts.append((_unused(done, total), event, count - used))
    order = renyi.best_order(plan.event, delta=delta)
    order = order if math.isfinite(order) and order > 1 else 2.0
    costs = [count * renyi.divergence(event, order) for _, event, count in parts]
    whole = math.fsum(costs)
    shares = [cost / whole if whole > 0 else 0.0 for cost in costs]
    return tuple(
        Access(name, mechanism(event), count, share) for (name, event, count), share in zip(parts, shares, strict=True)
    )


def answers(plan: Plan, *, delta: float, chosen: Accountant) -> tuple[Answer, ...]:
    """The same plan put to every accountant."""
    found = []
    for name in ACCOUNTANT_NAMES:
        why = f"not a valid bound: {NOT_VALID[name]}" if name in NOT_VALID else ""
        try:
            bounds = accounting.epsilon(plan.event, delta=delta, accountant=name)
        except ValueError as refusal:
            found.append(Answer(name, None, None, False, name == chosen, str(refusal)))
            continue
        if not math.isfinite(bounds.upper):
            found.append(Answer(name, None, None, False, name == chosen, "no finite answer"))
            continue
        found.append(Answer(name, bounds.upper, bounds.lower, name not in NOT_VALID, name == chosen, why))
    return tuple(found)


def mechanism(event: Event) -> str:
    """An event in words.

    >>> mechanism(PoissonSampled(0.01, Gaussian(1.5)))
    'Gaussian noise, multiplier 1.5, on a Poisson sample of rate 0.01'
    """
    match event:
        case Gaussian(noise):
            return f"Gaussian noise, multiplier {noise:.4g}"
        case PoissonSampled(rate, Gaussian(noise)):
            return f"Gaussian noise, multiplier {noise:.4g}, on a Poisson sample of rate {rate:.4g}"
        case Allocated(steps, Gaussian(noise)):
            return f"an epoch of {steps} lots, each record in one of them at random, noise multiplier {noise:.4g}"
        case Shuffled(steps, Gaussian(noise)):
            return f"an epoch of {steps} lots from a permutation, no amplification, noise multiplier {noise:.4g}"
    return str(event)


def _training(plan: Plan) -> str:
    counted = " with their counts below the bound" if type(plan.clip).__name__ == "QuantileClip" else ""
    unit = "lots" if plan.lots.steps_per_unit == 1 else "epochs of lots"
    return f"Training: clipped sums of {unit}{counted}"


def _unused(done: int, total: int) -> str:
    return f"Not used, but part of the guarantee ({total - done} of {total} units)"
