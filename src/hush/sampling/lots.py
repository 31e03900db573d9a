"""Which examples make up lot t: three ways of drawing, each with the event that it really is.

A *unit* is what is charged at once: one lot for Poisson sampling, one epoch for the two others. Small lots are drawn
many at a time, since a draw costs about the same for one as for a hundred.
Sizes, rates and indices only; an example, a label or a model never comes here.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any, Literal, TypeVar, overload

import numpy as np
import torch

from hush.accounting.events import Allocated, Event, Gaussian, PoissonSampled, Shuffled
from hush.randomness.streams import Stream
from hush.sampling.batches import Handed, PaddedBatch, padded
from hush.sampling.draws import Indices, binomials, permutation, subsets

T = TypeVar("T")
_CHUNK = 1 << 20
_DRAWN_AT_ONCE = 1 << 16  # expected indices: half a megabyte


class Lots(ABC):
    """How lots are drawn from `examples` records; `expected_size` is the public constant L that sums are divided by."""

    examples: int
    expected_size: int
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


@dataclass(frozen=True)
class PoissonLots(Lots):
    """Every example enters every lot independently with probability expected_size / examples.

    Guarantee: the drawn subset has exactly this law, up to a total variation below 1e-30 (the binomial size is
    looked up with 128 random bits, the members are exactly uniform). A draw takes time and memory of its lots, not
    of the dataset. Lots vary in size and may be empty; an empty lot is still a step.

    >>> PoissonLots(examples=60_000, expected_size=600).rate
    0.01
    """

    examples: int
    expected_size: int

    def __post_init__(self) -> None:
        _check_sizes(self.examples, self.expected_size)

    @property
    def rate(self) -> float:
        """The sampling probability, rounded up where it is not a float."""
        exact = Fraction(self.expected_size, self.examples)
        nearest = float(exact)
        return nearest if Fraction(nearest) >= exact else math.nextafter(nearest, math.inf)

    @property
    def steps_per_epoch(self) -> int:  # type: ignore[override]
        """How many lots it takes, rounded up, until every example is expected to have been used once."""
        return -(-self.examples // self.expected_size)

    @property
    def steps_per_unit(self) -> int:  # type: ignore[override]
        return 1

    @property
    def units_per_draw(self) -> int:  # type: ignore[override]
        return max(1, min(128, _DRAWN_AT_ONCE // self.expected_size))

    def event(self, noise: float) -> Event:
        return PoissonSampled(self.rate, Gaussian(noise))

    def draw(self, stream: Stream) -> Sequence[Indices]:
        return subsets(stream, self.examples, binomials(stream, self.examples, self.expected_size, self.units_per_draw))


@dataclass(frozen=True)
class AllocatedLots(Lots):
    """In every epoch each example independently joins one of the epoch's lots, uniformly (balls into bins).

    Guarantee: exactly that law, and each example is used once per epoch. Lots vary in size. An epoch is one unit: it
    is charged whole before its first lot. Give the expected size of a lot or the steps of an epoch, the other follows
    (rounded up). Drawing an epoch needs about 12 bytes of memory for each example.

    >>> AllocatedLots(examples=60_000, expected_size=600).steps_per_epoch
    100
    >>> AllocatedLots(examples=60_000, steps_per_epoch=7).expected_size
    8572
    """

    examples: int
    expected_size: int = 0
    steps_per_epoch: int = 0

    def __post_init__(self) -> None:
        if not self.expected_size and not self.steps_per_epoch:
            raise ValueError("AllocatedLots needs expected_size or steps_per_epoch")
        size = self.expected_size or -(-self.examples // self.steps_per_epoch)
        steps = self.steps_per_epoch or -(-self.examples // self.expected_size)
        _check_sizes(self.examples, size)
        _check_sizes(self.examples, steps, "steps_per_epoch")
        if size != -(-self.examples // steps) and steps != -(-self.examples // size):
            raise ValueError(
                f"{self.examples} examples in {steps} lots are not lots of {size}; give only one of the two"
            )
        object.__setattr__(self, "expected_size", size)
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


@dataclass(frozen=True)
class ShuffledLots(Lots):
    """A random permutation of all examples, cut into lots of `size` (the last of an epoch may be smaller).

    Guarantee: the permutation is exactly uniform, and each example is used once per epoch. This is what the paper
    runs in practice; its event claims no amplification by sampling. An epoch is one unit: it is charged whole before
    its first lot.

    >>> ShuffledLots(examples=93, size=10).steps_per_epoch
    10
    """

    examples: int
    size: int

    def __post_init__(self) -> None:
        _check_sizes(self.examples, self.size)

    @property
    def expected_size(self) -> int:  # type: ignore[override]
        return self.size

    @property
    def steps_per_epoch(self) -> int:  # type: ignore[override]
        return -(-self.examples // self.size)

    @property
    def steps_per_unit(self) -> int:  # type: ignore[override]
        return self.steps_per_epoch

    def event(self, noise: float) -> Event:
        return Shuffled(self.steps_per_epoch, Gaussian(noise))

    def draw(self, stream: Stream) -> Sequence[Indices]:
        order = permutation(stream, self.examples)
        return [order[start : start + self.size] for start in range(0, self.examples, self.size)]


def from_dict(values: dict[str, Any]) -> Lots:
    """The lots that `to_dict` wrote.

    >>> from_dict(ShuffledLots(100, 10).to_dict())
    ShuffledLots(examples=100, size=10)
    """
    kinds: dict[str, type[PoissonLots] | type[AllocatedLots] | type[ShuffledLots]] = {
        kind.__name__: kind for kind in (PoissonLots, AllocatedLots, ShuffledLots)
    }
    name = values.get("kind")
    if name not in kinds:
        raise ValueError(f"expected one of {', '.join(kinds)}; got {name!r}")
    return kinds[name](**{key: value for key, value in values.items() if key != "kind"})


class Lot:
    """The examples of one step. Its indices and its size are private: they must not be shown or decided upon.

    Guarantee: `batches` and `padded_batches` hand out each example once; asking again raises, since an example that is
    used twice in a step would move it by 2C.
    """

    def __init__(self, step: int, indices: Indices) -> None:
        self.step = step
        self.indices = indices
        self.in_hand: Handed | None = None
        """The batch that was handed out last, until it is given to backward."""
        self._handed_out = False

    @overload
    def batches(self, size: int, pad: Literal[False] = False) -> Iterator[torch.Tensor]: ...
    @overload
    def batches(self, size: int, pad: Literal[True]) -> Iterator[PaddedBatch]: ...
    def batches(self, size: int, pad: bool = False) -> Iterator[torch.Tensor] | Iterator[PaddedBatch]:
        """The lot as index tensors of at most `size` examples; an empty lot has none.

        What is left after full batches comes as up to two smaller ones, so that few different shapes occur in a run.
        With `pad` as (index, mask) of exactly `size` rows, for code that wants fixed shapes. A lot that is larger than
        expected spills into one more batch; nothing is ever cut off.
        """
        if pad:
            return self.hand_out(padded(self.cut(size), size))
        return self.hand_out((Handed(len(index), size), index) for index in self.pieces(size))

    def cut(self, size: int) -> list[Indices]:
        """The indices, `size` at a time."""
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"a physical batch holds a whole number of examples >= 1, got {size!r}")
        count = len(self.indices)
        if 0 < count <= size:
            return [self.indices]
        return [self.indices[start : start + size] for start in range(0, count, size)]

    def split(self, size: int) -> list[torch.Tensor]:
        """The indices as tensors, `size` at a time."""
        return [torch.from_numpy(indices) for indices in self.cut(size)]

    def pieces(self, size: int) -> list[torch.Tensor]:
        """As `split`, with the last batch cut at a multiple of sqrt(size): then it has few sizes, not up to `size`."""
        pieces = self.split(size)
        unit = math.isqrt(size - 1) + 1
        if pieces and len(pieces[-1]) < size and len(pieces[-1]) % unit and len(pieces[-1]) > unit:
            rest = pieces.pop()
            pieces += torch.split(rest, len(rest) // unit * unit)
        return pieces

    def hand_out(self, batches: Iterable[tuple[Handed, T]]) -> Iterator[T]:
        """Yield batches given as (what they are, batch), noting which one is in hand, once in the life of the lot."""
        if self._handed_out:
            raise RuntimeError(
                f"the batches of lot {self.step} were already handed out; an example may be used once in a step. "
                "Keep the batches of the first call, or call private.restart() to begin this lot again"
            )
        self._handed_out = True
        return self._noting(batches)

    def _noting(self, batches: Iterable[tuple[Handed, T]]) -> Iterator[T]:
        for handed, batch in batches:
            self.in_hand = handed
            yield batch
        self.in_hand = None

    def restart(self) -> None:
        """Let the batches be handed out again; only right when nothing of them is kept (see Private.restart)."""
        self._handed_out, self.in_hand = False, None


def _check_sizes(examples: int, size: int, name: str = "the size of a lot") -> None:
    for label, value in (("examples", examples), (name, size)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{label} must be a whole number >= 1, got {value!r}")
    if size > examples:
        raise ValueError(f"{name} must be at most the number of examples, got {size} of {examples}")
