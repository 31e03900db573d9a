"""What every accountant shares: the checks of a question, and the reduction of an event to a simple mechanism."""

import math

from hush.accounting import selection
from hush.accounting.events import (
    MOST_NOISE,
    MOST_OUTCOMES,
    NOTHING,
    ZCDP,
    Allocated,
    DiscreteGaussian,
    DiscreteLaplace,
    Either,
    Event,
    Gaussian,
    Grouped,
    Laplace,
    Mechanism,
    PoissonSampled,
    PureDP,
    RandomisedResponse,
    Selected,
    Shuffled,
    Split,
    WithoutReplacement,
    compose,
    parts_of,
)

LEAST_DELTA = 1e-300
"""Shares of a delta are taken; those of a smaller one leave the range of a float."""


def require_delta(delta: float) -> None:
    """A question for epsilon needs a delta in (0, 1) that a float holds with room to spare."""
    if not LEAST_DELTA <= delta < 1:
        raise ValueError(f"delta must lie in (0, 1), and not below {LEAST_DELTA:g}, got {delta!r}")


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
    """A simple mechanism that costs at least as much as the event, in every Renyi divergence and hockey-stick.

    - Shuffled and Allocated: given the lots, the record takes part in exactly one; by joint convexity of the
      hockey-stick and the Renyi divergence the mixture over lots costs at most one participation.
    - WithoutReplacement: given the lot, the record takes part or does not: the same.
    - Grouped: k records move the sum by at most k times one record. Under Poisson sampling the group is touched with
      probability 1 - (1 - rate)^k, and then by at most k ("same rate, noise / k" would be wrong).

    >>> coarse(Grouped(2, PoissonSampled(1.0, Gaussian(4.0))))
    PoissonSampled(rate=1.0, event=Gaussian(noise_multiplier=2.0))
    """
    match event:
        case PoissonSampled(_, Selected()):
            raise refuse(event)
        case Mechanism() | PoissonSampled():
            return event
        case Shuffled(_, inner) | Allocated(_, inner) | WithoutReplacement(_, _, inner):
            return inner
        case Grouped(size, PoissonSampled(rate, inner)):
            return PoissonSampled(_touched(rate, size), _scaled(inner, size))
        case Grouped(size, Mechanism() as inner):
            return _scaled(inner, size)
        case Grouped(size, Shuffled(_, Gaussian() as inner) | Allocated(_, Gaussian() as inner)):
            # Given the lots, j_i records in lot i cost j_i^2 Gaussian units each, and sum j_i^2 <= k^2.
            return _scaled(inner, size)
        case Grouped(size, Shuffled(_, inner) | Allocated(_, inner)) if pure_epsilon(inner) < math.inf:
            return PureDP(size * pure_epsilon(inner))
    raise refuse(event)


def at_least(event: Event) -> Event:
    """An event that costs no more, and of which the privacy loss distribution is known: for lower bounds.

    The records that do not matter are taken to contribute nothing, which they may: then a shuffled record's lot is one
    of the epoch's at random, and a lot without replacement hides the record as a Poisson lot does. Where only a coarse
    bound is known for a group, one of its records alone is what it costs at least.
    """
    return compose((_at_least(part), count) for part, count in parts_of(event))


def at_most(event: Event) -> Event:
    """An event that costs no less, and of which a curve is known that lies on or above its own: for upper bounds."""
    return compose((_at_most(part), count) for part, count in parts_of(event))


def _at_least(event: Event) -> Event:
    match event:
        case Selected(inner):  # where all scores are equal a selection is one trial, if there is one
            return at_least(inner) if event.trials.truncated else NOTHING
        case Either() | Split() | PoissonSampled(_, Selected()):
            return NOTHING
        case Shuffled(steps, inner):
            return _at_least(Allocated(steps, inner))
        case WithoutReplacement(lot_size, examples, inner):
            return _at_least(PoissonSampled(lot_size / examples * (1 - 1e-15), inner))
        case ZCDP(rho):
            return Gaussian(min(math.sqrt(0.5) / math.sqrt(rho) * (1 + 1e-15), MOST_NOISE)) if rho > 0 else NOTHING
        case Grouped(size, PureDP(epsilon)) if 1 < size <= MOST_OUTCOMES and epsilon > 0:
            return DiscreteLaplace(1 / epsilon * (1 + 1e-15), size)  # epsilon-private, and a group's worst known
        case Grouped(size, PoissonSampled(rate, inner)) if rate == 1:
            return _at_least(Grouped(size, inner))
        case Grouped(_, Gaussian() | Laplace() | DiscreteLaplace() | DiscreteGaussian()):
            return _at_most(event)
        case Grouped(_, inner) if not _sampled_gaussian(inner):
            return _at_least(inner)
    return _at_most(event)


def _at_most(event: Event) -> Event:
    match event:
        case PoissonSampled(rate, inner) if rate == 1:
            return inner
        case PoissonSampled(rate, _) if rate == 0:
            return NOTHING
        case Shuffled(_, inner) | Allocated(1, inner):
            return inner
        case WithoutReplacement(lot_size, examples, inner) if lot_size == examples:
            return inner
        case Grouped(1, inner):
            return _at_most(inner)
        case Grouped(_, inner) if not _sampled_gaussian(inner):
            return _at_most(coarse(event))
        case PureDP(epsilon) | RandomisedResponse(_, epsilon) if epsilon == 0:
            return NOTHING
        case ZCDP(rho) if rho == 0:
            return NOTHING
    return event


def _sampled_gaussian(event: Event) -> bool:
    return isinstance(event, PoissonSampled) and isinstance(event.event, Gaussian) and 0 < event.rate < 1


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
        case ZCDP(rho):
            return math.inf if rho > 0 else 0.0
        case PureDP(epsilon) | RandomisedResponse(_, epsilon):
            return epsilon
        case Laplace(noise):
            return 1 / noise
        case DiscreteLaplace(scale, sensitivity):
            return sensitivity / scale
        case Gaussian() | DiscreteGaussian():
            return math.inf
        case PoissonSampled(rate, inner):
            epsilon = pure_epsilon(inner)
            if rate == 0:
                return 0.0
            # ln(1 + q (e^eps - 1)), written so that a large eps does not overflow.
            return math.log1p(rate * math.expm1(epsilon)) if epsilon < 700 else epsilon
    return pure_epsilon(coarse(event))


def pure_total(event: Event) -> float:
    """Basic composition of what is known with delta = 0, rounded up; infinite where there is none."""
    return math.fsum(count * pure_epsilon(part) for part, count in parts_of(event)) * (1 + 1e-12)


def _scaled(mechanism: Mechanism, size: int) -> Mechanism:
    match mechanism:
        case Gaussian(noise):
            return Gaussian(noise / size)
        case Laplace(noise):
            return Laplace(noise / size)
        case PureDP(epsilon):
            return PureDP(epsilon * size)
        case DiscreteGaussian(scale, sensitivity):
            return DiscreteGaussian(scale, sensitivity * size)
        case DiscreteLaplace(scale, sensitivity) if sensitivity * size <= MOST_OUTCOMES:
            return DiscreteLaplace(scale, sensitivity * size)
        case RandomisedResponse() | DiscreteLaplace():
            return PureDP(pure_epsilon(mechanism) * size)
    raise refuse(mechanism)


def _touched(rate: float, size: int) -> float:
    """1 - (1 - rate)^size without cancellation at small rates, rounded up."""
    if rate >= 1:
        return 1.0
    return min(1.0, math.nextafter(-math.expm1(size * math.log1p(-rate)), 1.0))
