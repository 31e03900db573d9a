"""The mean of many Gaussian likelihood ratios where it is heavy-tailed: sums on points that are dense where needed.

Little noise makes one lot's ratio range over many powers of ten, so that no grid of equal steps holds it. Here a law is
a list of points and masses, all arithmetic is on positive numbers, and every mass keeps its relative precision. After
each sum the points are thinned: for an upper bound each mass goes to its two neighbours, keeping the mean; for a lower
bound the masses between two neighbours are gathered at their mean. The first raises E f(ratio) for every convex f, the
second lowers it, and both carry over to sums of independent ratios.
"""

from dataclasses import dataclass

import numpy as np
import scipy
from numpy.typing import NDArray

from hush.accounting.pld.curves import Array, Curve, Evaluated

_AROUND, _MOST_WIDE, _SPACING = 300, 1400, 0.06
_NEVER = 1e-30  # a chance this small that all ratios lie below the least point
_ROUND_OFF = 1e-9  # relative, for one ratio's masses and each sum of two laws: a million positive terms, 1e-10 at most


@dataclass(frozen=True)
class Law:
    """Masses at rising points >= 0; an upper bound's mean may lie at infinity in part."""

    points: Array
    masses: Array
    summands: int


@dataclass(frozen=True)
class _Span:
    """Where ratios matter: from the least, below which no sum ever is, to the farthest that one ratio may reach."""

    noise: float
    least: float
    farthest: float

    def edges(self, summands: int) -> Array:
        """Dense around the mean of so many ratios, then geometric on both sides; and 0."""
        deviation = np.sqrt(summands * np.expm1(min(1 / self.noise**2, 60.0)))
        middle = summands + min(deviation, 3.0 * summands) * np.linspace(-5.0, 5.0, _AROUND)
        most = summands + max(self.farthest, 2.0)
        count = min(int((np.log(most) - np.log(self.least)) / _SPACING), _MOST_WIDE)
        joined = np.unique(
            np.concatenate([[0.0], middle[middle > self.least], np.geomspace(self.least, most, max(count, 100))])
        )
        kept = np.append(np.diff(joined) > 1e-9 * joined[1:], True)
        edges: Array = joined[kept]
        return edges


def gaussian_mean(noise: float, lots: int, farthest: float) -> Curve:
    """The curve of the mean of `lots` ratios, from above; its `lower` is the one from below."""
    least = float(np.exp(np.clip(scipy.special.ndtri(_NEVER ** (1 / lots)) / noise - 0.5 / noise**2, -600.0, -4.0)))
    span = _Span(noise, least, farthest)
    edges = span.edges(1)
    cells = _cells(noise, edges)
    beyond = float(cells[1][-1] - edges[-1] * cells[0][-1])  # what a ratio beyond the farthest point adds to its mean
    above = _curve(_power(_spread(*cells, edges), lots, span, upper=True), beyond, upper=True)
    below = _curve(_power(_gathered(*cells, 1), lots, span, upper=False), 0.0, upper=False)
    return Curve(above.call, above.put, False, lower=below)


def _cells(noise: float, edges: Array) -> tuple[Array, Array]:
    """Q-mass and P-mass of one ratio between neighbouring edges, and beyond the last."""
    with np.errstate(divide="ignore"):
        z = np.append(noise * np.log(edges) + 0.5 / noise, np.inf)
    return _between(z), _between(z - 1 / noise)


def _between(z: Array) -> Array:
    low, high = z[:-1], z[1:]
    masses: Array = np.where(
        low > 0,
        scipy.special.ndtr(-low) - scipy.special.ndtr(-high),
        scipy.special.ndtr(high) - scipy.special.ndtr(low),
    )
    return masses


def _spread(q: Array, p: Array, edges: Array) -> Law:
    """Each cell's mass at its two ends, with the cell's mean; what lies beyond the last edge, on it."""
    width = np.diff(edges)
    masses = np.zeros(len(edges))
    masses[:-1] += np.maximum(edges[1:] * q[:-1] - p[:-1], 0.0) / width
    masses[1:] += np.maximum(p[:-1] - edges[:-1] * q[:-1], 0.0) / width
    masses[-1] += q[-1]
    return Law(edges, masses, 1)


def _gathered(mass: Array, moment: Array, summands: int) -> Law:
    kept = mass > 1e-280
    return Law(moment[kept] / mass[kept], mass[kept], summands)


def _power(law: Law, count: int, span: _Span, *, upper: bool) -> Law:
    """The law of a sum of `count` ratios, by doubling."""
    result: Law | None = None
    while True:
        if count & 1:
            result = law if result is None else _sum(result, law, span, upper=upper)
        count >>= 1
        if not count:
            assert result is not None
            return result
        law = _sum(law, law, span, upper=upper)


def _sum(one: Law, other: Law, span: _Span, *, upper: bool) -> Law:
    points = np.add.outer(one.points, other.points).ravel()
    masses = np.multiply.outer(one.masses, other.masses).ravel()
    summands = one.summands + other.summands
    edges = span.edges(summands)
    if points.max() > edges[-1]:
        edges = np.append(edges, np.geomspace(edges[-1], points.max() * (1 + 1e-12), 12)[1:])
    cell = np.searchsorted(edges, points, side="right") - 1
    if not upper:
        size = len(edges)
        return _gathered(_added(cell, masses, size), _added(cell, masses * points, size), summands)
    cell = np.minimum(cell, len(edges) - 2)
    right = masses * ((points - edges[cell]) / (edges[cell + 1] - edges[cell]))
    total = _added(cell, np.maximum(masses - right, 0.0), len(edges)) + _added(cell + 1, right, len(edges))
    return Law(edges, total, summands)


def _added(places: NDArray[np.int64], values: Array, size: int) -> Array:
    total: Array = np.bincount(places, values, size).astype(np.float64)
    return total


def _curve(law: Law, beyond: float, *, upper: bool) -> Curve:
    ratios = law.points / law.summands
    both = np.stack([law.masses, law.masses * ratios])
    above, below = np.zeros((2, len(ratios) + 1)), np.zeros((2, len(ratios) + 1))
    above[:, :-1] = np.cumsum(both[:, ::-1], axis=1)[:, ::-1]
    below[:, 1:] = np.cumsum(both, axis=1)
    relative = _ROUND_OFF * law.summands

    def call(epsilons: Array) -> Evaluated:
        at = np.exp(np.minimum(epsilons, 600.0))
        mass, moment = above[:, np.searchsorted(ratios, at, side="right")]
        return np.maximum(moment - at * mass, 0.0) + beyond, relative * (moment + at * mass + beyond)

    def put(epsilons: Array) -> Evaluated:
        at = np.exp(epsilons)
        mass, moment = below[:, np.searchsorted(ratios, at, side="left")]
        return np.maximum(at * mass - moment, 0.0), relative * (moment + at * mass)

    return Curve(call, put, False)
