"""Events that hold others: a selection among runs, a choice, a division of the data, a group, a chance to fail."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from hush.accounting.composition import Composed, Event, check_number, check_whole, parts_of
from hush.accounting.selection import Trials


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
        _exact(self, "event")
        check_number(self, "mean", 0.0, math.inf)
        check_number(self, "shape", -1.0, math.inf)
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

    def __post_init__(self) -> None:
        _exact(self, "first", "second")


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
        check_number(self, "share", 0.0, 1.0)
        _exact(self, "first", "second")


@dataclass(frozen=True)
class Grouped(Event):
    """The same event seen by a group: the guarantee for `size` correlated records changed together."""

    size: int
    event: Event

    def __post_init__(self) -> None:
        check_whole(self, "size")
        if not isinstance(self.event, Event) or isinstance(
            self.event, Grouped | Composed | Approximate | Selected | Either | Split
        ):
            raise ValueError(f"Grouped holds one mechanism, got {type(self.event).__name__}; use events.grouped(...)")


@dataclass(frozen=True)
class Approximate(Event):
    """The event, but for outcomes of probability at most delta, in which anything may be revealed.

    An (epsilon, delta) black box is Approximate(delta, PureDP(epsilon)): no other is worse (Kairouz, Oh, Viswanath
    2015, Theorem 3.2). With a ZCDP event it is delta-approximate zCDP, with a moment bound the paper's (unpublished)
    approximate moments.
    """

    delta: float
    event: Event

    def __post_init__(self) -> None:
        check_number(self, "delta", 0.0, 1.0)
        if not isinstance(self.event, Event) or isinstance(self.event, Approximate):
            raise ValueError(f"Approximate holds an event that is exact, got {type(self.event).__name__}")


def either(events: Iterable[Event]) -> Event:
    """One of these events, chosen without a look at the data.

    >>> from hush.accounting.events import Gaussian
    >>> either([Gaussian(4.0), Gaussian(4.0)])
    Gaussian(noise_multiplier=4.0)
    """
    first, *others = dict.fromkeys(events)
    for other in others:
        first = Either(first, other)
    return first


def _exact(event: Event, *names: str) -> None:
    for name in names:
        held = getattr(event, name)
        if not isinstance(held, Event) or any(isinstance(part, Approximate) for part, _ in parts_of(held)):
            raise ValueError(f"{type(event).__name__} holds events that are exact, got {held!r} as {name}")
