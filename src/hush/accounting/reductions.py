"""What every accountant shares: the checks of a question, and the reduction of an event to a simple mechanism."""

import math

from hush.accounting import selection
from hush.accounting.events import (
    Allocated,
    Either,
    Event,
    Gaussian,
    Grouped,
    Laplace,
    PoissonSampled,
    PureDP,
    Selected,
    Shuffled,
    Split,
    parts_of,
)

Mechanism = Gaussian | Laplace | PureDP


def require_delta(delta: float) -> None:
    """A question for epsilon needs a delta in (0, 1)."""
    if not 0 < delta < 1:
        raise ValueError(f"delta must lie in (0, 1), got {delta!r}")


def require_epsilon(epsilon: float) -> None:
    """A question for delta needs a finite epsilon >= 0."""
    if not (epsilon >= 0 and math.isfinite(epsilon)):
        raise ValueError(f"epsilon must be a number >= 0, got {epsilon!r}")


def refuse(event: object) -> ValueError:
    """The error for a mechanism or a nesting no accountant knows; raised, never passed over."""
    inner = getattr(event, "event", None)
    name = type(event).__name__ + (f" of {type(inner).__name__}" if inner is not None else "")
    return ValueError(f"no accountant knows {name}; compose the events of hush.accounting with + and * instead")


def coarse(event: Event) -> Mechanism | PoissonSampled:
    """A simple mechanism that costs at least as much as the event, for one application of it.

    - Shuffled and Allocated: given the lots, the record takes part in exactly one; by joint convexity of the
      hockey-stick and the Renyi divergence the mixture over lots costs at most one participation.
    - Grouped: k records move the sum by at most k times one record. Under Poisson sampling the group is touched with
      probability 1 - (1 - rate)^k, and then by at most k ("same rate, noise / k" would be wrong).

    >>> coarse(Grouped(2, PoissonSampled(1.0, Gaussian(4.0))))
    PoissonSampled(rate=1.0, event=Gaussian(noise_multiplier=2.0))
    """
    match event:
        case Gaussian() | Laplace() | PureDP():
            return event
        case PoissonSampled(_, Gaussian() | Laplace() | PureDP()):
            return event
        case Shuffled(_, Gaussian() | Laplace() | PureDP() as inner):
            return inner
        case Allocated(_, Gaussian() | Laplace() | PureDP() as inner):
            return inner
        case Grouped(size, Gaussian() | Laplace() | PureDP() as inner):
            return _scaled(inner, size)
        case Grouped(size, PoissonSampled(rate, Gaussian() | Laplace() | PureDP() as inner)):
            return PoissonSampled(_touched(rate, size), _scaled(inner, size))
        case Grouped(size, Shuffled(_, Gaussian() as inner) | Allocated(_, Gaussian() as inner)):
            # Given the lots, j_i records in lot i cost j_i^2 Gaussian units each, and sum j_i^2 <= k^2.
            return _scaled(inner, size)
        case Grouped(size, Shuffled(_, Laplace() | PureDP() as inner) | Allocated(_, Laplace() | PureDP() as inner)):
            return PureDP(size * pure_epsilon(inner))
    raise refuse(event)


def pure_epsilon(event: Event) -> float:
    """The smallest epsilon known with delta = 0 for one application; infinite where there is none.

    >>> pure_epsilon(Laplace(2.0)), pure_epsilon(Gaussian(2.0))
    (0.5, inf)
    """
    match event:
        case Selected(inner):
            return selection.pure_epsilon(pure_total(inner), event.trials)
        case Either(first, second) | Split(_, first, second):
            return max(pure_total(first), pure_total(second))
        case PoissonSampled(rate, Selected() as inner):
            return _sampled_pure(rate, pure_epsilon(inner))
    match coarse(event):
        case PureDP(epsilon):
            return epsilon
        case Laplace(noise):
            return 1 / noise
        case PoissonSampled(rate, inner):
            return _sampled_pure(rate, pure_epsilon(inner))
    return math.inf


def pure_total(event: Event) -> float:
    """Basic composition of what is known with delta = 0: the limit of infinite order. Rounded up."""
    return math.fsum(count * pure_epsilon(part) for part, count in parts_of(event)) * (1 + 1e-12)


def _sampled_pure(rate: float, epsilon: float) -> float:
    if rate == 0:
        return 0.0
    # ln(1 + q (e^eps - 1)), written so that a large eps does not overflow.
    return math.log1p(rate * math.expm1(epsilon)) if epsilon < 700 else epsilon


def _scaled(mechanism: Mechanism, size: int) -> Mechanism:
    match mechanism:
        case Gaussian(noise):
            return Gaussian(noise / size)
        case Laplace(noise):
            return Laplace(noise / size)
        case PureDP(epsilon):
            return PureDP(epsilon * size)


def _touched(rate: float, size: int) -> float:
    """1 - (1 - rate)^size without cancellation at small rates, rounded up."""
    if rate >= 1:
        return 1.0
    return min(1.0, math.nextafter(-math.expm1(size * math.log1p(-rate)), 1.0))
