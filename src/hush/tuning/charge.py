"""How much noise the trials of a tuning need, what the whole costs, and its one charge on the ledger."""

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike

from hush import accounting
from hush.accounting import Budget, Event, Selected, Trials, calibrate, compose, either
from hush.ledger import Ledger
from hush.tuning.trial import Trial


@dataclass(frozen=True)
class Priced:
    """The noise multiplier of each setting, and the event of the whole tuning."""

    noise: tuple[float, ...]
    event: Event
    epsilon: float


def event_of(trials: Sequence[Event], law: Trials | None) -> Event:
    """The whole tuning: a random setting run a random number of times, or, without a law, every setting paid for."""
    if law is None:
        return compose((event, 1) for event in trials)
    return Selected(either(trials), law.rule, law.mean, law.shape)


def price(trials: Sequence[Trial], law: Trials | None, budget: Budget) -> Priced:
    """The least noise, the same Renyi epsilon for every setting, with which the whole tuning keeps the budget.

    Guarantee: the returned event was itself put to the accountant and costs at most the budget.
    """

    def at(share: float) -> Priced:
        each = Budget(epsilon=budget.epsilon * share, delta=budget.delta)
        found: dict[Event, float] = {}  # settings that differ in nothing that costs share their noise
        for trial in trials:
            if trial.event(1.0) not in found:
                found[trial.event(1.0)] = calibrate.noise(trial.event, each, accountant="renyi")
        noise = tuple(found[trial.event(1.0)] for trial in trials)
        event = event_of([trial.event(one) for trial, one in zip(trials, noise, strict=True)], law)
        return Priced(noise, event, accounting.epsilon(event, delta=budget.delta).upper)

    # One part in `more` of the budget for each trial: the more parts, the less the whole costs.
    more = calibrate.smallest(lambda more: at(1 / more).epsilon, budget.epsilon, start=2.0)
    found = at(1 / more)
    assert found.epsilon <= budget.epsilon
    return found


def charge(
    ledger: "str | PathLike[str] | Ledger", name: str, event: Event, budget: Budget, *, create: bool = False
) -> None:
    """Put the whole tuning on the ledger under this name, unless it is there: a resumed tuning is never charged twice.

    Returns once the charge is durably on record.
    """
    book = ledger if isinstance(ledger, Ledger) else Ledger(ledger, create=create)
    try:
        if not any(account.name == name for account in book.accounts()):
            book.open_account(name, budget=budget, upfront=event, units=[])  # upfront is spent from here on
        if not next(account for account in book.accounts() if account.name == name).closed:
            book.close_account(name)
    finally:
        if book is not ledger:
            book.close()
