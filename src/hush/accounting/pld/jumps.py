"""Compositions in which one rare, large loss among many small ones decides.

No exponential tilt joins a body of small losses and a jump of probability 1e-8: what an FFT of both loses is relative
to the body. So the mechanisms' far losses are conditioned on. With B the near masses, J the far ones and n the count,
    (B + J)^n = B^n + n J B^(n-1) + (two jumps or more),
B^n is composed under a tilt of its own, the middle term is a sum over J's atoms of the body's curve at epsilon - loss,
with an error relative to J's mass, and two jumps or more have probability at most (n J)^2 / 2.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hush.accounting.pld.compose import Tail, Window, compose
from hush.accounting.pld.curves import UNIT, Array
from hush.accounting.pld.discretise import Grid

LONGEST = 600.0  # a body's window; e^loss must stay a number


@dataclass(frozen=True)
class Body:
    """The hockey-stick curve of an untilted composition at many epsilons, with a bound on its error."""

    tail: Tail
    above: Array  # mass beyond each loss
    weighted: Array  # mass * e^-(loss - first loss) beyond each loss

    @classmethod
    def of(cls, tail: Tail) -> "Body":
        weights = np.exp(tail.losses[0] - tail.losses)
        return cls(tail, _beyond(tail.masses), _beyond(tail.masses * weights))

    def curve(self, epsilons: Array) -> tuple[Array, Array, Array]:
        """Values, slopes and bounds on the values' errors at the epsilons."""
        tail = self.tail
        places = np.searchsorted(tail.losses, epsilons, side="right")
        falling = np.exp(np.minimum(epsilons - tail.losses[0], LONGEST)) * self.weighted[places]
        scale = math.exp(tail.log_scale)
        # The weights (1 - e^(epsilon - loss))+ are at most 1, and so are a value's slopes. A running sum of n terms
        # errs by n units of the terms' total; the second one, scaled, has terms no larger than the first.
        size = len(tail.losses)
        summing = (4 * size + 64) * UNIT * float(np.sum(np.abs(tail.masses)))
        error = np.sqrt(size - places) * tail.noise * 1.001 + (tail.outside + tail.blur + summing + 2 * tail.relative)
        # So far out the exponential is capped: nothing is known there but that a value lies between 0 and the mass.
        error += np.where(epsilons - tail.losses[0] > LONGEST, 2.0, 0.0)
        return scale * (self.above[places] - falling), scale * falling, scale * error


def _beyond(terms: Array) -> Array:
    sums = np.zeros(len(terms) + 1)
    sums[:-1] = np.cumsum(terms[::-1])[::-1]
    return sums


@dataclass(frozen=True)
class Jump:
    """One mechanism's far masses, times its count, beside the body of everything else."""

    losses: Array
    masses: Array
    body: Body


@dataclass(frozen=True)
class Split:
    """A composition as body, one jump, and a bound on more than one jump."""

    body: Tail
    jumps: tuple[Jump, ...]
    more: float

    @property
    def blur(self) -> float:
        return self.body.blur

    def delta(self, epsilon: float) -> tuple[float, float, float]:
        """Lower bound, upper bound and -d(delta)/d(epsilon), roughly, at this epsilon."""
        low, high, slope = self.body.delta(epsilon)
        for jump in self.jumps:
            values, slopes, errors = jump.body.curve(epsilon - jump.losses)
            total = float(jump.masses @ values)
            error = float(jump.masses @ (errors + (len(values) + 16) * UNIT))
            low, high = low + total - error, high + total + error
            slope += float(jump.masses @ slopes)
        return max(low, 0.0) * (1 - 1e-14), (high + self.more) * (1 + 1e-14), slope


def split(grids: Sequence[tuple[Grid, int]], body: Window, beside: Window) -> Split:
    """Grids with far losses composed: the body on one window, what stands beside a jump on another, untilted."""
    jumps = []
    expected = log_mass = 0.0
    for place, (grid, count) in enumerate(grids):
        mass = float(np.sum(grid.far_masses))
        log_mass += count * max(0.0, math.log(grid.total))
        if mass == 0:
            continue
        expected += count * mass
        others = [*grids[:place], (grid, count - 1), *grids[place + 1 :]]
        rest = compose([(g, n) for g, n in others if n > 0] or [(_nothing(grid), 1)], beside)
        jumps.append(Jump(grid.far_losses, count * grid.far_masses, Body.of(rest)))
    # All masses together may be a hair above 1: round-off raises them.
    more = expected**2 / 2 * math.exp(min(log_mass, 600.0)) * (1 + 1e-9)
    tail = compose(grids, body)
    return Split(tail, tuple(jumps), more)


def _nothing(grid: Grid) -> Grid:
    return Grid(grid.step, 0.0, 0, np.ones(1), 0.0)
