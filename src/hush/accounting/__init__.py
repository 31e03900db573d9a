"""What was done to the data -> epsilon. Numbers only: numpy and scipy, no data, no randomness."""

from hush.accounting import calibrate, moments, pld, renyi, strong
from hush.accounting.accountants import ACCOUNTANTS, NOT_VALID, Accountant, delta, epsilon
from hush.accounting.bounds import Bounds, Budget, rounded_up
from hush.accounting.events import (
    ADJACENCY,
    NOTHING,
    Allocated,
    Composed,
    Event,
    Gaussian,
    Grouped,
    Laplace,
    PoissonSampled,
    PureDP,
    Shuffled,
    compose,
    from_dict,
    grouped,
    parts_of,
    to_dict,
)
from hush.accounting.filters import BudgetExceeded, Filter, Odometer
from hush.accounting.moments import MomentsAccountant

__all__ = [
    "ACCOUNTANTS",
    "ADJACENCY",
    "NOTHING",
    "NOT_VALID",
    "Accountant",
    "Allocated",
    "Bounds",
    "Budget",
    "BudgetExceeded",
    "Composed",
    "Event",
    "Filter",
    "Gaussian",
    "Grouped",
    "Laplace",
    "MomentsAccountant",
    "Odometer",
    "PoissonSampled",
    "PureDP",
    "Shuffled",
    "calibrate",
    "compose",
    "delta",
    "epsilon",
    "from_dict",
    "grouped",
    "moments",
    "parts_of",
    "pld",
    "renyi",
    "rounded_up",
    "strong",
    "to_dict",
]
