"""What was done to the data, as frozen values; accountants interpret them, events compute nothing.

Adjacency is the same for every event: one record is replaced by a null record that contributes nothing
("zero-out": the add/remove of the literature with the number of records public). Sensitivities are therefore
those of one contribution (C, not 2C). Where an event says only what a mechanism satisfies (PureDP, ZCDP,
Approximate), it stands for the worst mechanism that does.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from hush.accounting.composition import (
    ADJACENCY,
    NOTHING,
    Composed,
    Event,
    Mechanism,
    check_number,
    check_whole,
    compose,
    parts_of,
)
from hush.accounting.compound import Approximate, Either, Grouped, Selected, Split, either

__all__ = [
    "ADJACENCY",
    "NOTHING",
    "ZCDP",
    "Allocated",
    "Approximate",
    "Composed",
    "DiscreteGaussian",
    "DiscreteLaplace",
    "Either",
    "Event",
    "Gaussian",
    "Grouped",
    "Laplace",
    "Mechanism",
    "PoissonSampled",
    "PureDP",
    "RandomisedResponse",
    "Selected",
    "Shuffled",
    "Split",
    "WithoutReplacement",
    "compose",
    "either",
    "from_dict",
    "grouped",
    "parts_of",
    "to_dict",
]

LEAST_NOISE, MOST_NOISE = 1e-100, 1e100  # beyond, squares leave the range of a float
MOST_OUTCOMES = 10**6


@dataclass(frozen=True)
class Gaussian(Mechanism):
    """Gaussian noise with standard deviation noise_multiplier times the L2 sensitivity.

    mu-Gaussian differential privacy is Gaussian(1 / mu).

    >>> Gaussian(4.0) * 3
    Composed(parts=((Gaussian(noise_multiplier=4.0), 3),))
    """

    noise_multiplier: float

    def __post_init__(self) -> None:
        check_number(self, "noise_multiplier", LEAST_NOISE, MOST_NOISE)


@dataclass(frozen=True)
class Laplace(Mechanism):
    """Laplace noise with scale noise_multiplier times the L1 sensitivity."""

    noise_multiplier: float

    def __post_init__(self) -> None:
        check_number(self, "noise_multiplier", LEAST_NOISE, MOST_NOISE)


@dataclass(frozen=True)
class PureDP(Mechanism):
    """Any mechanism of which only epsilon-differential privacy is known."""

    epsilon: float

    def __post_init__(self) -> None:
        check_number(self, "epsilon", 0.0, MOST_NOISE)


@dataclass(frozen=True)
class RandomisedResponse(Mechanism):
    """One of `options` answers, the true one e^epsilon times as likely as each of the others."""

    options: int
    epsilon: float

    def __post_init__(self) -> None:
        check_whole(self, "options", least=2)
        check_number(self, "epsilon", 0.0, MOST_NOISE)


@dataclass(frozen=True)
class DiscreteLaplace(Mechanism):
    """Whole numbers with noise z of probability proportional to e^(-|z| / scale); L1 sensitivity a whole number.

    Also for a vector: log-concave noise is worst where all of the change is in one coordinate, because along a line the
    same threshold tests are best between any two points of it.
    """

    scale: float
    sensitivity: int = 1

    def __post_init__(self) -> None:
        check_number(self, "scale", LEAST_NOISE, MOST_NOISE)
        check_whole(self, "sensitivity", most=MOST_OUTCOMES)


@dataclass(frozen=True)
class DiscreteGaussian(Mechanism):
    """One whole number with noise z of probability proportional to e^(-z^2 / (2 scale^2)).

    For a vector of L2 sensitivity s it is `ZCDP(s**2 / (2 * scale**2))` (Canonne, Kamath, Steinke 2020, Theorem 14).
    """

    scale: float
    sensitivity: int = 1

    def __post_init__(self) -> None:
        check_number(self, "scale", 1e-3, 1e4)  # a larger one is as good as Gaussian, and has too many outcomes
        check_whole(self, "sensitivity", most=MOST_OUTCOMES)


@dataclass(frozen=True)
class ZCDP(Event):
    """Any mechanism of which only rho-zero-concentrated differential privacy is known (Bun and Steinke 2016)."""

    rho: float

    def __post_init__(self) -> None:
        check_number(self, "rho", 0.0, MOST_NOISE)


@dataclass(frozen=True)
class PoissonSampled(Event):
    """The event on a random subset that every record enters independently with probability rate."""

    rate: float
    event: Mechanism

    def __post_init__(self) -> None:
        check_number(self, "rate", 0.0, 1.0)
        _one_mechanism(self)


@dataclass(frozen=True)
class WithoutReplacement(Event):
    """The event on lot_size of all the records, every such lot being equally likely."""

    lot_size: int
    examples: int
    event: Gaussian

    def __post_init__(self) -> None:
        check_whole(self, "lot_size")
        check_whole(self, "examples")
        if self.lot_size > self.examples:
            raise ValueError(f"lot_size must be at most examples, got {self.lot_size} of {self.examples}")
        if not isinstance(self.event, Gaussian):
            raise ValueError(f"WithoutReplacement holds one Gaussian mechanism, got {type(self.event).__name__}")


@dataclass(frozen=True)
class Allocated(Event):
    """One whole epoch of lots: every record independently joins one of steps_per_epoch lots, uniformly."""

    steps_per_epoch: int
    event: Mechanism

    def __post_init__(self) -> None:
        check_whole(self, "steps_per_epoch")
        _one_mechanism(self)


@dataclass(frozen=True)
class Shuffled(Event):
    """One epoch, whole or begun, of a random permutation cut into lots of fixed size.

    Under zero-out a record takes part in exactly one lot of the epoch, so the epoch costs at most what the event costs
    once. No amplification by the shuffle is claimed.
    """

    steps_per_epoch: int
    event: Mechanism

    def __post_init__(self) -> None:
        check_whole(self, "steps_per_epoch")
        _one_mechanism(self)


KINDS = (
    Gaussian,
    Laplace,
    PureDP,
    RandomisedResponse,
    DiscreteLaplace,
    DiscreteGaussian,
    ZCDP,
    PoissonSampled,
    WithoutReplacement,
    Allocated,
    Shuffled,
    Selected,
    Either,
    Split,
    Grouped,
    Approximate,
)


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
    kinds: dict[str, Any] = {kind.__name__: kind for kind in KINDS}
    name = values.get("kind")
    if name == "Composed":
        return compose((from_dict(part), count) for part, count in values["parts"])
    if name not in kinds:
        raise ValueError(f"expected one of {', '.join(kinds)}, Composed; got {name!r}")
    held = {k: from_dict(v) if isinstance(v, Mapping) else v for k, v in values.items() if k != "kind"}
    unknown = held.keys() ^ {f.name for f in fields(kinds[name])}
    if unknown:
        raise ValueError(f"{name} does not hold exactly these: {', '.join(sorted(map(str, unknown)))}")
    return kinds[name](**held)


def _one_mechanism(event: Any) -> None:
    if isinstance(event, PoissonSampled) and isinstance(event.event, Selected):
        return  # tuned on a random part of the data
    if not isinstance(event.event, Mechanism):
        raise ValueError(
            f"{type(event).__name__} holds one mechanism, such as Gaussian, got {type(event.event).__name__}"
        )
