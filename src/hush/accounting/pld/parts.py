"""Which curves an event stands for: the one place where the PLD accountant reads events."""

import math

from hush.accounting.events import (
    Allocated,
    Event,
    Gaussian,
    Grouped,
    Laplace,
    PoissonSampled,
    PureDP,
    Shuffled,
    parts_of,
)
from hush.accounting.pld import curves
from hush.accounting.pld.allocated import allocated
from hush.accounting.pld.curves import Curve
from hush.accounting.pld.group import group
from hush.accounting.pld.query import Part
from hush.accounting.reductions import coarse, refuse


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
        case _:
            raise refuse(mechanism)
    return curve, curve
