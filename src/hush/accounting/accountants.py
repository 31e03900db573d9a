"""The two questions, epsilon for delta and delta for epsilon, put to the accountant of one's choice."""

from typing import Literal, get_args

from hush.accounting import moments, pld, renyi, strong
from hush.accounting.bounds import Bounds
from hush.accounting.events import Event

Accountant = Literal["pld", "renyi", "moments", "strong", "strong-paper"]
ACCOUNTANTS: tuple[str, ...] = get_args(Accountant)
NOT_VALID = {"strong-paper": "it amplifies eps0 > 1 to rate * eps0, which no theorem covers"}


def epsilon(event: Event, *, delta: float, accountant: Accountant = "pld") -> Bounds:
    """Epsilon of the event at this delta; `upper` is a valid guarantee for every accountant but "strong-paper".

    For "pld" the smaller of the certified upper bound and Renyi's is given, so the answer is never above Renyi's.

    >>> from hush.accounting.events import Gaussian
    >>> epsilon(Gaussian(2.0), delta=1e-5, accountant="renyi").upper < 2.3
    True
    """
    match accountant:
        case "pld":
            return _smaller(pld.epsilon(event, delta=delta), renyi.epsilon(event, delta=delta))
        case "renyi":
            return renyi.epsilon(event, delta=delta)
        case "moments":
            return moments.epsilon(event, delta=delta)
        case "strong":
            return strong.epsilon(event, delta=delta)
        case "strong-paper":
            return strong.paper_epsilon(event, delta=delta)
    raise _unknown(accountant)


def delta(event: Event, *, epsilon: float, accountant: Accountant = "pld") -> Bounds:
    """Delta of the event at this epsilon, as `epsilon` answers; "strong-paper" has no answer to this question."""
    match accountant:
        case "pld":
            return _smaller(pld.delta(event, epsilon=epsilon), renyi.delta(event, epsilon=epsilon))
        case "renyi":
            return renyi.delta(event, epsilon=epsilon)
        case "moments":
            return moments.delta(event, epsilon=epsilon)
        case "strong":
            return strong.delta(event, epsilon=epsilon)
    raise _unknown(accountant)


def _smaller(certified: Bounds, other: Bounds) -> Bounds:
    """Both uppers are valid; round-off may bring the smaller one a hair under the lower bound, which then follows."""
    upper = min(certified.upper, other.upper)
    return Bounds(min(certified.lower, upper), upper)


def _unknown(accountant: str) -> ValueError:
    return ValueError(
        f"accountant must be one of {', '.join(ACCOUNTANTS)} (no delta from strong-paper), got {accountant!r}"
    )
