"""Exact Gaussian integers from a ChaCha20 stream: a real Gaussian, rounded to the nearest integer.

Magnitudes are cut into cells of width w, a power of two with sigma / w in [128, 256) (1 for small sigma). A number is
drawn by rejection under a staircase over the cells, with c = w^2 / (2 sigma^2):

    cell j has the probability W_j / 2^31, by an alias table of 4,096 columns with integer weights W_j
    a place a, uniform in [0, 1), and its mirror image 1 - a have together the share S_j (e(a) + e(1 - a)) of the cell,
    where e(a) = exp(-c a (2 j + a)) and S_j = F exp(-c j^2) / (2 W_j): a uniform level v takes the place a if
    v < S_j e(a), the mirror image if v < S_j (e(a) + e(1 - a)), and neither otherwise: then all is drawn again

so that w (j + a) has a density proportional to exp(-x^2 / (2 sigma^2)). Since e(a) + e(1 - a) is almost constant in a
cell, one number in 100,000 is drawn again. W_j >= F exp(-c m^2) exp(max(0, 2 c^2 m^2 - c) h^2) keeps the shares below 1
for pairs around the middle m whose halves are at most h away, since cosh(z) <= exp(z^2 / 2); beside that stands the
bound W_j >= F exp(-c j^2), and the smaller of the two is enough.

Place and level are numbers of 128 bits. The first 32 of each decide nearly always; where rounding or the bits that are
missing could change the outcome, the other 96 are drawn and the shares computed anew (in 60 digits here, in integers of
128 bits on the GPU, see `hush.kernels.noise.integers`). What is drawn is therefore exact but for the cut at 13 sigma
(2^-120), the width of place and level (2^-117 for the smallest sigma), and on the GPU the last bits of the shares
(2^-114).

Number e of a draw reads word e of three regions of the keystream: column, remainder and sign; level; place. Attempt k
has the regions that begin at blocks (3 k + r) 2^40. Further bits come from block 2^63 + k 2^48 + e: three words for the
level, three for the place, high words first.
"""

import decimal
import functools
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hush.randomness.chacha20 import fill_keystream, scattered_blocks

DISTANCE = 2.0**-112
"""The law of a number differs from the exact one by at most this, in total variation."""
COLUMNS = 1 << 12
CAPACITY = 1 << 19  # columns times capacity: 2^31
REGION = 1 << 40
FURTHER = 1 << 63
ATTEMPT = 1 << 48
FINEST = 128
"""Cells in one sigma, at least, where sigma is that large."""
_CUT = 13.0
_CHUNK = 1 << 14
_UNIT = 2.0**-32

Integers = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint32]


class OnGrid(NamedTuple):
    """Integer noise on a grid: the grid's step, and the noise's deviation in grid steps."""

    step: float
    sigma: float


@dataclass(frozen=True)
class Staircase:
    """The cells of one law: their weights, and the alias table that draws them."""

    sigma: float
    shift: int  # w = 2^shift
    height: Fraction  # F
    weights: tuple[int, ...]  # W_j
    thresholds: npt.NDArray[np.uint32]
    aliases: npt.NDArray[np.int64]
    shares: npt.NDArray[np.float64]  # S_j

    @property
    def curvature(self) -> Fraction:
        """c, exactly."""
        return Fraction(1 << (2 * self.shift)) / (2 * Fraction(self.sigma) ** 2)


def rounded_gaussian(subkey: bytes, nonce: int, *, sigma: float, first: int, count: int) -> Integers:
    """Numbers first, first + 1, ...: a real Gaussian of deviation sigma, rounded to the nearest integer.

    Guarantee: adding them to an integer vector is the same as adding an exact real Gaussian and rounding the result,
    so every bound for the Gaussian mechanism holds (rounding is post-processing), up to DISTANCE for each number.
    """
    return _draw(subkey, nonce, staircase(sigma), first, count)


@functools.lru_cache(maxsize=256)
def staircase(sigma: float) -> Staircase:
    """The cells of the law with this deviation."""
    if not 0.01 <= sigma <= 2.0**36:
        raise ValueError(f"sigma must lie in [0.01, 2^36] grid steps, got {sigma!r}")
    shift = max(0, math.floor(math.log2(sigma / FINEST)))
    unit = 2**shift / sigma
    cells = math.ceil(_CUT / unit) + 1
    c = unit**2 / 2
    edges = [math.exp(-c * j * j) for j in range(cells)]
    heights = [min(edge, _middle(c, j + 0.5, 0.5)) for j, edge in enumerate(edges)]
    # A little more than F times the height: the envelope must not lie below, whatever float64 did to the exponential.
    full = (COLUMNS * CAPACITY - cells - 1) / (math.fsum(heights) * (1 + 2.0**-30))
    weights = [int(full * height * (1 + 2.0**-40)) + 1 for height in heights]
    weights[0] += COLUMNS * CAPACITY - sum(weights)
    thresholds, aliases = _alias_table(weights)
    shares = np.array([full * edge / (2 * weight) for edge, weight in zip(edges, weights, strict=True)])
    return Staircase(sigma, shift, Fraction(full), tuple(weights), thresholds, aliases, shares)


def _middle(c: float, middle: float, half: float) -> float:
    exponent = -c * middle**2 + max(0.0, 2 * c**2 * middle**2 - c) * half**2
    return math.exp(exponent) if exponent < 0 else 1.0


def _alias_table(weights: list[int]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
    """Walker's alias table in exact integers: column k stands for itself below its threshold, else for its alias."""
    remaining = weights + [0] * (COLUMNS - len(weights))
    # A column that is full has itself as its alias, so every threshold is below the capacity.
    thresholds, aliases = np.zeros(COLUMNS, np.uint32), np.arange(COLUMNS, dtype=np.int64)
    small = [k for k, weight in enumerate(remaining) if weight < CAPACITY]
    large = [k for k, weight in enumerate(remaining) if weight >= CAPACITY]
    while small:
        column, giver = small.pop(), large[-1]
        thresholds[column], aliases[column] = remaining[column], giver
        remaining[giver] -= CAPACITY - remaining[column]
        if remaining[giver] < CAPACITY:
            small.append(large.pop())
    return thresholds, aliases


def _draw(subkey: bytes, nonce: int, stairs: Staircase, first: int, count: int) -> Integers:
    if not 0 <= first <= first + count <= 16 * REGION:
        raise ValueError(f"a draw has at most 2^44 numbers, got {count} from {first} on")
    answer = np.empty(count, np.int64)
    words = np.empty((3, _CHUNK + 16), "<u4")
    rejected = []
    for start in range(first, first + count, _CHUNK):
        skip = start % 16
        size = min(_CHUNK, first + count - start)
        for region, row in enumerate(words):
            fill_keystream(row[: skip + size].data.cast("B"), subkey, nonce, region * REGION + start // 16)
        numbers = np.arange(start, start + size)
        values, accepted = _judge(words[:, skip : skip + size], numbers, 0, stairs, subkey, nonce)
        answer[start - first : start - first + size] = values
        rejected.append(numbers[~accepted])
    pending, attempt = np.concatenate(rejected) if rejected else np.empty(0, np.int64), 0
    while len(pending):
        attempt += 1
        again = np.empty((3, len(pending)), np.uint32)
        for region, row in enumerate(again):
            blocks = (3 * attempt + region) * REGION + pending // 16
            row[:] = scattered_blocks(subkey, nonce, blocks.astype(np.uint64))[np.arange(len(pending)), pending % 16]
        values, accepted = _judge(again, pending, attempt, stairs, subkey, nonce)
        answer[pending[accepted] - first] = values[accepted]
        pending = pending[~accepted]
    return answer


def _judge(
    words: Words, numbers: Integers, attempt: int, stairs: Staircase, subkey: bytes, nonce: int
) -> tuple[Integers, npt.NDArray[np.bool_]]:
    """The numbers that these words propose, and which of them are accepted."""
    chosen, level, place = words
    column = (chosen >> np.uint32(20)).astype(np.int64)
    below = (chosen >> np.uint32(1) & np.uint32(CAPACITY - 1)) < stairs.thresholds[column]
    cell = np.where(below, column, stairs.aliases[column])
    mirror = ~place
    c, share = float(stairs.curvature), stairs.shares[cell]
    one = share * np.exp(-c * _product(place, cell))
    both = one + share * np.exp(-c * _product(mirror, cell))
    at = (level.astype(np.float64) + 0.5) * 2.0**-32
    mirrored, accepted = at >= one, at < both
    margin = _margin(stairs.sigma)
    for k in np.flatnonzero((np.abs(at - one) <= margin) | (np.abs(at - both) <= margin)).tolist():
        further = bytearray(64)
        fill_keystream(memoryview(further), subkey, nonce, FURTHER + attempt * ATTEMPT + int(numbers[k]))
        exact = _decide_exactly(stairs, int(cell[k]), int(level[k]), int(words[2][k]), bytes(further))
        mirrored[k], accepted[k] = exact == "mirror", exact != "neither"
    taken = np.where(mirrored, mirror, place).astype(np.int64)
    whole = (cell << stairs.shift) + (taken >> (32 - stairs.shift))
    negative = (chosen & np.uint32(1)).astype(bool)
    whole += taken >> (31 - stairs.shift) & 1
    return np.where(negative, -whole, whole), accepted


def _margin(sigma: float) -> float:
    """Twice the half unit of the level, and what the further bits of the place can move at a slope of 13 / sigma."""
    return _UNIT * (1 + 2 * _CUT / sigma)


def _product(place: Words, cell: Integers) -> npt.NDArray[np.float64]:
    a = place * np.float64(2.0**-32)
    return a * (a + 2.0 * cell)


def _decide_exactly(stairs: Staircase, cell: int, level: int, place: int, further: bytes) -> str:
    """Which of "place", "mirror" and "neither" the level takes; level and place are the first 32 bits."""
    words = [int.from_bytes(further[4 * k : 4 * k + 4], "little") for k in range(6)]
    at = (level << 96) + (words[0] << 64) + (words[1] << 32) + words[2]
    here = (place << 96) + (words[3] << 64) + (words[4] << 32) + words[5]
    with decimal.localcontext() as context:
        context.prec = 60

        def share(a: int) -> decimal.Decimal:
            power = -stairs.curvature * (cell + Fraction(a, 1 << 128)) ** 2
            factor = stairs.height / (2 * stairs.weights[cell])
            return _decimal(power).exp() * _decimal(factor)

        one = share(here)
        if _decimal(Fraction(at, 1 << 128)) < one:
            return "place"
        return "mirror" if _decimal(Fraction(at, 1 << 128)) < one + share((1 << 128) - 1 - here) else "neither"


def _decimal(number: Fraction) -> decimal.Decimal:
    return decimal.Decimal(number.numerator) / decimal.Decimal(number.denominator)
