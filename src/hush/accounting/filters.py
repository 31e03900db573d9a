"""Accounts for runs whose parameters are chosen while they run: a Filter has a cap, an Odometer has none.

They are two different things (Rogers, Roth, Ullman, Vadhan 2016). A filter decides whether the next event still fits
under a budget fixed in advance; an odometer tells at every moment what has been spent and pays for not knowing the
end.

Both rest on one fact. Let L be the privacy loss so far, S_a the sum of the Renyi divergences charged at order a, and
M_a = exp((a - 1)(L - S_a)). Each event is chosen before its noise is drawn, so M_a is a nonnegative supermartingale
that starts at 1, however the choices depend on what was released (Feldman and Zrnic 2021, proof of Theorem 4.3;
Lecuyer 2021). A weighted mean M of the M_a over a fixed grid of orders is one as well. "Some order is still under its
cap", decided after seeing outputs, picks the order by the data and is not covered by the theorem for a fixed order;
the mean over the grid is.

Several accounts may be open at the same time, their lots in any order: interactive mechanisms compose concurrently as
if one after the other (Vadhan and Zhang 2023, Lyu 2022; with adaptive parameters and filters Haney, Shoaib, Jiang,
Smart 2023). For the mean over orders and whole units: once unit i is charged, V_i = sup over the analyst's
continuations of E[exp((a - 1) L_i) | transcript] is a supermartingale under any queries to the others, starts at most
at exp((a - 1) times its charge) and is never below exp((a - 1) L_i). The product over the units is then one too, and
so is the mean of the products over orders: M above, with what is begun charged whole.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hush.accounting import renyi
from hush.accounting.bounds import Budget
from hush.accounting.events import Event
from hush.accounting.likelihood_ratios import Array
from hush.accounting.reductions import require_delta

# order - 1 doubles from 1/32 to 1024: epsilons from hundredths to thousands find an order within sqrt(2) of their best.
ORDERS = tuple(1 + 2.0**k for k in range(-5, 11))


def orders_for(budget: Budget) -> tuple[float, ...]:
    """A filter's orders for this budget: the best one for a nearly normal loss, an octave below it, then `ORDERS`.

    Rare large losses make the best order smaller, by less than a half in what was tried.
    """
    beta = np.geomspace(1e-2, 1e6, 2001)
    order = 1 + beta
    # The rho of zCDP that reaches the budget at each order: the best order is the one that lets through the most.
    rho = (budget.epsilon - np.log(beta / order) + (math.log(budget.delta) + np.log(order)) / beta) / order
    best = float(beta[int(np.argmax(rho))])
    return (*(1 + best * 2 ** (-0.15 * k) for k in range(8)), *ORDERS)


def _half_on_the_first(beta: Array) -> Array:
    return np.array([1.0, *(1 / len(beta[1:]) for _ in beta[1:])])


def _most_near_nine(beta: Array) -> Array:
    """Orders near 9 are what losses of about 1 to 10 use; never little on any."""
    weights: Array = 1 / (1 + np.log2(beta / 8) ** 2)
    return weights


class BudgetExceeded(Exception):
    """The event would pass the filter's cap; nothing was charged and the event must not be carried out."""


class _Spending:
    """Sums of Renyi divergences at the orders of a fixed grid; abstract."""

    def __init__(self, orders: Sequence[float], weights: Callable[[Array], Array]) -> None:
        if not orders or any(not (order > 1 and math.isfinite(order)) for order in orders):
            raise ValueError(f"orders must be finite numbers > 1, got {orders!r}")
        self._orders = tuple(float(order) for order in orders)
        self._total = np.zeros(len(self._orders))
        self._beta = np.array(self._orders) - 1
        shares = weights(self._beta)
        self._log_weights = np.log(shares / shares.sum())

    @property
    def orders(self) -> tuple[float, ...]:
        """The grid, fixed from the beginning."""
        return self._orders

    @property
    def spent(self) -> tuple[float, ...]:
        """The sum of the divergences charged, order by order."""
        return tuple(float(s) for s in self._total)

    def _with_event(self, event: Event) -> Array:
        # Rounded up, so that many additions never lose a charge.
        return np.nextafter(self._total + np.array(renyi.divergences(event, self.orders)), np.inf)

    def _log_mean(self, loss: float, total: Array) -> tuple[float, float]:
        """ln M at this privacy loss, and its derivative."""
        terms = self._log_weights + self._beta * (loss - total)
        peak = float(terms.max())
        with np.errstate(under="ignore"):
            shares = np.exp(terms - peak)
        mass = float(shares.sum())
        return peak + math.log(mass), float((shares * self._beta).sum()) / mass


class Filter(_Spending):
    """A cap on everything charged; rates, noise and the number of steps may be chosen as the run goes.

    Guarantee: whoever sees all results of events that `charge` let through, and the moment of stopping, sees an
    (epsilon, delta)-differentially private output. Proof: an event is let through only if afterwards max(0, 1 -
    e^(epsilon - l)) <= delta * M(l) for every privacy loss l. At the end E[max(0, 1 - e^(epsilon - L))] is then at
    most delta E[M] <= delta, because M is a nonnegative supermartingale stopped at a stopping time, and that is
    (epsilon, delta)-privacy. With one order this is the Renyi filter of Feldman and Zrnic 2021, Theorem 4.3, with the
    conversion of Canonne, Kamath, Steinke 2020; a grid pays for its breadth, ln(1 / weight) / (order - 1) in epsilon
    at most. Half of the weight is on the first order, by default the one that is best where the loss is nearly normal
    and the budget just used up. A run with a plan in mind does best with `orders=[renyi.best_order(plan, delta=...)]`.

    >>> from hush.accounting.events import Gaussian
    >>> cap = Filter(Budget(epsilon=1.0, delta=1e-5))
    >>> cap.charge(Gaussian(8.0)); cap.affords(Gaussian(1.0))
    False
    """

    def __init__(self, budget: Budget, orders: Sequence[float] | None = None) -> None:
        super().__init__(orders_for(budget) if orders is None else orders, _half_on_the_first)
        self.budget = budget

    def affords(self, event: Event) -> bool:
        """Whether `charge` would let the event through."""
        return self._within(self._with_event(event), self.budget.epsilon)

    def charge(self, event: Event) -> None:
        """Take the event's cost before it is carried out; BudgetExceeded, with nothing charged, if it does not fit."""
        total = self._with_event(event)
        if not self._within(total, self.budget.epsilon):
            raise BudgetExceeded(
                f"charging {event} would pass epsilon={self.budget.epsilon:g} at delta={self.budget.delta:g}; "
                f"{self.epsilon():.4g} is spent: stop here, or charge less"
            )
        self._total = total

    def epsilon(self) -> float:
        """The smallest cap, at the budget's delta, that would have let through what was charged so far (to 1e-6)."""
        total = self._total
        if not total.any():
            return 0.0
        return _smallest(lambda epsilon: self._within(total, epsilon))

    def to_dict(self) -> dict[str, Any]:
        """The state as plain JSON values."""
        budget = {"epsilon": self.budget.epsilon, "delta": self.budget.delta}
        return {"budget": budget, "orders": list(self.orders), "spent": list(self.spent)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Filter":
        """The filter that `to_dict` wrote."""
        restored = cls(Budget(**values["budget"]), values["orders"])
        restored._total = _restored(values["spent"], len(restored.orders))
        return restored

    def _within(self, total: Array, epsilon: float) -> bool:
        return self._log_worst(total, epsilon) <= math.log(self.budget.delta)

    def _log_worst(self, total: Array, epsilon: float) -> float:
        """A bound on the maximum over l > epsilon of ln(1 - e^(epsilon - l)) - ln M(l), a concave function of l."""

        def value(u: float) -> tuple[float, float]:
            log_mean, slope = self._log_mean(epsilon + u, total)
            return math.log(-math.expm1(-u)) - log_mean, 1 / math.expm1(u) - slope

        low, high = 1e-12 / max(1.0, float(self._beta.max()) / 1e10), 700.0
        while high / low > 1 + 1e-7:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if value(middle)[1] > 0 else (low, middle)
        best, slope = value(low)
        return best + max(slope, 0.0) * (high - low)  # the tangent lies above a concave function


class Odometer(_Spending):
    """A running bound on what has been spent, without a cap; anything may be chosen as the run goes.

    Guarantee: with probability at least 1 - delta over the run, the privacy loss stays at or below the reading at
    every moment at once (so a stop chosen by looking at the reading is covered; this is the odometer of Rogers et al.
    2016). Proof: M is a nonnegative supermartingale that starts at 1, so by Ville's inequality it ever reaches 1/delta
    with probability at most delta, and the reading is the loss l at which M(l) = 1/delta (the time-uniform argument of
    Whitehouse, Ramdas, Rogers, Wu 2023, with Renyi divergences as in Lecuyer 2021). delta is fixed when the odometer
    starts.

    >>> from hush.accounting.events import Gaussian
    >>> odometer = Odometer(delta=1e-5)
    >>> odometer.charge(Gaussian(8.0) * 4); 1.0 < odometer.epsilon() < 1.5
    True
    """

    def __init__(self, *, delta: float, orders: Sequence[float] = ORDERS) -> None:
        require_delta(delta)
        super().__init__(orders, _most_near_nine)
        self.delta = delta

    def charge(self, event: Event) -> None:
        """Add the event's cost; call this before the event is carried out."""
        self._total = self._with_event(event)

    def epsilon(self) -> float:
        """The reading (to 1e-6, rounded up)."""
        total = self._total
        if not total.any():
            return 0.0
        return _smallest(lambda loss: self._log_mean(loss, total)[0] >= -math.log(self.delta))

    def to_dict(self) -> dict[str, Any]:
        """The state as plain JSON values."""
        return {"delta": self.delta, "orders": list(self.orders), "spent": list(self.spent)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Odometer":
        """The odometer that `to_dict` wrote."""
        restored = cls(delta=values["delta"], orders=values["orders"])
        restored._total = _restored(values["spent"], len(restored.orders))
        return restored


def _smallest(holds: Callable[[float], bool]) -> float:
    """The smallest number >= 0 at which a condition that stays true holds, rounded up by at most 1e-6."""
    low, high = 0.0, 1.0
    while not holds(high):
        low, high = high, 2 * high
    while high - low > 1e-6 * max(high, 1e-3):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _restored(spent: Sequence[float], count: int) -> Array:
    total = np.array(spent, dtype=float)
    if total.shape != (count,) or not (np.isfinite(total).all() and (total >= 0).all()):
        raise ValueError(f"expected {count} sums of divergences >= 0, one for each order, got {spent!r}")
    return total
