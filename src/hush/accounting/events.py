"""What was done to the data, as frozen values; accountants interpret them, events compute nothing.

Adjacency is the same for every event: one record is replaced by a null record that contributes nothing
("zero-out": the add/remove of the literature with the number of records public). Sensitivities are therefore
those of one contribution (C, not 2C).
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from hush.accounting.selection import Trials

ADJACENCY = "zero-out"


class Event:
    """One mechanism applied to the data. `event * n` repeats it, `a + b` composes."""

    adjacency: ClassVar[str] = ADJACENCY

    def __mul__(self, count: int) -> "Event":
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise ValueError(f"an event is repeated a whole number of times >= 0, got {count!r}")
        return compose([(self, count)])

    __rmul__ = __mul__

    def __add__(self, other: "Event") -> "Event":
        if not isinstance(other, Event):
            return NotImplemented
        return compose([(self, 1), (other, 1)])


@dataclass(frozen=True)
class Gaussian(Event):
    """Gaussian noise with standard deviation noise_multiplier times the L2 sensitivity.

    >>> Gaussian(4.0) * 3
    Composed(parts=((Gaussian(noise_multiplier=4.0), 3),))
    """

    noise_multiplier: float

    def __post_init__(self) -> None:
        _positive("noise_multiplier", self.noise_multiplier)


@dataclass(frozen=True)
class Laplace(Event):
    """Laplace noise with scale noise_multiplier times the L1 sensitivity."""

    noise_multiplier: float

    def __post_init__(self) -> None:
        _positive("noise_multiplier", self.noise_multiplier)


@dataclass(frozen=True)
class PureDP(Event):
    """Any mechanism of which only epsilon-differential privacy is known."""

    epsilon: float

    def __post_init__(self) -> None:
        if not (self.epsilon >= 0 and math.isfinite(self.epsilon)):
            raise ValueError(f"epsilon must be a number >= 0, got {self.epsilon!r}")


@dataclass(frozen=True)
class PoissonSampled(Event):
    """The event on a random subset that every record enters independently with probability rate."""

    rate: float
    event: Event

    def __post_init__(self) -> None:
        if not 0 <= self.rate <= 1:
            raise ValueError(f"rate must lie in [0, 1], got {self.rate!r}")
        _single("PoissonSampled", self.event)


@dataclass(frozen=True)
class Allocated(Event):
    """One whole epoch of lots: every record independently joins one of steps_per_epoch lots, uniformly."""

    steps_per_epoch: int
    event: Event

    def __post_init__(self) -> None:
        _whole("steps_per_epoch", self.steps_per_epoch)
        _single("Allocated", self.event)


@dataclass(frozen=True)
class Shuffled(Event):
    """One epoch, whole or begun, of a random permutation cut into lots of fixed size.

    Under zero-out a record takes part in exactly one lot of the epoch, so the epoch costs what the event costs
    once. No amplification by the shuffle is claimed.
    """

    steps_per_epoch: int
    event: Event

    def __post_init__(self) -> None:
        _whole("steps_per_epoch", self.steps_per_epoch)
        _single("Shuffled", self.event)


@dataclass(frozen=True)
class Selected(Event):
    """The event run a random number of times, only the best result released (`hush.tuning`).

    `rule`, `mean` and `shape` say how the number of runs is drawn: see `selection.Trials`. The number itself, and
    every result but the best one, must stay unknown.
    """

    event: Event
    rule: str
    mean: float
    shape: float = 1.0

    def __post_init__(self) -> None:
        Trials(self.rule, self.mean, self.shape)  # refuses what is no law

    @property
    def trials(self) -> Trials:
        """The law of the number of runs."""
        return Trials(self.rule, self.mean, self.shape)


@dataclass(frozen=True)
class Either(Event):
    """One of two mechanisms, chosen without a look at the data (at random, say): never dearer than the dearer one."""

    first: Event
    second: Event


@dataclass(frozen=True)
class Split(Event):
    """The data divided at random: every record enters the first mechanism with probability share, or else the second.

    The second may depend on the result of the first. A record takes part in one of them, so delta is the weighted
    mean of their deltas at every epsilon (Koskela and Kulkarni 2023, their first variant).
    """

    share: float
    first: Event
    second: Event

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"share must lie in [0, 1], got {self.share!r}")


@dataclass(frozen=True)
class Grouped(Event):
    """The same event seen by a group: the guarantee for `size` correlated records changed together."""

    size: int
    event: Event

    def __post_init__(self) -> None:
        _whole("size", self.size)
        if isinstance(self.event, Grouped | Composed | Selected | Either | Split):
            raise ValueError(f"Grouped holds one mechanism, got {type(self.event).__name__}; use events.grouped(...)")


@dataclass(frozen=True)
class Composed(Event):
    """Several events after one another, as (event, count) pairs; built by `+` and `*`, in normal form."""

    parts: tuple[tuple[Event, int], ...] = ()


NOTHING = Composed()


def compose(pairs: Iterable[tuple[Event, int]]) -> Event:
    """Put (event, count) pairs in normal form: flat, equal events counted together, zero counts dropped."""
    counts: dict[Event, int] = {}
    for event, count in pairs:
        inner = event.parts if isinstance(event, Composed) else ((event, 1),)
        for part, n in inner:
            counts[part] = counts.get(part, 0) + n * count
    return Composed(tuple(sorted(((e, n) for e, n in counts.items() if n), key=repr)))


def parts_of(event: Event) -> tuple[tuple[Event, int], ...]:
    """The event as (mechanism, count) pairs: the one place where composition is taken apart."""
    return event.parts if isinstance(event, Composed) else ((event, 1),)


def grouped(event: Event, size: int) -> Event:
    """The event as a group of `size` records sees it, mechanism by mechanism.

    >>> grouped(Gaussian(4.0) * 2, 3)
    Composed(parts=((Grouped(size=3, event=Gaussian(noise_multiplier=4.0)), 2),))
    """
    return compose((part if size == 1 else _grouped(part, size), count) for part, count in parts_of(event))


def _grouped(part: Event, size: int) -> Event:
    match part:
        case Selected(inner, rule, mean, shape):  # the same selection among trials that a group sees
            return Selected(grouped(inner, size), rule, mean, shape)
        case Either(first, second):
            return Either(grouped(first, size), grouped(second, size))
        case Split(_, first, second):  # the group's records may enter both
            return grouped(first, size) + grouped(second, size)
        case PoissonSampled(_, Selected() as inner):
            return _grouped(inner, size)
    return Grouped(size, part)


def either(events: Iterable[Event]) -> Event:
    """One of these events, chosen without a look at the data.

    >>> either([Gaussian(4.0), Gaussian(4.0)])
    Gaussian(noise_multiplier=4.0)
    """
    first, *others = dict.fromkeys(events)
    for other in others:
        first = Either(first, other)
    return first


def to_dict(event: Event) -> dict[str, Any]:
    """The event as plain JSON values."""
    if isinstance(event, Composed):
        return {"kind": "Composed", "parts": [[to_dict(part), count] for part, count in event.parts]}
    values = {f.name: getattr(event, f.name) for f in fields(event)}  # type: ignore[arg-type]
    return {"kind": type(event).__name__} | {k: to_dict(v) if isinstance(v, Event) else v for k, v in values.items()}


def from_dict(values: Mapping[str, Any]) -> Event:
    """The event that `to_dict` wrote; a name that is not an event is refused.

    >>> from_dict(to_dict(PoissonSampled(0.01, Gaussian(4.0)) * 10)) == PoissonSampled(0.01, Gaussian(4.0)) * 10
    True
    """
    kinds: dict[str, Any] = {
        kind.__name__: kind
        for kind in (Gaussian, Laplace, PureDP, PoissonSampled, Allocated, Shuffled, Selected, Either, Split, Grouped)
    }
    name = values.get("kind")
    if name == "Composed":
        return compose((from_dict(part), count) for part, count in values["parts"])
    if name not in kinds:
        raise ValueError(f"expected one of {', '.join(kinds)}, Composed; got {name!r}")
    return kinds[name](**{k: from_dict(v) if isinstance(v, Mapping) else v for k, v in values.items() if k != "kind"})


def _positive(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} must be a positive number, got {value!r}")


def _whole(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a whole number >= 1, got {value!r}")


def _single(outer: str, event: Event) -> None:
    kinds = Gaussian | Laplace | PureDP | (Selected if outer == "PoissonSampled" else PureDP)
    if not isinstance(event, kinds):
        raise ValueError(f"{outer} holds one Gaussian, Laplace or PureDP mechanism, got {type(event).__name__}")
