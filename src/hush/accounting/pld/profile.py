"""An event's whole curve from few compositions, and the curves of events that are known by their profile alone."""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from hush.accounting import renyi, selection
from hush.accounting.events import Either, Event, Selected, Split
from hush.accounting.pld import curves, query
from hush.accounting.pld.curves import Array, Curve
from hush.accounting.pld.query import Part
from hush.accounting.reductions import pure_total

PartsOf = Callable[[Event, float], list[Part]]
_TILTS = 16  # compositions from which a whole profile is read
_KNOTS, _FINE_KNOTS = 200, 600
_LEAST_DELTA, _FARTHEST = 1e-30, 512.0


def curve_of(event: Selected | Either | Split, delta: float, parts_of: PartsOf) -> Curve:
    """A curve from upper bounds on delta, which hold in both directions; `parts_of` reads the events inside."""
    least = 10.0 ** math.floor(math.log10(max(1e-7 * delta, _LEAST_DELTA)))
    bounds = _bounds(event, least, parts_of)
    end = _end(lambda loss: float(bounds(np.array([loss]))[0]), least)
    knots = np.linspace(0.0, min(end, max(pure_total(event), 1e-9)), _FINE_KNOTS)
    return curves.of_bounds(knots, bounds(knots))


@lru_cache(maxsize=64)
def _bounds(event: Event, least: float, parts_of: PartsOf) -> Callable[[Array], Array]:
    """Upper bounds on the event's delta at losses >= 0, resolved where delta is above `least`."""
    match event:
        case Selected(inner):
            # Rounded down to a power of 1,000, so that similar questions share the work.
            least = 1e-3 * 1e3 ** math.floor(math.log(least / max(1.0, event.mean), 1e3))
            losses = np.linspace(0.0, _end_of(inner, least), _KNOTS)
            trial = selection.Profile(losses, _bounds(inner, least, parts_of)(losses))
            return selection.selected(trial, event.trials)
        case Either(first, second):
            one, other = _bounds(first, least, parts_of), _bounds(second, least, parts_of)
            return lambda losses: np.maximum(one(losses), other(losses))
        case Split(share, first, second):
            one, other = _bounds(first, least, parts_of), _bounds(second, least, parts_of)
            return lambda losses: (share * one(losses) + (1 - share) * other(losses)) * (1 + 1e-12)
    parts = parts_of(event, least)
    if not parts:
        return np.zeros_like
    losses = np.linspace(0.0, _end_of(event, least), _KNOTS)
    return selection.Profile(losses, profile(parts, losses)).at


def profile(parts: Sequence[Part], losses: Array) -> Array:
    """Upper bounds on delta at all these losses >= 0 (rising), the larger of both directions, from few compositions."""
    upper = _one_direction(parts, losses)
    if all(part.curve.symmetric for part in parts):
        return upper
    return np.maximum(upper, _one_direction([part.reversed() for part in parts], losses))


def _one_direction(parts: Sequence[Part], losses: Array) -> Array:
    if len(parts) == 1 and parts[0].count == 1:
        value, error = parts[0].curve.call(losses)
        return np.minimum(value + error, 1.0)
    upper = np.ones(len(losses))
    spacing = float(losses[-1]) / (_TILTS - 1)
    for at, tail in query.tails_at(parts, [spacing * place for place in range(_TILTS)]):
        for place in np.flatnonzero(np.abs(losses - at) <= 1.01 * spacing):
            bound = tail.delta(max(0.0, float(losses[place]) - tail.blur))[1]
            upper[place] = min(upper[place], bound)
    return upper


def _end_of(event: Event, least: float) -> float:
    """A loss beyond which delta is at most `least`, by Renyi's quick bound; or what the event costs with delta = 0."""
    return min(_end(lambda loss: renyi.delta(event, epsilon=loss).upper, least), max(pure_total(event), 1e-9))


def _end(delta_at: Callable[[float], float], least: float) -> float:
    """A loss at which delta is at most `least`, or falls no more."""
    low, high = 0.0, 1.0
    least = max(least, 1.001 * delta_at(_FARTHEST))
    while high < _FARTHEST and delta_at(high) > least:
        low, high = high, 2 * high
    while high - low > 0.01 * high and high > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if delta_at(middle) > least else (low, middle)
    return high
