"""What the command line takes for numbers: beyond these ranges nobody is protected, or nobody would see the end."""

import math
import os
from pathlib import Path

import typer

from hush.accounting import Budget

LEAST_DELTA = 1e-300
MOST_STEPS = 10**12
MOST_EPSILON = 1000.0


def count(text: str | int) -> int:
    """A whole number, also written as 1e4.

    >>> count("1e4"), count("12")
    (10000, 12)
    """
    if isinstance(text, int):  # a default
        return text
    try:
        value = int(text) if text.lstrip("+-").isdecimal() else float(text)
        whole = int(value)
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"{text[:50]!r} is not a whole number, such as 10000 or 1e4") from None
    if whole != value:
        raise typer.BadParameter(f"{text[:50]!r} is not a whole number")
    return whole


def path(text: str | Path) -> Path:
    """A path; an empty one would be the folder that one happens to stand in."""
    if isinstance(text, Path):
        return text
    longest = max((len(os.fsencode(part)) for part in text.split(os.sep)), default=0)
    if not text or "\0" in text or longest > 255 or len(text) > 4000:
        raise typer.BadParameter(f"{text[:50]!r}{'...' * (len(text) > 50)} is no path that a file can have")
    return Path(text)


def within(name: str, value: float, least: float, most: float) -> float:
    """The value; refused outside its range, and nan always."""
    if not least <= value <= most:
        raise ValueError(f"{name} must lie in [{least:g}, {most:g}], got {_shown(value)}")
    return value


def proper_delta(delta: float) -> float:
    """The delta; refused where it is none, or too small for a float's arithmetic."""
    if not LEAST_DELTA <= delta < 1:
        raise ValueError(f"delta must lie in (0, 1), at least {LEAST_DELTA:g}, got {_shown(delta)}")
    return delta


def proper_budget(epsilon: float, delta: float) -> Budget:
    """The budget; refused where it would protect nobody."""
    if not 1e-6 <= epsilon <= MOST_EPSILON:
        raise ValueError(
            f"epsilon must be a positive number from 1e-06 to {MOST_EPSILON:g} (more protects nobody), got "
            f"{_shown(epsilon)}"
        )
    return Budget(epsilon=epsilon, delta=proper_delta(delta))


def _shown(value: float) -> str:
    """A number that a person typed; a whole one of many digits is not written out."""
    return f"{value:g}" if isinstance(value, float) and math.isfinite(value) else str(value)[:50]
