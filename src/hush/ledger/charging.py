"""The account that a run charges: a new one on a ledger, one that was opened before, or one in memory."""

import secrets
from datetime import UTC, datetime
from os import PathLike
from typing import Any, Protocol

from hush.accounting.approximate_noise import epsilon_of_inexact
from hush.accounting.bounds import Bounds, Budget
from hush.ledger import Ledger, MemoryAccount
from hush.plan import Plan


class ChargeAccount(Protocol):
    """What `Private` needs of an account: each number that `take` gives is on record, and nobody else's."""

    @property
    def taken(self) -> int: ...
    @property
    def total(self) -> int: ...
    @property
    def distance(self) -> float: ...
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
        return MemoryAccount(units=plan.units, upfront=plan.spent, budget=plan.budget, distance=distance)
    if not isinstance(ledger, str | PathLike | Ledger):
        if ledger.total != sum(count for _, count in plan.units):
            raise ValueError(
                f"the account holds {ledger.total} units and the plan {sum(count for _, count in plan.units)}: open "
                "it with units=plan.units, upfront=plan.spent"
            )
        return ledger
    book = ledger if isinstance(ledger, Ledger) else Ledger(ledger, create=create)
    name = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S}-{secrets.token_hex(4)}"
    return book.open_account(
        name,
        budget=plan.budget or _own_budget(plan, distance),
        units=plan.units,
        upfront=plan.spent,
        data=data,
        distance=distance,
    )


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
