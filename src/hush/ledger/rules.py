"""What may be charged to a ledger, and what the charges add up to: three rules, one fixed when the file is made.

slices    Each account declares an (epsilon, delta) that its fixed plan fills; slices add up by basic composition, which
          holds when each slice is chosen after seeing the results of those before (Rogers, Roth, Ullman and Vadhan
          2016, theorem 3.6). No refund.
renyi     One Renyi filter over everything charged (Feldman and Zrnic 2021; see accounting/filters.py): the cap is
          fixed, the charges may adapt. An open account holds its whole plan; units it did not use are free again when
          it is closed.
odometer  No cap; a running bound that holds at every moment at once.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Protocol

from hush import accounting
from hush.accounting import renyi
from hush.accounting.bounds import Bounds, Budget
from hush.accounting.events import NOTHING
from hush.accounting.filters import ORDERS, Filter, Odometer, orders_for
from hush.ledger.books import Books, Page
from hush.ledger.errors import BudgetExhausted, LedgerMismatch


class Rule(Protocol):
    """How one kind of ledger admits accounts and adds them up."""

    def orders(self, cap: Budget | None) -> tuple[float, ...]:
        """The grid that is fixed with the file; refuses a cap that the rule cannot work with."""

    def costs(self, page: Page, orders: Sequence[float]) -> tuple[tuple[float, ...], ...]:
        """What the plan costs in the rule's own units; refuses a plan that does not fit its declared slice."""

    def admit(self, books: Books, page: Page) -> None:
        """Refuse a new account that would pass the cap, next to everything the books hold."""

    def spent_by(self, books: Books, page: Page, delta: float) -> Bounds:
        """Epsilon charged to one account."""

    def spent(self, books: Books, delta: float) -> Bounds:
        """Epsilon charged to the whole dataset."""


class Slices:
    """Declared slices under basic composition; each is filled by one plan under the tight accountant."""

    def orders(self, cap: Budget | None) -> tuple[float, ...]:
        return ()

    def costs(self, page: Page, orders: Sequence[float]) -> tuple[tuple[float, ...], ...]:
        if page.budget is None:
            raise LedgerMismatch(
                "a declared budget for each account of a ledger with rule 'slices'", "none", "give budget=Budget(...)"
            )
        cost = accounting.epsilon(page.event(page.total), delta=page.budget.delta).upper
        if not cost <= page.budget.epsilon:
            raise LedgerMismatch(
                f"a plan within its slice, epsilon {page.budget.epsilon} at delta {page.budget.delta}",
                f"a plan that costs {cost:.6g}",
                "add noise, take fewer steps, or declare a larger slice",
            )
        return ()

    def admit(self, books: Books, page: Page) -> None:
        left = remaining(books)
        if left is None or page.budget is None:
            return
        epsilon, delta = left
        if _exact(page.budget.epsilon) > epsilon or _exact(page.budget.delta) > delta:
            raise BudgetExhausted(
                f"a slice within what the cap leaves, epsilon {down(epsilon)} and delta {down(delta)}",
                f"epsilon {page.budget.epsilon} and delta {page.budget.delta}",
                "plan for what is left; nothing was computed on the data",
            )

    def spent_by(self, books: Books, page: Page, delta: float) -> Bounds:
        return accounting.epsilon(page.event(page.total), delta=delta)

    def spent(self, books: Books, delta: float) -> Bounds:
        pages = list(books.pages.values())
        if len(pages) <= 1:
            return self.spent_by(books, pages[0], delta) if pages else Bounds(0.0, 0.0)
        slices = [page.budget for page in pages if page.budget is not None]
        if sum((_exact(budget.delta) for budget in slices), Fraction(0)) <= _exact(delta):
            upper = _up(sum((_exact(budget.epsilon) for budget in slices), Fraction(0)))
        else:  # slices chosen after one another cannot be divided anew afterwards; the odometer holds at any delta
            upper = _reading(ORDERS, [_vector(page, _costs(page, ORDERS), page.total) for page in pages], delta)
        return Bounds(min(upper, max(self.spent_by(books, page, delta).lower for page in pages)), upper)


class Renyi:
    """One filter for everything: open accounts hold their whole plan, closed ones what they used."""

    def orders(self, cap: Budget | None) -> tuple[float, ...]:
        if cap is None:
            raise LedgerMismatch("a cap for the rule 'renyi'", "none", "give budget=Budget(...), or rule='odometer'")
        return orders_for(cap)

    def costs(self, page: Page, orders: Sequence[float]) -> tuple[tuple[float, ...], ...]:
        return _costs(page, orders)

    def admit(self, books: Books, page: Page) -> None:
        assert books.cap is not None  # `orders` saw to it
        held = [_vector(p, p.costs, p.spent if p.closed else p.total) for p in [*books.pages.values(), page]]
        state = {"budget": {"epsilon": books.cap.epsilon, "delta": books.cap.delta}, "orders": books.orders}
        if not Filter.from_dict(state | {"spent": _sum(held)}).affords(NOTHING):
            raise BudgetExhausted(
                f"a plan that fits under epsilon {books.cap.epsilon} at delta {books.cap.delta} beside what is held",
                f"account {page.name!r} over {page.total} units",
                "plan less, or close accounts whose runs are gone; nothing was computed on the data",
            )

    def spent_by(self, books: Books, page: Page, delta: float) -> Bounds:
        return _running(books.orders, [page], delta, cap=math.inf)

    def spent(self, books: Books, delta: float) -> Bounds:
        assert books.cap is not None
        cap = books.cap.epsilon if delta >= books.cap.delta else math.inf
        return _running(books.orders, list(books.pages.values()), delta, cap=cap)


class Unlimited:
    """The odometer: everything is admitted, nothing is promised but the reading."""

    def orders(self, cap: Budget | None) -> tuple[float, ...]:
        if cap is not None:
            raise LedgerMismatch("no cap for the rule 'odometer'", str(cap), "leave it out, or use rule='renyi'")
        return ORDERS

    def costs(self, page: Page, orders: Sequence[float]) -> tuple[tuple[float, ...], ...]:
        return _costs(page, orders)

    def admit(self, books: Books, page: Page) -> None:
        return None

    def spent_by(self, books: Books, page: Page, delta: float) -> Bounds:
        return _running(books.orders, [page], delta, cap=math.inf)

    def spent(self, books: Books, delta: float) -> Bounds:
        return _running(books.orders, list(books.pages.values()), delta, cap=math.inf)


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


def _running(orders: Sequence[float], pages: Sequence[Page], delta: float, *, cap: float) -> Bounds:
    """The odometer's reading of what is on record, or the cap where that is smaller; both are true at this delta."""
    if not pages:
        return Bounds(0.0, 0.0)
    upper = min(cap, _reading(orders, [_vector(page, page.costs, page.spent) for page in pages], delta))
    lower = max(accounting.epsilon(page.event(page.spent), delta=delta).lower for page in pages)
    return Bounds(min(lower, upper), upper)


def _reading(orders: Sequence[float], vectors: Sequence[Sequence[float]], delta: float) -> float:
    return Odometer.from_dict({"delta": delta, "orders": orders, "spent": _sum(vectors)}).epsilon()


def _costs(page: Page, orders: Sequence[float]) -> tuple[tuple[float, ...], ...]:
    rows = tuple(renyi.divergences(event, orders) for event in (page.upfront, *(event for event, _ in page.units)))
    if not all(math.isfinite(cost) and cost >= 0 for row in rows for cost in row):
        raise LedgerMismatch("a plan with a finite Renyi cost at every order", "an infinite one", "use rule='slices'")
    return rows


def _vector(page: Page, costs: Sequence[Sequence[float]], units: int) -> tuple[float, ...]:
    """The plan's cost at each order once `units` units are used."""
    counts = (1, *page.first(units))
    return tuple(
        math.fsum(n * cost for n, cost in zip(counts, column, strict=True)) for column in zip(*costs, strict=True)
    )


def _sum(vectors: Sequence[Sequence[float]]) -> list[float]:
    """Sums by order, a hair upwards: rounding must not lose a charge."""
    return [math.fsum(column) * (1 + 1e-12) for column in zip(*vectors, strict=True)]


def remaining(books: Books) -> tuple[Fraction, Fraction] | None:
    """What slices leave of the cap, exactly; None without a cap. Numbers count as their decimals: 0.1 + 0.2 is 0.3."""
    if books.cap is None:
        return None
    slices = [page.budget for page in books.pages.values() if page.budget is not None]
    return (
        _exact(books.cap.epsilon) - sum((_exact(budget.epsilon) for budget in slices), Fraction(0)),
        _exact(books.cap.delta) - sum((_exact(budget.delta) for budget in slices), Fraction(0)),
    )


def down(value: Fraction) -> float:
    """The largest float whose decimals do not exceed the value."""
    near = float(value)
    return near if _exact(near) <= value else math.nextafter(near, -math.inf)


def _up(value: Fraction) -> float:
    near = float(value)
    return near if _exact(near) >= value else math.nextafter(near, math.inf)


def _exact(value: float) -> Fraction:
    return Fraction(repr(float(value)))
