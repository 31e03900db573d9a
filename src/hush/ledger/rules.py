"""What may be charged to a ledger, and what the charges add up to: three rules, one fixed when the file is made.

slices    Each account declares an (epsilon, delta) that its fixed plan fills; slices add up by basic composition, which
          holds when each slice is chosen after seeing the results of those before (Rogers, Roth, Ullman and Vadhan
          2016, theorem 3.6). No refund.
renyi     One Renyi filter over everything charged (Feldman and Zrnic 2021; see accounting/filters.py): the cap is
          fixed, the charges may adapt. An open account holds its whole plan; units it did not use are free again when
          it is closed.
odometer  No cap; a running bound that holds at every moment at once.

Accounts may be open at the same time, and what one releases may decide what is asked of another. Each is an interactive
mechanism with noise of its own, and these compose as if one followed the other: (epsilon, delta) and f-DP by Lyu 2022
and Vadhan and Zhang 2023, with parameters and moments of opening that are chosen on the way by Haney, Shoemate, Tian,
Vadhan, Vyrros, Xu and Zhang 2023. For the mean over orders, as filters.py uses it: let h be what was seen of account i,
L_i(h) its privacy loss, S_i its divergence of order a in the whole, and V_i(h) the supremum, over all ways to go on,
of E[exp((a - 1) L_i at the end) | h]. V_i starts at exp((a - 1) S_i) or less; a query to i makes it no larger in the
mean, by definition, and a query to another account does not touch it, since noise is independent; and V_i(h) >= exp((a
- 1) L_i(h)), since a divergence is never negative. So the product over the accounts of V_i exp(-(a - 1) S_i), and its
mean over the orders, is a nonnegative supermartingale that starts at 1 or less and is at least the M of filters.py.

Noise that is exact only to a distance (in total variation) adds the distances of all accounts, and (1 + e^epsilon)
times their sum to delta.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Protocol

from hush.accounting import renyi
from hush.accounting.approximate_noise import added_delta, epsilon_of_inexact
from hush.accounting.bounds import Bounds, Budget
from hush.accounting.events import NOTHING
from hush.accounting.filters import ORDERS, Filter, Odometer, orders_for
from hush.ledger.balances import AccountRecord, Balances
from hush.ledger.errors import BudgetExhausted, LedgerMismatch


class Rule(Protocol):
    """How one kind of ledger admits accounts and adds them up."""

    def orders(self, cap: Budget | None) -> tuple[float, ...]:
        """The grid that is fixed with the file; refuses a cap that the rule cannot work with."""

    def costs(self, record: AccountRecord, orders: Sequence[float]) -> tuple[tuple[float, ...], ...]:
        """What the plan costs in the rule's own units; refuses a plan that does not fit its declared slice."""

    def admit(self, balances: Balances, record: AccountRecord) -> None:
        """Refuse a new account that would pass the cap, next to everything the balances hold."""

    def spent_by(self, balances: Balances, record: AccountRecord, delta: float) -> Bounds:
        """Epsilon charged to one account."""

    def spent(self, balances: Balances, delta: float) -> Bounds:
        """Epsilon charged to the whole dataset."""


class Slices:
    """Declared slices under basic composition; each is filled by one plan under the tight accountant."""

    def orders(self, cap: Budget | None) -> tuple[float, ...]:
        return ()

    def costs(self, record: AccountRecord, orders: Sequence[float]) -> tuple[tuple[float, ...], ...]:
        if record.budget is None:
            raise LedgerMismatch(
                "a declared budget for each account of a ledger with rule 'slices'", "none", "give budget=Budget(...)"
            )
        cost = self.spent_by(Balances(), record, record.budget.delta).upper
        if not cost <= record.budget.epsilon:
            raise LedgerMismatch(
                f"a plan within its slice, epsilon {record.budget.epsilon} at delta {record.budget.delta}",
                f"a plan that costs {cost:.6g}",
                "add noise, take fewer steps, or declare a larger slice",
            )
        return ()

    def admit(self, balances: Balances, record: AccountRecord) -> None:
        left = remaining(balances)
        if left is None or record.budget is None:
            return
        epsilon, delta = left
        if _exact(record.budget.epsilon) > epsilon or _exact(record.budget.delta) > delta:
            raise BudgetExhausted(
                f"a slice within what the cap leaves, epsilon {down(epsilon)} and delta {down(delta)}",
                f"epsilon {record.budget.epsilon} and delta {record.budget.delta}",
                "plan for what is left; nothing was computed on the data",
            )

    def spent_by(self, balances: Balances, record: AccountRecord, delta: float) -> Bounds:
        return record.epsilon(record.total, delta=delta)

    def spent(self, balances: Balances, delta: float) -> Bounds:
        slices = {record: record.budget for record in balances.accounts.values() if record.budget is not None}
        if not slices:
            return Bounds(0.0, 0.0)
        largest = max(slices, key=lambda record: slices[record].epsilon)  # all cost at least what one of them costs
        bounds = self.spent_by(balances, largest, delta)
        if len(slices) == 1:
            return bounds
        if _total(budget.delta for budget in slices.values()) <= _exact(delta):
            upper = _up(_total(budget.epsilon for budget in slices.values()))
        else:  # slices chosen after one another cannot be divided anew afterwards; the odometer holds at any delta
            costs = {plan: _costs(record, ORDERS) for plan, record in {(r.upfront, r.units): r for r in slices}.items()}
            upper = _reading(ORDERS, [(r, costs[r.upfront, r.units], r.total) for r in slices], delta)
        return Bounds(min(upper, bounds.lower), upper)


class Renyi:
    """One filter for everything: open accounts hold their whole plan, closed ones what they used."""

    def orders(self, cap: Budget | None) -> tuple[float, ...]:
        if cap is None:
            raise LedgerMismatch("a cap for the rule 'renyi'", "none", "give budget=Budget(...), or rule='odometer'")
        return orders_for(cap)

    def costs(self, record: AccountRecord, orders: Sequence[float]) -> tuple[tuple[float, ...], ...]:
        return _costs(record, orders)

    def admit(self, balances: Balances, record: AccountRecord) -> None:
        assert balances.cap is not None  # `orders` saw to it
        held = [_vector(p, p.costs, p.spent if p.closed else p.total) for p in [*balances.accounts.values(), record]]
        delta = balances.cap.delta - added_delta(_distance([*balances.accounts.values(), record]), balances.cap.epsilon)
        state = {"budget": {"epsilon": balances.cap.epsilon, "delta": delta}, "orders": balances.orders}
        if delta <= 0 or not Filter.from_dict(state | {"spent": _sum(held)}).affords(NOTHING):
            raise BudgetExhausted(
                f"a plan that fits under epsilon {balances.cap.epsilon} at delta {balances.cap.delta} "
                "beside what is held",
                f"account {record.name!r} over {record.total} units",
                "plan less, or close accounts whose runs are gone; nothing was computed on the data",
            )

    def spent_by(self, balances: Balances, record: AccountRecord, delta: float) -> Bounds:
        return _running(balances.orders, [record], delta, cap=math.inf)

    def spent(self, balances: Balances, delta: float) -> Bounds:
        assert balances.cap is not None
        cap = balances.cap.epsilon if delta >= balances.cap.delta else math.inf
        return _running(balances.orders, list(balances.accounts.values()), delta, cap=cap)


class Unlimited:
    """The odometer: everything is admitted, nothing is promised but the reading."""

    def orders(self, cap: Budget | None) -> tuple[float, ...]:
        if cap is not None:
            raise LedgerMismatch("no cap for the rule 'odometer'", str(cap), "leave it out, or use rule='renyi'")
        return ORDERS

    def costs(self, record: AccountRecord, orders: Sequence[float]) -> tuple[tuple[float, ...], ...]:
        return _costs(record, orders)

    def admit(self, balances: Balances, record: AccountRecord) -> None:
        return None

    def spent_by(self, balances: Balances, record: AccountRecord, delta: float) -> Bounds:
        return _running(balances.orders, [record], delta, cap=math.inf)

    def spent(self, balances: Balances, delta: float) -> Bounds:
        return _running(balances.orders, list(balances.accounts.values()), delta, cap=math.inf)


def named(rule: str) -> Rule:
    """The rule of this name; the names are those that a ledger accepts."""
    match rule:
        case "slices":
            return Slices()
        case "renyi":
            return Renyi()
        case "odometer":
            return Unlimited()
    raise LedgerMismatch("slices, renyi or odometer", repr(rule), "choose one of them")


def _running(orders: Sequence[float], records: Sequence[AccountRecord], delta: float, *, cap: float) -> Bounds:
    """The odometer's reading of what is on record, or the cap where that is smaller; both are true at this delta."""
    if not records:
        return Bounds(0.0, 0.0)
    upper = min(cap, _reading(orders, [(record, record.costs, record.spent) for record in records], delta))
    largest = max(records, key=lambda record: sum(_vector(record, record.costs, record.spent)))
    return Bounds(min(largest.epsilon(largest.spent, delta=delta).lower, upper), upper)


_Charge = tuple[AccountRecord, Sequence[Sequence[float]], int]  # an account, its costs by order, and its units


def _reading(orders: Sequence[float], charges: Sequence[_Charge], delta: float) -> float:
    spent, distance = _sum([_vector(*charge) for charge in charges]), _distance([record for record, _, _ in charges])

    def reading(delta: float) -> Bounds:
        return Bounds(0.0, Odometer.from_dict({"delta": delta, "orders": orders, "spent": spent}).epsilon())

    return epsilon_of_inexact(reading, delta=delta, distance=distance).upper


def _distance(records: Sequence[AccountRecord]) -> float:
    return math.fsum(record.distance for record in records) * (1 + 1e-12)


def _costs(record: AccountRecord, orders: Sequence[float]) -> tuple[tuple[float, ...], ...]:
    rows = tuple(renyi.divergences(event, orders) for event in (record.upfront, *(event for event, _ in record.units)))
    if not all(math.isfinite(cost) and cost >= 0 for row in rows for cost in row):
        raise LedgerMismatch("a plan with a finite Renyi cost at every order", "an infinite one", "use rule='slices'")
    return rows


def _vector(record: AccountRecord, costs: Sequence[Sequence[float]], units: int) -> tuple[float, ...]:
    """The plan's cost at each order once `units` units are used."""
    counts = (1, *record.first(units))
    return tuple(
        math.fsum(n * cost for n, cost in zip(counts, column, strict=True)) for column in zip(*costs, strict=True)
    )


def _sum(vectors: Sequence[Sequence[float]]) -> list[float]:
    """Sums by order, a hair upwards: rounding must not lose a charge."""
    return [math.fsum(column) * (1 + 1e-12) for column in zip(*vectors, strict=True)]


def remaining(balances: Balances) -> tuple[Fraction, Fraction] | None:
    """What slices leave of the cap, exactly; None without a cap. Numbers count as their decimals: 0.1 + 0.2 is 0.3."""
    if balances.cap is None:
        return None
    slices = [record.budget for record in balances.accounts.values() if record.budget is not None]
    return (
        _exact(balances.cap.epsilon) - _total(budget.epsilon for budget in slices),
        _exact(balances.cap.delta) - _total(budget.delta for budget in slices),
    )


def _total(values: Iterable[float]) -> Fraction:
    """The exact sum of the values as decimals; equal ones, of which there are many, are multiplied."""
    return sum((count * _exact(value) for value, count in Counter(values).items()), Fraction(0))


def down(value: Fraction) -> float:
    """The largest float whose decimals do not exceed the value."""
    near = float(value)
    return near if _exact(near) <= value else math.nextafter(near, -math.inf)


def _up(value: Fraction) -> float:
    near = float(value)
    return near if _exact(near) >= value else math.nextafter(near, math.inf)


def _exact(value: float) -> Fraction:
    return Fraction(repr(float(value)))
