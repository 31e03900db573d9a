"""Many grids composed by one FFT under an exponential tilt, with every error of the transform bounded.

Masses are tilted by e^(tilt * loss) so that the sum's typical value is the epsilon asked for; what the transform loses
is then relative to the tail, not to the whole mass. With S the tilted sum and K the log of all tilted-away mass,
delta(epsilon) = e^(K - tilt epsilon) E[w(S)], w(s) = e^(-tilt (s - epsilon)) (1 - e^(epsilon - s))+.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy
from numpy.typing import NDArray

from hush.accounting.pld.curves import UNIT, Array
from hush.accounting.pld.discretise import Grid

_NEGLIGIBLE = -80.0  # frequencies whose power falls below e^-80 are left out, and counted
_FFT = 8.0  # Higham 2002, Theorem 24.2: a transform errs by at most log2(n) * 6.7 units, relative, in the 2-norm


@dataclass(frozen=True)
class Window:
    """Where the tilted sum lives: [low, low + size * step], and the Chernoff exponents that bound what lies outside."""

    tilt: float
    low: float
    size: int
    above: float
    below: float


@dataclass(frozen=True)
class Tail:
    """The tilted law of a composition, and bounds on everything that is not exact in it."""

    tilt: float
    losses: Array
    masses: Array
    log_scale: float
    noise: float  # bound on the 2-norm of the masses' error
    outside: float  # bound on the tilted mass outside the window, which the transform folds into it
    relative: float  # bound on the relative error of everything
    infinite: float
    blur: float  # bound on the round-off of the losses themselves

    def delta(self, epsilon: float) -> tuple[float, float, float]:
        """Lower bound, upper bound and -d(delta)/d(epsilon), roughly, at this epsilon."""
        start = int(np.searchsorted(self.losses, epsilon, side="right"))
        above = self.losses[start:] - epsilon
        decay = np.exp(-self.tilt * above)
        weights = decay * -np.expm1(-above)
        terms = weights * self.masses[start:]
        total = float(np.sum(terms))
        summing = 64 * UNIT * float(np.sum(np.abs(terms)))
        most = math.exp(-math.log1p(self.tilt) - (self.tilt * math.log1p(1 / self.tilt) if self.tilt > 0 else 0.0))
        error = float(np.linalg.norm(weights)) * self.noise * 1.001 + most * self.outside + summing
        relative = min(self.relative + 8 * UNIT * (abs(self.log_scale) + self.tilt * abs(epsilon) + 1), 700.0)
        scale = math.exp(min(self.log_scale - self.tilt * epsilon, 700.0))
        slope = scale * float(np.sum((decay - weights) * self.masses[start:]))
        low = max(0.0, scale * (total - error)) * math.exp(-relative)
        return low, scale * max(total + error, 0.0) * math.exp(relative) + self.infinite, slope


def compose(grids: Sequence[tuple[Grid, int]], window: Window) -> Tail:
    """The tilted law of the sum of all grids, each repeated its count of times, on the window."""
    size, tilt = window.size, window.tilt
    step = grids[0][0].step
    log_power = np.zeros(size // 2 + 1, dtype=np.complex128)
    dead = np.zeros(size // 2 + 1, dtype=bool)
    phase_error = np.zeros(size // 2 + 1)
    levels: list[tuple[float, float]] = []
    log_scale = above = below = noise = relative = growth = 0.0
    infinite, log_mass, offset, shift = 0.0, 0.0, 0, 0.0
    for grid, count in grids:
        losses = grid.losses
        log_m, tilted, wobble = _tilted(grid.masses, tilt * losses)
        # The largest atom goes to place 0, where its transform is 1 and needs none: only the rest is transformed, and
        # the error is relative to the rest.
        largest = int(np.argmax(tilted))
        rest = tilted.copy()
        rest[largest] = 0.0
        total = float(np.sum(rest))
        excess = scipy.fft.rfft(_folded(rest, -largest, size)) - total
        logs, vanishing = _log1p(excess, _NEGLIGIBLE / count)
        dead |= vanishing
        log_power += count * logs
        phase_error += count * (np.abs(logs) + np.abs(excess))
        log_scale += count * log_m
        above += count * (_log_sum(grid.masses, (tilt + window.above) * losses) - log_m)
        below += count * (_log_sum(grid.masses, (tilt - window.below) * losses) - log_m)
        transform = _FFT * UNIT * math.log2(size) * float(np.linalg.norm(rest))
        noise += count * transform
        # The largest atom is taken as 1 - total. Its error is that of the total: of the sum (numpy adds in pairs: under
        # 40 units), of the shares, and of the exponents. At place 0 it is the same for all frequencies.
        level = count * UNIT * (48 * total + float(wobble @ rest))
        levels.append((level, math.exp(-_NEGLIGIBLE / count)))
        growth += count * transform * math.sqrt(size) + level
        relative += count * UNIT * (16 + 4 * abs(tilt) * float(np.max(np.abs(losses[[0, -1]]))))
        infinite += count * grid.infinite
        log_mass += count * max(0.0, math.log(grid.total))
        offset += count * (grid.first + largest)
        shift += count * grid.shift
    power = np.where(dead, 0.0, np.exp(np.where(dead, 0.0, log_power)))
    start = round((window.low - shift) / step)
    high = window.low + step * (size - 1)
    masses = np.roll(scipy.fft.irfft(power, size), -((start - offset) % size))
    # Parseval: errors of the spectrum, in the 2-norm, are errors of the masses times sqrt(size).
    spectral = float(np.linalg.norm(phase_error * np.abs(power))) * 8 * UNIT + math.exp(_NEGLIGIBLE) * math.sqrt(size)
    spectral += _FFT * UNIT * math.log2(size) * float(np.linalg.norm(power))
    # An error e at place 0 of one factor p moves the product of n by n e p^(n-1), and where a frequency is not left out
    # |p| >= e^(negligible / n): the norm is that of the product, times at most 1 / |p|, and never above 1.
    spread = 1.01 * math.sqrt(2 / size) * float(np.linalg.norm(power)) + math.exp(_NEGLIGIBLE)
    noise += sum(level * min(1.0, lift * spread) for level, lift in levels)
    noise = noise * math.exp(min(growth, 700.0)) + math.sqrt(2 / size) * spectral
    outside = _exp(above - window.above * (high - step)) + _exp(below + window.below * (window.low + step))
    return Tail(
        tilt=tilt,
        losses=shift + step * np.arange(start, start + size, dtype=np.float64),
        masses=masses,
        log_scale=log_scale,
        noise=noise,
        outside=1.01 * outside,
        relative=relative,
        blur=8 * UNIT * (abs(shift) + step * (abs(offset) + abs(start) + size)),
        infinite=infinite * math.exp(min(log_mass + relative, 700.0)),
    )


def _log1p(excess: NDArray[np.complex128], floor: float) -> tuple[NDArray[np.complex128], NDArray[np.bool_]]:
    """log(1 + excess), with an error relative to the excess; where its real part is below the floor: 0, and marked."""
    x, y = excess.real, excess.imag
    squared = x * (2 + x) + y * y
    vanishing = squared <= np.expm1(2 * floor)
    real = 0.5 * np.log1p(np.where(vanishing, 0.0, squared))
    return real + 1j * np.where(vanishing, 0.0, np.arctan2(y, 1 + x)), vanishing


def _tilted(masses: Array, exponents: Array) -> tuple[float, Array, Array]:
    """Log of the total of masses * e^exponents, the shares in it, and how many units each share may be off."""
    most = float(np.max(np.where(masses > 0, exponents, -np.inf)))
    weighted = masses * np.exp(np.minimum(exponents - most, 0.0))
    total = float(np.sum(weighted))
    return math.log(total) + most, weighted / total, 2 * (np.abs(exponents) + np.abs(exponents - most))


def _log_sum(masses: Array, exponents: Array) -> float:
    most = float(np.max(np.where(masses > 0, exponents, -np.inf)))
    return math.log(float(masses @ np.exp(np.minimum(exponents - most, 0.0)))) + most


def _folded(masses: Array, first: int, size: int) -> Array:
    """The masses at first, first + 1, ... on a circle of `size` places."""
    rows = -(-len(masses) // size)
    padded = np.zeros(rows * size)
    padded[: len(masses)] = masses
    return np.roll(padded.reshape(rows, size).sum(axis=0), first % size)


def _exp(exponent: float) -> float:
    return math.exp(min(exponent + 1e-6 * abs(exponent), 700.0))
