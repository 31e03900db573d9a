"""What a budget buys before any data is touched: lot sizes, noise, and where more compute stops helping.

Over T steps on lots of L out of N records with noise multiplier sigma, the signal of the averaged gradients stands over
their noise by a factor proportional to sqrt(T) L / sigma. Taking all records at every step would give N mu with mu the
Gaussian differential privacy of the budget, the most that it can buy: the `share` of a row is what it has of that.
Small lots lose some of it, since sampling hides less than it saves (Sander, Stock, Sablayrolles 2022, "TAN"; De et al.
2022 find the accuracy to follow it): the knee is the smallest lot that keeps nine tenths.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hush.accounting.bounds import Budget
from hush.accounting.calibrate import noise
from hush.accounting.events import Gaussian, PoissonSampled

KNEE = 0.9


@dataclass(frozen=True)
class Row:
    """One way to spend the budget. `seconds` is None where nobody said how long a record takes."""

    lot_size: int
    steps: int
    epochs: float
    noise_multiplier: float
    noise_to_lot: float
    share: float
    seconds: float | None


@dataclass(frozen=True)
class Advice:
    """The table, the knee (an index into it, None if no row keeps nine tenths), and what a change would buy.

    `buys` has the factor by which the signal over the noise grows at the knee for twice the steps, twice the lot, twice
    the records, twice the epsilon.
    """

    rows: tuple[Row, ...]
    knee: int | None
    paper_lot: int
    paper_epochs: int
    buys: dict[str, float]


def advise(
    records: int,
    budget: Budget,
    *,
    steps: int | None = None,
    lots: Sequence[int] | None = None,
    seconds_per_record: float | None = None,
) -> Advice:
    """The table for so many records and this budget.

    `steps` is a few thousand by default (at most as many as the paper's advice gives). The paper's advice: lots near
    sqrt(N), and as many epochs as an epoch has lots, which together is sqrt(N) epochs.

    >>> advice = advise(60_000, Budget(epsilon=2.0, delta=1e-5), steps=1000, lots=[600, 2400])
    >>> advice.paper_lot, [row.epochs for row in advice.rows]
    (245, [10.0, 40.0])
    """
    if not isinstance(records, int) or isinstance(records, bool) or records < 2:
        raise ValueError(f"records must be a whole number >= 2, got {records!r}")
    root = round(math.sqrt(records))
    steps = min(2000, records) if steps is None else steps
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ValueError(f"steps must be a whole number >= 1, got {steps!r}")
    chosen = sorted({root, *(_ladder(records, root) if lots is None else lots)})
    if not all(isinstance(lot, int) and 1 <= lot <= records for lot in chosen):
        raise ValueError(f"lot sizes must be whole numbers in [1, {records}], got {lots!r}")
    chosen = chosen if lots is None else sorted(set(lots))
    rows = tuple(
        row(records, budget, lot_size=lot, steps=steps, seconds_per_record=seconds_per_record) for lot in chosen
    )
    knee = next((index for index, one in enumerate(rows) if one.share >= KNEE), None)
    return Advice(rows, knee, root, root, _bought(records, budget, rows[-1 if knee is None else knee]))


def row(records: int, budget: Budget, *, lot_size: int, steps: int, seconds_per_record: float | None = None) -> Row:
    """The least noise for this many steps on lots of this size, and what it leaves of the signal."""
    rate = lot_size / records
    found = noise(lambda sigma: PoissonSampled(rate, Gaussian(sigma)) * steps, budget)
    most = 1 / noise(Gaussian, budget)  # mu
    return Row(
        lot_size=lot_size,
        steps=steps,
        epochs=steps * rate,
        noise_multiplier=found,
        noise_to_lot=found / lot_size,
        share=min(1.0, math.sqrt(steps) * rate / found / most),
        seconds=None if seconds_per_record is None else seconds_per_record * steps * lot_size,
    )


def _ladder(records: int, root: int) -> list[int]:
    """Doublings around the root, up to half of the records."""
    sizes = [root * 2**power for power in range(-2, 30)]
    return [size for size in (round(size) for size in sizes) if 1 <= size <= max(records // 2, 1)][:11]


def _bought(records: int, budget: Budget, at: Row) -> dict[str, float]:
    def signal(one: Row) -> float:
        return math.sqrt(one.steps) / one.noise_to_lot

    larger = Budget(epsilon=2 * budget.epsilon, delta=budget.delta)
    changed = {
        "twice the steps": row(records, budget, lot_size=at.lot_size, steps=2 * at.steps),
        "twice the lot": row(records, budget, lot_size=min(2 * at.lot_size, records), steps=at.steps),
        "twice the records": row(2 * records, budget, lot_size=at.lot_size, steps=at.steps),
        "twice the epsilon": row(records, larger, lot_size=at.lot_size, steps=at.steps),
    }
    return {what: signal(one) / signal(at) for what, one in changed.items()}
