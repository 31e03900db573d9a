"""What may be charged to a ledger, and what the charges add up to: three rules, one fixed when the file is made.

slices    Each account declares an (epsilon, delta) that its fixed plan fills; slices add up by basic composition, which
          holds when each slice is chosen after seeing the results of those before (Rogers, Roth, Ullman and Vadhan
          2016, theorem 3.6). No refund.
renyi     One Renyi filter over everything charged (Feldman and Zrnic 2021): the cap is fixed, the charges may adapt.
          An open account holds its whole plan; units it did not use are free again when it is closed.
odometer  No cap; a running bound that holds at every moment at once.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Protocol

from hush import accounting
from hush.accounting.bounds import Bounds, Budget
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

    def spent_by(self, page: Page, delta: float) -> Bounds:
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

    def spent_by(self, page: Page, delta: float) -> Bounds:
        return accounting.epsilon(page.event(page.total), delta=delta)

    def spent(self, books: Books, delta: float) -> Bounds:
        pages = list(books.pages.values())
        if len(pages) <= 1:
            return self.spent_by(pages[0], delta) if pages else Bounds(0.0, 0.0)
        slices = [page.budget for page in pages if page.budget is not None]
        deltas = sum((_exact(budget.delta) for budget in slices), Fraction(0))
        if _exact(delta) < deltas:
            raise LedgerMismatch(
                f"delta >= {_up(deltas)}, the sum over the {len(slices)} slices",
                str(delta),
                "ask at that delta: slices chosen after one another cannot be divided anew afterwards",
            )
        upper = _up(sum((_exact(budget.epsilon) for budget in slices), Fraction(0)))
        return Bounds(min(upper, max(self.spent_by(page, delta).lower for page in pages)), upper)


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


def named(rule: str) -> Rule:
    """The rule of this name; the names are those that a ledger accepts."""
    return Slices()
