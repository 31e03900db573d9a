"""Exact Gaussian integers from a ChaCha20 stream: the discrete Gaussian, and the real Gaussian rounded to integers.

Both are drawn by rejection under a staircase. Magnitudes are cut into cells of width w, a power of two with
sigma / w in [32, 64) (1 for small sigma). Cell j is proposed with probability W_j / 2^64 by an alias table of 1,024
columns, where the W_j are integers with W_j >= F exp(-(j w)^2 / (2 sigma^2)) for a constant F. The place inside the
cell is uniform, and a proposal x is accepted with probability F exp(-x^2 / (2 sigma^2)) / W_j. The comparison with a
uniform number is made in float64 where a margin shows that no rounding can change its outcome, and otherwise with 256
further bits in 120-digit arithmetic. What is drawn is therefore exact but for the cut at 13 sigma, a total variation
distance below 2^-120 for each number.

Attempt a at number e reads 32 bytes of the keystream, half number e % 2 of block a 2^48 + e // 2, as four 64-bit words:
alias, uniform, fraction, and sign (highest bit) with place in the cell. Further bits come from block 2^62 + a 2^48 + e.
"""

import decimal
import functools
import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from hush.chacha20 import fill_keystream, scattered_blocks

_COLUMNS = 1 << 10
_CAPACITY = 1 << 54  # columns times capacity: 2^64
_CUT = 13.0
_ATTEMPT = 1 << 48
_FURTHER = 1 << 62
_CHUNK = 1 << 13
_MARGIN = 2.0**-36  # float64 errors stay below 2^-42 of an acceptance probability; uniform numbers are cut at 2^-53

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class _Staircase:
    sigma: float
    width: int
    height: Fraction  # F
    weights: tuple[int, ...]  # W_j
    thresholds: npt.NDArray[np.uint64]
    aliases: npt.NDArray[np.int64]
    ratios: npt.NDArray[np.float64]  # F / W_j


def rounded_gaussian(subkey: bytes, nonce: int, *, sigma: float, first: int, count: int) -> Integers:
    """Numbers first, first + 1, ... (first even): a real Gaussian of deviation sigma, rounded to the nearest integer.

    Guarantee: adding them to an integer vector is the same as adding an exact real Gaussian and rounding the result,
    so every bound for the Gaussian mechanism holds (rounding is post-processing).
    """
    return _draw(subkey, nonce, _staircase(sigma), first, count, rounded=True)


def discrete_gaussian(subkey: bytes, nonce: int, *, sigma: float, first: int, count: int) -> Integers:
    """Numbers first, first + 1, ... (first even): integers n with probability proportional to exp(-n^2 / (2 sigma^2)).

    Guarantee: the Renyi divergences between integer shifts are at most those of the real Gaussian (Canonne, Kamath and
    Steinke 2020). That is a statement about Renyi divergence, not about the privacy loss distribution.
    """
    return _draw(subkey, nonce, _staircase(sigma), first, count, rounded=False)


@functools.lru_cache(maxsize=64)
def _staircase(sigma: float) -> _Staircase:
    if not 0.01 <= sigma <= 2.0**36:
        raise ValueError(f"sigma must lie in [0.01, 2^36] grid steps, got {sigma!r}")
    width = 1 << max(0, math.floor(math.log2(sigma / 32)))
    cells = math.ceil(_CUT * sigma / width) + 1
    heights = [math.exp(-((j * width / sigma) ** 2) / 2) for j in range(cells)]
    full = (2.0**64 - 2.0**24) / (math.fsum(heights) * (1 + 2.0**-40))
    # A little more than F times the height: the envelope must not lie below, whatever float64 did to the exponential.
    weights = [int(full * height * (1 + 2.0**-41)) + 1 for height in heights]
    weights[0] += _COLUMNS * _CAPACITY - sum(weights)
    thresholds, aliases = _alias_table(weights)
    ratios = np.array([full / weight for weight in weights])
    return _Staircase(sigma, width, Fraction(full), tuple(weights), thresholds, aliases, ratios)


def _alias_table(weights: list[int]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """Walker's alias table in exact integers: column c stands for itself below its threshold, else for its alias."""
    remaining = weights + [0] * (_COLUMNS - len(weights))
    thresholds, aliases = np.zeros(_COLUMNS, np.uint64), np.arange(_COLUMNS, dtype=np.int64)
    small = [c for c, weight in enumerate(remaining) if weight < _CAPACITY]
    large = [c for c, weight in enumerate(remaining) if weight >= _CAPACITY]
    while small:
        column, giver = small.pop(), large[-1]
        thresholds[column], aliases[column] = remaining[column], giver
        remaining[giver] -= _CAPACITY - remaining[column]
        if remaining[giver] < _CAPACITY:
            small.append(large.pop())
    thresholds[large] = _CAPACITY
    return thresholds, aliases


def _draw(subkey: bytes, nonce: int, stairs: _Staircase, first: int, count: int, *, rounded: bool) -> Integers:
    if first % 2:
        raise ValueError(f"a draw begins at an even number, got {first}")
    answer = np.empty(count, np.int64)
    words = np.empty((_CHUNK, 4), "<u8")
    rejected = []
    for start in range(0, count, _CHUNK):
        part = words[: min(_CHUNK, count - start)]
        fill_keystream(part.data.cast("B"), subkey, nonce, (first + start) // 2)
        numbers = np.arange(first + start, first + start + len(part))
        values, accepted = _judge(part, numbers, 0, stairs, subkey, nonce, rounded)
        answer[start : start + len(part)] = values
        rejected.append(numbers[~accepted])
    pending, attempt = np.concatenate(rejected) if rejected else np.empty(0, np.int64), 0
    while len(pending):
        attempt += 1
        again = scattered_blocks(subkey, nonce, (attempt * _ATTEMPT + pending // 2).astype(np.uint64))
        halves = again.astype("<u4").view("<u8").reshape(-1, 2, 4)[np.arange(len(pending)), pending % 2]
        values, accepted = _judge(halves, pending, attempt, stairs, subkey, nonce, rounded)
        answer[pending[accepted] - first] = values[accepted]
        pending = pending[~accepted]
    return answer


def _judge(
    words: npt.NDArray[np.uint64],
    numbers: Integers,
    attempt: int,
    stairs: _Staircase,
    subkey: bytes,
    nonce: int,
    rounded: bool,
) -> tuple[Integers, npt.NDArray[np.bool_]]:
    """The proposals that these words make, and which of them are accepted."""
    alias, uniform, fraction, rest = words.T
    column = (alias >> np.uint64(54)).astype(np.int64)
    cell = np.where((alias & np.uint64(_CAPACITY - 1)) < stairs.thresholds[column], column, stairs.aliases[column])
    whole = cell * stairs.width + (rest & np.uint64(stairs.width - 1)).astype(np.int64)
    negative = (rest >> np.uint64(63)).astype(bool)
    exponent = whole + _unit(fraction) if rounded else whole.astype(np.float64)
    exponent *= math.sqrt(0.5) / stairs.sigma
    np.square(exponent, out=exponent)
    probability = np.exp(np.negative(exponent, out=exponent), out=exponent) * stairs.ratios[cell]
    difference = probability - _unit(uniform)
    accepted = difference > 0
    for at in np.flatnonzero(np.abs(difference) <= _MARGIN * (probability + 2.0**-13)).tolist():
        further = bytearray(64)
        block = _FURTHER + attempt * _ATTEMPT + int(numbers[at])
        fill_keystream(memoryview(further), subkey, nonce, block)
        inside = int(fraction[at]) if rounded else None
        accepted[at] = _accepted_exactly(
            stairs, int(cell[at]), int(whole[at]), inside, int(uniform[at]), bytes(further)
        )
    if rounded:
        whole += (fraction >> np.uint64(63)).astype(np.int64)
    else:
        accepted &= ~(negative & (whole == 0))  # zero has one sign
    return np.where(negative, -whole, whole), accepted


def _unit(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """The highest 53 bits as a number in [0, 1); by way of int64, which numpy converts five times faster."""
    return (words >> np.uint64(11)).view(np.int64) * np.float64(2.0**-53)


def _accepted_exactly(
    stairs: _Staircase, cell: int, whole: int, fraction: int | None, uniform: int, further: bytes
) -> bool:
    first, second = int.from_bytes(further[:32], "little"), int.from_bytes(further[32:], "little")
    place = Fraction(whole) if fraction is None else whole + Fraction((fraction << 256) + first, 1 << 320)
    level = Fraction((uniform << 256) + second, 1 << 320) * stairs.weights[cell] / stairs.height
    with decimal.localcontext() as context:
        context.prec = 120
        power = -(place**2) / (2 * Fraction(stairs.sigma) ** 2)
        height = (decimal.Decimal(power.numerator) / decimal.Decimal(power.denominator)).exp()
        return decimal.Decimal(level.numerator) / decimal.Decimal(level.denominator) < height
