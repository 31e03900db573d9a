"""Which curves an event stands for: the one place where the PLD accountant reads events."""

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from hush.accounting import renyi, selection
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
from hush.accounting.pld import curves
from hush.accounting.pld.allocated import allocated
from hush.accounting.pld.curves import Array, Curve
from hush.accounting.pld.group import group
from hush.accounting.pld.query import Part, profile
from hush.accounting.reductions import coarse, pure_total, refuse

_KNOTS = 200
_LEAST_DELTA = 1e-30
_FARTHEST = 512.0


def parts_of_event(event: Event, *, delta: float) -> list[Part]:
    """Curves above and below every mechanism of the composition; all plain Gaussians become one.

    `delta` is the size of delta that matters; it decides how far out an allocation's curve is computed.
    """
    found: list[Part] = []
    squared_mean = 0.0
    for mechanism, count in parts_of(event):
        above, below = _reduced(mechanism)
        if isinstance(above, Gaussian) and above == below:
            squared_mean += count / above.noise_multiplier**2
            continue
        if above == below:
            curve = _curve(above, delta / count)
            if curve is not None:
                found.append(Part(*curve, count))
            continue
        upper, lower = _curve(above, delta / count), _curve(below, delta / count)
        if upper is None or lower is None:
            continue
        found.append(Part(upper[0], lower[1], count))
    if squared_mean > 0:
        curve_of_all = curves.of_mechanism(Gaussian(1 / math.sqrt(squared_mean)))
        found.append(Part(curve_of_all, curve_of_all, 1))
    return found


def _reduced(mechanism: Event) -> tuple[Event, Event]:
    """Simpler mechanisms that cost at least, and at most, as much.

    Where only a coarse bound is known for a group, one of its records alone is what it costs at least.
    """
    match mechanism:
        case PoissonSampled(rate, inner) if rate == 1:
            return inner, inner
        case Shuffled(_, inner):
            return inner, inner
        case Allocated(1, inner):
            return inner, inner
        case Grouped(1, inner):
            return _reduced(inner)
        case Grouped(_, PoissonSampled(rate, Gaussian())) if 0 < rate < 1:
            return mechanism, mechanism
        case Grouped(_, Gaussian() | Laplace() | PureDP() | PoissonSampled(_, Gaussian())):
            return (
                _reduced(coarse(mechanism))
                if isinstance(coarse(mechanism), PoissonSampled)
                else (coarse(mechanism),) * 2
            )
        case Grouped(_, inner):
            return _reduced(coarse(mechanism))[0], _reduced(inner)[1]
    return mechanism, mechanism


def _curve(mechanism: Event, delta: float) -> tuple[Curve, Curve] | None:
    """Curves above and below the mechanism; None if it costs nothing."""
    match mechanism:
        case PureDP(epsilon) if epsilon == 0:
            return None
        case PoissonSampled(rate, _) if rate == 0:
            return None
        case Gaussian() | Laplace() | PureDP():
            curve = curves.of_mechanism(mechanism)
        case PoissonSampled(rate, Gaussian() | Laplace() | PureDP() as inner):
            base = _curve(inner, delta)
            if base is None:
                return None
            curve = curves.sampled(base[0], rate)
        case Grouped(size, PoissonSampled(rate, Gaussian(noise))):
            curve = group(size, rate, noise)
        case Allocated(lots, Gaussian() | Laplace() | PureDP() as inner):
            base = _curve(inner, delta)
            return None if base is None else allocated(base[0], lots, delta=delta)
        case Selected() | Either() | Split():
            return _bounded_only(mechanism, delta), curves.nothing()
        case PoissonSampled(rate, Selected() as inner):
            return curves.sampled(_bounded_only(inner, delta), rate), curves.nothing()
        case _:
            raise refuse(mechanism)
    return curve, curve


def _bounded_only(mechanism: Selected | Either | Split, delta: float) -> Curve:
    """A curve from upper bounds on delta, which hold in both directions."""
    least = 10.0 ** math.floor(math.log10(max(1e-7 * delta, _LEAST_DELTA)))
    profile = _profile_of(mechanism, least)
    return curves.of_profile(profile, top=_end(lambda loss: float(profile(np.array([loss]))[0]), least))


@lru_cache(maxsize=64)
def _profile_of(event: Event, least: float) -> Callable[[Array], Array]:
    """Upper bounds on the event's delta at losses >= 0, resolved where delta is above `least`."""
    match event:
        case Selected(inner):
            least = 1e-3 * 1e3 ** math.floor(math.log(least / max(1.0, event.mean), 1e3))  # shared by similar questions
            losses = np.linspace(0.0, _end_of(inner, least), _KNOTS)
            return selection.selected(selection.Profile(losses, _profile_of(inner, least)(losses)), event.trials)
        case Either(first, second):
            one, other = _profile_of(first, least), _profile_of(second, least)
            return lambda losses: np.maximum(one(losses), other(losses))
        case Split(share, first, second):
            one, other = _profile_of(first, least), _profile_of(second, least)
            return lambda losses: (share * one(losses) + (1 - share) * other(losses)) * (1 + 1e-12)
    parts = parts_of_event(event, delta=least)
    if not parts:
        return np.zeros_like
    losses = np.linspace(0.0, _end_of(event, least), _KNOTS)
    return selection.Profile(losses, profile(parts, losses)).at


def _end_of(event: Event, least: float) -> float:
    """A loss beyond which delta is at most `least`, by Renyi's quick bound; or what the event costs with delta = 0."""
    return min(_end(lambda loss: renyi.delta(event, epsilon=loss).upper, least), max(pure_total(event), 1e-9))


def _end(delta_at: Callable[[float], float], least: float) -> float:
    """A loss at which delta is at most `least`, or a very large one."""
    low, high = 0.0, 1.0
    while high < _FARTHEST and delta_at(high) > least:
        low, high = high, 2 * high
    while high - low > 0.01 * high and high > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if delta_at(middle) > least else (low, middle)
    return high
