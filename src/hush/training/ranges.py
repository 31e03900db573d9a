"""What an argument may be: checked once, where it comes in, and said in one line."""

import math
import numbers
from typing import Any

from hush.ledger.plain import short

MOST = 10**12  # steps, sizes, epochs: more of them would never end


def whole(name: str, value: Any, *, least: int, most: int = MOST) -> int:
    """The value as an int; numpy's whole numbers are taken, True and 3.0 are not.

    >>> whole("reserve", 2.5, least=0)
    Traceback (most recent call last):
    ...
    ValueError: reserve must be a whole number from 0 to 1000000000000, got 2.5
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not least <= int(value) <= most:
        raise ValueError(f"{name} must be a whole number from {least} to {most}, got {short(repr(value))}")
    return int(value)


def number(name: str, value: Any, *, least: float, most: float) -> float:
    """The value as a float, from `least` to `most`; never nan, never a flag, never text.

    >>> number("epochs", float("nan"), least=0.0, most=10.0)
    Traceback (most recent call last):
    ...
    ValueError: epochs must be a number from 0 to 10, got nan
    """
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not real or not math.isfinite(value) or not least <= value <= most:
        raise ValueError(f"{name} must be a number from {least:g} to {most:g}, got {short(repr(value))}")
    return float(value)


def one_of(name: str, value: Any, known: tuple[Any, ...]) -> None:
    """Refuse what is not one of the known values (1 is not True)."""
    if not any(value is one or (type(value) is type(one) and value == one) for one in known):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}; got {short(repr(value))}")


def text(name: str, value: Any, *, least: int = 0) -> None:
    """Refuse what is no text, or text that nobody can print in a line."""
    if not isinstance(value, str) or not least <= len(value) <= 10_000:
        raise ValueError(f"{name} must be text of {least} to 10,000 characters, got {short(repr(value))}")
