"""Accounting for the experiments: lengths and noise for a budget, in the two countings that every result names.

- "as published": the paper's moments accountant, per-layer clipping counted as the published code does it, as if every
  layer had a lot of its own. It understates the joint cost, so it is a label for comparison, not a guarantee.
- "valid": what the library counts, privacy loss distributions over the joint mechanism.

Answers are kept in a file (results/budgets.json), since they depend on nothing but the question.
"""

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hush.accounting import NOTHING, Budget, Event, Gaussian, PoissonSampled, calibrate, moments, pld, renyi

VALID, AS_PUBLISHED = "valid", "as published"
EXAMPLES, DELTA = 60_000, 1e-5
LAYERS = 2
CACHE = Path(__file__).parents[1] / "results" / "budgets.json"
_known: dict[str, float] = {}


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a run of the paper's network does to the data, less its length; `noise` in the paper's units."""

    noise: float
    per_layer: bool = True
    lot_size: int = 600
    pca_noise: float | None = None
    examples: int = EXAMPLES

    @property
    def projection(self) -> Event:
        """The event of DP-PCA, if there was one."""
        return NOTHING if self.pca_noise is None else Gaussian(self.pca_noise)

    def event(self, steps: int, *, counting: str = VALID) -> Event:
        """The whole run: jointly, m layers with noise sigma each are one Gaussian with sigma / sqrt(m)."""
        rate = self.lot_size / self.examples
        layers = LAYERS if self.per_layer else 1
        if counting == AS_PUBLISHED:
            return self.projection + PoissonSampled(rate, Gaussian(self.noise)) * (steps * layers)
        return self.projection + PoissonSampled(rate, Gaussian(self.noise / math.sqrt(layers))) * steps

    def delta(self, steps: int, *, epsilon: float, counting: str = VALID) -> float:
        """Delta spent after so many steps at a fixed epsilon, as figure 2 shows it."""
        what = self.event(steps, counting=counting)
        return (moments if counting == AS_PUBLISHED else pld).delta(what, epsilon=epsilon).upper

    def longest(self, *, epsilon: float, delta: float = DELTA, counting: str = VALID, at_most: int = 10**6) -> int:
        """The most steps that stay within the budget; 0 where the projection alone exceeds it."""
        question = f"steps {counting} {self} {epsilon} {delta} {at_most}"

        def answer() -> float:
            projection = Cost(noise=self.noise, pca_noise=self.pca_noise)
            if projection.delta(0, epsilon=epsilon, counting=counting) > delta:
                return 0
            budget = Budget(epsilon=epsilon, delta=delta)
            accountant = "moments" if counting == AS_PUBLISHED else "pld"
            return calibrate.steps(
                lambda n: self.event(n, counting=counting), budget, accountant=accountant, at_most=at_most
            )

        return int(remembered(question, answer))


def noise_for(*, lot_size: int, steps: int, pca_noise: float | None, epsilon: float, examples: int = EXAMPLES) -> float:
    """The joint noise multiplier with which so many steps stay within (epsilon, 1e-5)."""

    def answer() -> float:
        projection = NOTHING if pca_noise is None else Gaussian(pca_noise)
        rate = lot_size / examples
        budget = Budget(epsilon=epsilon, delta=DELTA)
        found = calibrate.noise(lambda z: PoissonSampled(rate, Gaussian(z)) * steps, budget, spent=projection)
        return math.ceil(found * 1e5) / 1e5  # up, the private side: a little more than round-off can take away

    return remembered(f"noise {lot_size} {steps} {pca_noise} {epsilon} {examples}", answer)


def epsilons(what: Event, *, delta: float = DELTA) -> dict[str, float]:
    """Epsilon of an event by each accountant (upper bounds)."""
    return {
        "moments": moments.epsilon(what, delta=delta).upper,
        "renyi": renyi.epsilon(what, delta=delta).upper,
        "pld": pld.epsilon(what, delta=delta).upper,
    }


@cache
def spent(cost: Cost, steps: int, *, delta: float = DELTA) -> dict[str, float]:
    """Epsilon of a run by each accountant; clipped per layer also as the published code counts it, no guarantee."""
    found = epsilons(cost.event(steps), delta=delta)
    if cost.per_layer:
        published = moments.epsilon(cost.event(steps, counting=AS_PUBLISHED), delta=delta)
        found[f"{AS_PUBLISHED} (not valid)"] = published.upper
    return found


def remembered(question: str, answer: Callable[[], float]) -> float:
    """The answer from the file, or computed and kept there."""
    if not _known and CACHE.exists():
        _known.update(json.loads(CACHE.read_text()))
    if question not in _known:
        _known[question] = answer()
        CACHE.parent.mkdir(exist_ok=True)
        others = json.loads(CACHE.read_text()) if CACHE.exists() else {}  # another process may have added to it
        partial = CACHE.with_suffix(f".{os.getpid()}.part")
        partial.write_text(json.dumps(dict(sorted((others | _known).items())), indent=0) + "\n")
        partial.replace(CACHE)
    return _known[question]
