"""Composition: events counted together in normal form, and the checks of their values."""

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar

ADJACENCY = "zero-out"
MOST_TIMES = 10**15


class Event:
    """One mechanism applied to the data. `event * n` repeats it, `a + b` composes."""

    adjacency: ClassVar[str] = ADJACENCY

    def __mul__(self, count: int) -> "Event":
        return compose([(self, count)])

    __rmul__ = __mul__

    def __add__(self, other: "Event") -> "Event":
        if not isinstance(other, Event):
            return NotImplemented
        return compose([(self, 1), (other, 1)])


class Mechanism(Event):
    """One application to whatever records came, of which lots may be drawn."""


@dataclass(frozen=True)
class Composed(Event):
    """Several events after one another, as (event, count) pairs; built by `+` and `*`, in normal form."""

    parts: tuple[tuple[Event, int], ...] = ()

    def __post_init__(self) -> None:
        for event, count in self.parts:
            if not isinstance(event, Event) or isinstance(event, Composed):
                raise ValueError(f"Composed holds single events, got {type(event).__name__}; use events.compose(...)")
            if type(count) is not int or count < 1:
                raise ValueError(
                    f"Composed counts events by whole numbers >= 1, got {count!r}; use events.compose(...)"
                )


NOTHING = Composed()


def compose(pairs: Iterable[tuple[Event, int]]) -> Event:
    """Put (event, count) pairs in normal form: flat, equal events counted together, zero counts dropped.

    Counts are whole numbers >= 0: nothing that was done to the data is ever taken back.
    """
    counts: dict[Event, int] = {}
    for event, count in pairs:
        times = whole_number("the number of times an event is repeated", count, least=0)
        for part, n in parts_of(event):
            counts[part] = counts.get(part, 0) + n * times
    if counts and max(counts.values()) > MOST_TIMES:
        raise ValueError(f"an event is repeated at most 10^15 times, got {max(counts.values())}")
    return Composed(tuple(sorted(((e, n) for e, n in counts.items() if n), key=repr)))


def parts_of(event: Event) -> tuple[tuple[Event, int], ...]:
    """The event as (mechanism, count) pairs: the one place where composition is taken apart."""
    if not isinstance(event, Event):
        raise ValueError(f"expected an event of hush.accounting, got {type(event).__name__}")
    return event.parts if isinstance(event, Composed) else ((event, 1),)


def whole_number(name: str, value: Any, *, least: int) -> int:
    """The value as Python's int, also from numpy's whole numbers; a float never counts, nor does True."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least or isinstance(value, bool):
        raise ValueError(f"{name} must be a whole number >= {least}, got {value!r}")
    return number


def check_number(event: Event, name: str, least: float, most: float) -> None:
    """The field as a Python float of this range, or an error that names it."""
    value = getattr(event, name)
    number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    if not least <= number <= most:
        kind = "be a positive number in" if least > 0 else "lie in"
        raise ValueError(f"{name} must {kind} [{least:g}, {most:g}], got {value!r}")
    object.__setattr__(event, name, number)


def check_whole(event: Event, name: str, least: int = 1, most: int = MOST_TIMES) -> None:
    """The field as a Python int of this range, or an error that names it."""
    value = whole_number(name, getattr(event, name), least=least)
    if value > most:
        raise ValueError(f"{name} must be at most {most}, got {value}")
    object.__setattr__(event, name, value)
