"""Budget, what a person allows; Bounds, what an accountant answers."""

import math
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Context


@dataclass(frozen=True)
class Bounds:
    """A certified interval around a number that cannot be computed exactly; quote `upper`.

    >>> Bounds(0.9467, 0.9469).upper
    0.9469
    """

    lower: float
    upper: float

    def __post_init__(self) -> None:
        if not 0 <= self.lower <= self.upper:
            raise ValueError(f"expected 0 <= lower <= upper, got lower={self.lower}, upper={self.upper}")

    def __str__(self) -> str:
        return f"{rounded_up(self.upper)} (at least {_rounded(self.lower, ROUND_FLOOR)})"


@dataclass(frozen=True, kw_only=True)
class Budget:
    """An (epsilon, delta) that must not be exceeded.

    >>> Budget(epsilon=2.0, delta=1e-5)
    Budget(epsilon=2.0, delta=1e-05)
    """

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        if not (self.epsilon > 0 and math.isfinite(self.epsilon)):
            raise ValueError(f"epsilon must be a positive number, got {self.epsilon}")
        if not 0 < self.delta < 1:
            raise ValueError(f"delta must lie in (0, 1), got {self.delta}")


def rounded_up(value: float, digits: int = 4) -> str:
    """So many digits of a cost, never below it: what is printed is a bound as well. A number counts as its decimals.

    >>> rounded_up(1.03001), rounded_up(0.1), rounded_up(1.2345649e-05, 6)
    ('1.031', '0.1', '1.23457e-05')
    """
    return _rounded(value, ROUND_CEILING, digits)


def _rounded(value: float, rounding: str, digits: int = 4) -> str:
    rounded = Context(prec=digits, rounding=rounding).create_decimal(repr(float(value)))
    return f"{float(rounded):.{digits}g}"
