"""Which curves an event stands for: the one place where the PLD accountant reads events."""

import math

from hush.accounting.events import (
    ZCDP,
    Allocated,
    Either,
    Event,
    Gaussian,
    Grouped,
    Mechanism,
    PoissonSampled,
    Selected,
    Split,
    WithoutReplacement,
    parts_of,
)
from hush.accounting.pld import curves
from hush.accounting.pld.allocated import allocated
from hush.accounting.pld.curves import Curve
from hush.accounting.pld.group import group
from hush.accounting.pld.profile import curve_of
from hush.accounting.pld.query import Part
from hush.accounting.reductions import at_most, refuse


def parts_of_event(event: Event, *, delta: float) -> list[Part]:
    """The curve of every mechanism of the composition; all plain Gaussians become one, and all ZCDP events.

    `delta` is the size of delta that matters; it decides how far out an allocation's curve is computed.
    """
    found: list[Part] = []
    squared_mean = rho = 0.0
    for mechanism, count in parts_of(event):
        match mechanism:
            case Gaussian(noise):
                squared_mean += count / noise**2
            case ZCDP(each):
                rho += count * each
            case _:
                found.append(Part(_curve(mechanism, delta / count), count))
    if squared_mean > 0:
        found.append(Part(curves.gaussian(math.sqrt(squared_mean)), 1))
    if rho > 0:
        found.append(Part(curves.concentrated(rho), 1))
    return found


def _curve(mechanism: Event, delta: float) -> Curve:
    match mechanism:
        case Selected() | Either() | Split():
            return curve_of(mechanism, delta, _upper_parts)
        case PoissonSampled(rate, Selected() as inner):
            return curves.sampled(_curve(inner, delta), rate)
        case Mechanism():
            return curves.of_mechanism(mechanism)
        case PoissonSampled(rate, inner):
            return curves.sampled(curves.of_mechanism(inner), rate)
        case WithoutReplacement(lot_size, examples, Gaussian(noise)):
            return curves.without_replacement(curves.gaussian(2 / noise), lot_size / examples)
        case Grouped(size, PoissonSampled(rate, Gaussian(noise))):
            return group(size, rate, noise)
        case Allocated(lots, inner):
            return allocated(inner, lots, delta=delta)
    raise refuse(mechanism)


def _upper_parts(event: Event, delta: float) -> list[Part]:
    return parts_of_event(at_most(event), delta=delta)
