"""The account that a run charges: a new one on a ledger, one that was opened before, or one in memory."""

import secrets
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from os import PathLike
from typing import Any, Protocol

from hush import accounting
from hush.accounting.approximate_noise import epsilon_of_inexact
from hush.accounting.bounds import Bounds, Budget
from hush.accounting.events import Event
from hush.ledger import BudgetExhausted, Head, Ledger, MemoryAccount
from hush.plan import Plan, PrivatePreprocessing


class ChargeAccount(Protocol):
    """What `Private` needs of an account: each number that `take` gives is on record, and nobody else's."""

    @property
    def taken(self) -> int: ...
    @property
    def total(self) -> int: ...
    @property
    def distance(self) -> float: ...
    def must_cover(self, upfront: Event, units: Sequence[tuple[Event, int]]) -> None: ...
    def take_upfront(self) -> None: ...
    def take(self) -> int: ...
    def spend_up_to(self, units: int) -> None: ...
    def settle(self) -> None: ...
    def close(self) -> None: ...
    def so_far(self, *, delta: float) -> Bounds: ...


def open_account(
    plan: Plan,
    ledger: "str | PathLike[str] | Ledger | ChargeAccount | None",
    *,
    distance: float = 0.0,
    data: Any = None,
    create: bool = False,
    seeded: bool = False,
) -> ChargeAccount | None:
    """The account for this plan; None for a plan without noise, which nothing can be charged for.

    A path or a Ledger gets a new account for the budget that the plan was made for, or, where it was made for none,
    for what it costs at delta = min(1e-5, 1 / (10 examples)). A path must be that of a ledger, unless `create` asks
    for a new one. An account opened or resumed before is used as it is.
    Where all that is released may lie `distance` from the accounted law, the budget must have room for what that adds
    to delta.
    """
    if not plan.private:
        if ledger is not None:
            raise ValueError(
                f"{plan}. Its epsilon is infinite and cannot be charged to a ledger: give the plan more noise, or "
                "leave the ledger out"
            )
        return None
    if plan.budget is not None and distance > 0:
        _require_room(plan, plan.budget, distance)
    if ledger is None:
        return MemoryAccount(units=plan.units, upfront=plan.preprocessing, budget=plan.budget, distance=distance)
    if not isinstance(ledger, str | PathLike | Ledger):
        return ledger
    book = ledger if isinstance(ledger, Ledger) else Ledger(ledger, create=create)
    name = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S}-{secrets.token_hex(4)}" + seeded * " (seeded, NOT PRIVATE)"
    return book.open_account(
        name,
        budget=plan.budget or _own_budget(plan, distance),
        units=plan.units,
        upfront=plan.preprocessing,
        data=data,
        distance=distance,
    )


def resume_account(
    plan: Plan, ledger: "str | PathLike[str] | Ledger | ChargeAccount | None", saved: Any, charged: int
) -> ChargeAccount | None:
    """The account that a saved run has charged, taken over; `saved` is what its state kept of it."""
    if not plan.private:
        return None
    if isinstance(ledger, str | PathLike | Ledger):
        book = ledger if isinstance(ledger, Ledger) else Ledger(ledger)
        if saved is None or saved["ledger"] is None:
            raise ValueError(f"the saved run was charged to no ledger, and now {book.path} is given: leave it out")
        if saved["seen"] is not None:
            book.must_include(Head.from_dict(saved["seen"]))
        return book.resume_account(saved["name"])
    if ledger is not None:
        return ledger
    if saved is not None and saved["ledger"] is not None:
        raise ValueError(f"the saved run was charged to {saved['ledger']}: resume it with that ledger")
    return MemoryAccount(units=plan.units, upfront=plan.preprocessing, budget=plan.budget, spent=charged)


def do_preprocessing(access: PrivatePreprocessing, account: "ChargeAccount | None") -> None:
    """Do what was charged with the account. Where it was another event than declared, that goes on record first."""
    if account is not None:
        account.take_upfront()
    done = access.run()
    if done == access.event:
        return
    book, delta = ledger_of(account), 1e-5
    if book is not None:
        cost = Budget(epsilon=max(accounting.epsilon(done, delta=delta).upper, 1e-9), delta=delta)
        title = f"{access.name[:120]}, not as declared {secrets.token_hex(4)}"
        with suppress(BudgetExhausted):  # the cap leaves no room; what is refused below says the rest
            book.open_account(title, budget=cost, units=((done, 1),)).take()
    raise ValueError(
        f"the preprocessing {access.name!r} was {done}, but {access.event} was charged: it was done, so its "
        "own cost is put on the ledger beside what was charged. Declare the event that it "
        "really is, and do not use its result here"
    )


def ledger_of(account: "ChargeAccount | None") -> Ledger | None:
    """The ledger behind an account; None for one in memory."""
    return getattr(account, "_ledger", None)


def _own_budget(plan: Plan, distance: float) -> Budget:
    delta = min(1e-5, 0.1 / plan.lots.examples)
    return Budget(epsilon=_epsilon(plan, delta, distance), delta=delta)


def _epsilon(plan: Plan, delta: float, distance: float) -> float:
    return epsilon_of_inexact(lambda delta: plan.epsilon(delta=delta), delta=delta, distance=distance).upper


def _require_room(plan: Plan, budget: Budget, distance: float) -> None:
    cost = _epsilon(plan, budget.delta, distance)
    if cost > budget.epsilon:
        raise ValueError(
            f"discrete noise is exact to a distance of {distance:.1e} over the whole run, and with what that adds to "
            f"delta the plan costs epsilon {cost!r} at delta {budget.delta:g}, more than its budget of "
            f"{budget.epsilon!r}: make the plan for a slightly smaller epsilon or delta"
        )
