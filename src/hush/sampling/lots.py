"""Which examples make up lot t: three ways of drawing, each with the event that it really is.

A *unit* is what is charged at once: one lot for Poisson sampling, one epoch for the two others. Small lots are drawn
many at a time, since a draw costs about the same for one as for a hundred.
Sizes, rates and indices only; an example, a label or a model never comes here.
"""

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any, Literal

import numpy as np

from hush.accounting.events import Allocated, Event, Gaussian, PoissonSampled, Shuffled
from hush.randomness.streams import Stream
from hush.sampling.draws import Indices, binomials, permutation, subsets

Sampling = Literal["poisson", "allocated", "shuffled"]
_CHUNK = 1 << 20
_DRAWN_AT_ONCE = 1 << 16  # expected indices: half a megabyte


class Lots(ABC):
    """How lots are drawn from `examples` records; `lot_size` is the public constant L that sums are divided by."""

    examples: int
    lot_size: int
    steps_per_epoch: int
    steps_per_unit: int
    units_per_draw: int = 1

    @abstractmethod
    def event(self, noise: float) -> Event:
        """What one unit does to the data when every sum in it gets noise of this multiplier (at least)."""

    @abstractmethod
    def draw(self, stream: Stream) -> Sequence[Indices]:
        """The lots of `units_per_draw` units, in their order; the stream must be used for nothing else."""

    def units(self, steps: int, noise: float | Sequence[float]) -> tuple[tuple[Event, int], ...]:
        """The events of the first `steps` steps in their order, as (event of a unit, how many times).

        A unit that has begun counts whole. Where the noise varies inside a unit, the smallest counts for all of it
        (more noise is the same release with noise added afterwards).
        """
        if isinstance(noise, float | int):
            count = -(-steps // self.steps_per_unit)
            return ((self.event(noise), count),) if count else ()
        runs: list[tuple[Event, int]] = []
        for start in range(0, steps, self.steps_per_unit):
            event = self.event(min(noise[start : start + self.steps_per_unit]))
            count = runs.pop()[1] if runs and runs[-1][0] == event else 0
            runs.append((event, count + 1))
        return tuple(runs)

    def to_dict(self) -> dict[str, Any]:
        """The lots as plain JSON values."""
        return {"kind": type(self).__name__} | {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class PoissonLots(Lots):
    """Every example enters every lot independently with probability lot_size / examples.

    Guarantee: the drawn subset has exactly this law, up to a total variation below 1e-30 (the binomial size is
    looked up with 128 random bits, the members are exactly uniform). A draw takes time and memory of its lots, not
    of the dataset. Lots vary in size and may be empty; an empty lot is still a step.

    >>> PoissonLots(examples=60_000, lot_size=600).rate
    0.01
    """

    examples: int
    lot_size: int

    def __post_init__(self) -> None:
        _check_sizes(self.examples, self.lot_size)

    @property
    def rate(self) -> float:
        """The sampling probability, rounded up where it is not a float."""
        exact = Fraction(self.lot_size, self.examples)
        nearest = float(exact)
        return nearest if Fraction(nearest) >= exact else math.nextafter(nearest, math.inf)

    @property
    def steps_per_epoch(self) -> int:  # type: ignore[override]
        """How many lots it takes, rounded up, until every example is expected to have been used once."""
        return -(-self.examples // self.lot_size)

    @property
    def steps_per_unit(self) -> int:  # type: ignore[override]
        return 1

    @property
    def units_per_draw(self) -> int:  # type: ignore[override]
        return max(1, min(128, _DRAWN_AT_ONCE // self.lot_size))

    def event(self, noise: float) -> Event:
        return PoissonSampled(self.rate, Gaussian(noise))

    def draw(self, stream: Stream) -> Sequence[Indices]:
        return subsets(stream, self.examples, binomials(stream, self.examples, self.lot_size, self.units_per_draw))


@dataclass(frozen=True, kw_only=True)
class AllocatedLots(Lots):
    """In every epoch each example independently joins one of the epoch's lots, uniformly (balls into bins).

    Guarantee: exactly that law, and each example is used once per epoch. Lots vary in size. An epoch is one unit: it
    is charged whole before its first lot. Give the expected size of a lot or the steps of an epoch, the other follows
    (rounded up). Drawing an epoch needs about 12 bytes of memory for each example.

    >>> AllocatedLots(examples=60_000, lot_size=600).steps_per_epoch
    100
    >>> AllocatedLots(examples=60_000, steps_per_epoch=7).lot_size
    8572
    """

    examples: int
    lot_size: int = 0
    steps_per_epoch: int = 0

    def __post_init__(self) -> None:
        if not self.lot_size and not self.steps_per_epoch:
            raise ValueError("AllocatedLots needs lot_size or steps_per_epoch")
        size = self.lot_size or -(-self.examples // self.steps_per_epoch)
        steps = self.steps_per_epoch or -(-self.examples // self.lot_size)
        _check_sizes(self.examples, size)
        _check_sizes(self.examples, steps, "steps_per_epoch")
        if size != -(-self.examples // steps) and steps != -(-self.examples // size):
            raise ValueError(
                f"{self.examples} examples in {steps} lots are not lots of {size}; give only one of the two"
            )
        object.__setattr__(self, "lot_size", size)
        object.__setattr__(self, "steps_per_epoch", steps)

    @property
    def steps_per_unit(self) -> int:  # type: ignore[override]
        return self.steps_per_epoch

    def event(self, noise: float) -> Event:
        return Allocated(self.steps_per_epoch, Gaussian(noise))

    def draw(self, stream: Stream) -> Sequence[Indices]:
        chosen = np.empty(self.examples, np.min_scalar_type(self.steps_per_epoch))
        for start in range(0, self.examples, _CHUNK):
            count = min(_CHUNK, self.examples - start)
            chosen[start : start + count] = stream.below(self.steps_per_epoch, count)
        members = np.argsort(chosen, kind="stable")
        ends = np.cumsum(np.bincount(chosen, minlength=self.steps_per_epoch))
        return np.split(members, ends[:-1])


@dataclass(frozen=True, kw_only=True)
class ShuffledLots(Lots):
    """A random permutation of all examples, cut into lots of `lot_size` (the last of an epoch may be smaller).

    Guarantee: the permutation is exactly uniform, and each example is used once per epoch. This is what the paper
    runs in practice; its event claims no amplification by sampling. An epoch is one unit: it is charged whole before
    its first lot.

    >>> ShuffledLots(examples=93, lot_size=10).steps_per_epoch
    10
    """

    examples: int
    lot_size: int

    def __post_init__(self) -> None:
        _check_sizes(self.examples, self.lot_size)

    @property
    def steps_per_epoch(self) -> int:  # type: ignore[override]
        return -(-self.examples // self.lot_size)

    @property
    def steps_per_unit(self) -> int:  # type: ignore[override]
        return self.steps_per_epoch

    def event(self, noise: float) -> Event:
        return Shuffled(self.steps_per_epoch, Gaussian(noise))

    def draw(self, stream: Stream) -> Sequence[Indices]:
        order = permutation(stream, self.examples)
        return [order[start : start + self.lot_size] for start in range(0, self.examples, self.lot_size)]


def from_dict(values: dict[str, Any]) -> Lots:
    """The lots that `to_dict` wrote.

    >>> from_dict(ShuffledLots(examples=100, lot_size=10).to_dict())
    ShuffledLots(examples=100, lot_size=10)
    """
    kinds: dict[str, type[PoissonLots] | type[AllocatedLots] | type[ShuffledLots]] = {
        kind.__name__: kind for kind in (PoissonLots, AllocatedLots, ShuffledLots)
    }
    name = values.get("kind")
    if name not in kinds:
        raise ValueError(f"expected one of {', '.join(kinds)}; got {name!r}")
    return kinds[name](**{key: value for key, value in values.items() if key != "kind"})


def lots_of(sampling: Sampling, examples: int, lot_size: int) -> Lots:
    """Lots that are drawn the way that is named."""
    kinds: dict[str, type[PoissonLots] | type[AllocatedLots] | type[ShuffledLots]] = {
        "poisson": PoissonLots, "allocated": AllocatedLots, "shuffled": ShuffledLots,
    }  # fmt: skip
    if sampling not in kinds:
        raise ValueError(f"sampling must be one of poisson, allocated, shuffled; got {str(sampling)[:50]!r}")
    return kinds[sampling](
        examples=int(examples), lot_size=operator.index(lot_size) if _is_whole(lot_size) else lot_size
    )


def _is_whole(value: Any) -> bool:
    """Whether it is a whole number, numpy's too; a flag is none."""
    return hasattr(value, "__index__") and not isinstance(value, bool)


def steps_of(lots: Lots, epochs: float | None, steps: int | None) -> int:
    """Lots in all the epochs, or as many as are named."""
    if (epochs is None) == (steps is None):
        raise ValueError(f"give epochs or steps, one of the two, got epochs={epochs!r} and steps={steps!r}")
    if epochs is None:
        assert steps is not None
        return steps
    if isinstance(epochs, bool) or not isinstance(epochs, int | float) or not 0 < epochs <= 1e9:
        raise ValueError(f"epochs must be a number from 0 to 1e9, and not 0, got {epochs!r}")
    return max(1, round(epochs * lots.steps_per_epoch))


def _check_sizes(examples: int, size: int, name: str = "lot_size") -> None:
    for label, value in (("examples", examples), (name, size)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{label} must be a whole number >= 1, got {value!r}")
    if size > examples:
        raise ValueError(f"{name} must be at most the number of examples, {examples}, got {size}")
