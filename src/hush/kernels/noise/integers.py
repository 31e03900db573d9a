"""The integers of `hush.randomness.rounded_gaussian` in Triton, number by number the same.

Shares are computed in float32. A number whose level lies within MARGIN of a share (one in 400,000), or which is drawn
again (one in 100,000), is settled alone: with its 96 further bits, in fixed point arithmetic of 128 bits.

A staircase in device memory, in int64 words: shift, c (float32 bits), c (128 bits, high word first), 1/n! for
n = 2, ..., 20 (two words each); from word 64 on 4,096 columns (uint32: threshold 2^12 + alias), the shares as float32,
then their high and their low words of 128 bits.
"""

import decimal
import functools
import math
from fractions import Fraction

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from hush.kernels.noise.chacha20 import chacha20_block
from hush.kernels.noise.table import Table, to_device
from hush.randomness.rounded_gaussian import COLUMNS, FINEST, Staircase, staircase

SMALLEST, LARGEST = float(FINEST), 2.0**36
"""Deviations that can be drawn; the series below needs cells of at most 1/128 deviation."""
MARGIN = 6e-7
"""Ten roundings of float32 at 1; a share is at most 6.1 of them wrong."""
_COLUMNS = tl.constexpr(COLUMNS)
_HEAD = tl.constexpr(64)
_TERMS = tl.constexpr(20)
REGION = tl.constexpr(1 << 40)


@triton.jit
def _times(a, b, c, d):  # type: ignore[no-untyped-def]
    """The high 128 bits of the product of (a, b) and (c, d), numbers of 128 bits with their high words first."""
    middle = a * d
    carried = middle + b * c
    carry = (carried < middle).to(tl.uint64)
    lowest = carried + tl.umulhi(b, d)
    carry += (lowest < carried).to(tl.uint64)
    high = tl.umulhi(a, c)
    low = a * c
    one = low + tl.umulhi(a, d)
    high += (one < low).to(tl.uint64)
    two = one + tl.umulhi(b, c)
    high += (two < one).to(tl.uint64)
    three = two + carry
    high += (three < two).to(tl.uint64)
    return high, three


@triton.jit
def _plus(a, b, c, d):  # type: ignore[no-untyped-def]
    low = b + d
    return a + c + (low < b).to(tl.uint64), low


@triton.jit
def _minus(a, b, c, d):  # type: ignore[no-untyped-def]
    return a - c - (b < d).to(tl.uint64), b - d


@triton.jit
def _exact_share(stairs, cell, a, b):  # type: ignore[no-untyped-def]
    """S exp(-E) with E = c a (2 j + a), in units of 2^-128 and at most 2^-115 wrong: mostly 2 j times c's last bit."""
    c, d = tl.load(stairs + 2).to(tl.uint64), tl.load(stairs + 3).to(tl.uint64)
    twice = (2 * cell).to(tl.uint64)
    squared, squared_low = _times(a, b, a, b)
    squared, squared_low = _times(squared, squared_low, c, d)
    slope, slope_low = _times(a, b, c * twice + tl.umulhi(d, twice), d * twice)
    e, f = _plus(squared, squared_low, slope, slope_low)
    # 1 - exp(-E) = E (1 - E h), h = 1/2! - E (1/3! - E (1/4! - ...)); E < 0.102, so 20 terms leave 2^-125.
    last = stairs + 4 + 2 * (_TERMS - 2)
    g, h = (a & 0) + tl.load(last).to(tl.uint64), (a & 0) + tl.load(last + 1).to(tl.uint64)  # of the shape of a
    for back in range(3, _TERMS + 1):
        n = _TERMS - back
        g, h = _times(e, f, g, h)
        g, h = _minus(tl.load(stairs + 4 + 2 * n).to(tl.uint64), tl.load(stairs + 5 + 2 * n).to(tl.uint64), g, h)
    g, h = _times(e, f, g, h)
    g, h = _times(e, f, g, h)
    g, h = _minus(e, f, g, h)
    shares = stairs + _HEAD + _COLUMNS + cell
    s, t = tl.load(shares).to(tl.uint64), tl.load(shares + _COLUMNS).to(tl.uint64)
    g, h = _times(s, t, g, h)
    return _minus(s, t, g, h)


@triton.jit
def _cell(stairs, chosen):  # type: ignore[no-untyped-def]
    columns = (stairs + _HEAD).to(tl.pointer_type(tl.uint32), bitcast=True)
    column = (chosen >> 20).to(tl.int32)
    packed = tl.load(columns + column)
    return tl.where(((chosen >> 1) & 0x7FFFF) < (packed >> 12), column, (packed & 0xFFF).to(tl.int32))


@triton.jit
def _integer(stairs, cell, taken, chosen):  # type: ignore[no-untyped-def]
    shift = tl.load(stairs)
    wide = taken.to(tl.int64)
    whole = (cell.to(tl.int64) << shift) + (wide >> (32 - shift))
    whole += (wide >> (31 - shift)) & 1
    return tl.where((chosen & 1) != 0, -whole, whole)


@triton.jit
def _decay(e):  # type: ignore[no-untyped-def]
    """exp(-e) for 0 <= e < 0.102, to 2^-29 before rounding."""
    return 1.0 - e * (1.0 - e * (0.5 - e * (0.16666667 - e * (0.041666668 - e * 0.008333334))))


@triton.jit
def _shares(stairs, cell, place, mirror):  # type: ignore[no-untyped-def]
    """The share of the place, and of place and mirror image together, in float32."""
    c = tl.load(stairs + 1).to(tl.int32).to(tl.float32, bitcast=True)
    share = tl.load((stairs + _HEAD + _COLUMNS // 2).to(tl.pointer_type(tl.float32), bitcast=True) + cell)
    twice = (2 * cell).to(tl.float32)
    a = place.to(tl.float32) * 2.3283064365386963e-10  # 2^-32
    b = mirror.to(tl.float32) * 2.3283064365386963e-10
    one = share * _decay(c * a * (a + twice))
    return one, one + share * _decay(c * b * (b + twice))


@triton.jit
def proposed(stairs, chosen, level, place, MARGIN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Integers from the first words, and which of them float32 cannot settle or refuses."""
    cell = _cell(stairs, chosen)
    mirror = place ^ 0xFFFFFFFF
    one, both = _shares(stairs, cell, place, mirror)
    v = level.to(tl.float32) * 2.3283064365386963e-10
    value = _integer(stairs, cell, tl.where(v < one, place, mirror), chosen)
    open = (tl.abs(v - one) <= MARGIN) | (v >= both - MARGIN)
    return value, open


@triton.jit
def _word_of(key_at, step, block, place):  # type: ignore[no-untyped-def]
    a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p = chacha20_block(key_at, step, block)  # noqa: E741
    a, b, c, d = _pick(place, 8, a, i), _pick(place, 8, b, j), _pick(place, 8, c, k), _pick(place, 8, d, l)
    e, f, g, h = _pick(place, 8, e, m), _pick(place, 8, f, n), _pick(place, 8, g, o), _pick(place, 8, h, p)
    a, b, c, d = _pick(place, 4, a, e), _pick(place, 4, b, f), _pick(place, 4, c, g), _pick(place, 4, d, h)
    return _pick(place, 1, _pick(place, 2, a, c), _pick(place, 2, b, d))


@triton.jit
def _pick(place, bit: tl.constexpr, without, having):  # type: ignore[no-untyped-def]
    return tl.where((place & bit) != 0, having, without)


@triton.jit
def _wide(first, second):  # type: ignore[no-untyped-def]
    return (first.to(tl.uint64) << 32) | second.to(tl.uint64)


@triton.jit
def _further(key_at, step, attempt, number):  # type: ignore[no-untyped-def]
    """The six further words of an attempt at a number, of block 2^63 + attempt 2^48 + number."""
    block = (attempt * 281474976710656 + number) ^ (-9223372036854775807 - 1)
    l0, l1, l2, p0, p1, p2, _6, _7, _8, _9, _10, _11, _12, _13, _14, _15 = chacha20_block(key_at, step, block)
    return l0, l1, l2, p0, p1, p2


@triton.jit
def _decided(stairs, cell, v, w, a, b):  # type: ignore[no-untyped-def]
    """Whether the level (v, w) takes place or mirror image of (a, b), and the first word of the one it takes."""
    ones = (a & 0) - ((a & 0) + 1)  # `~` is XOR with -1, which numpy refuses for unsigned numbers in some interpreters
    c, d = a ^ ones, b ^ ones
    one, one_low = _exact_share(stairs, cell, a, b)
    other, other_low = _exact_share(stairs, cell, c, d)
    both, both_low = _plus(one, one_low, other, other_low)
    here = (v < one) | ((v == one) & (w < one_low))
    accepted = (v < both) | ((v == both) & (w < both_low))
    return accepted, tl.where(here, a, c) >> 32


@triton.jit
def settled(key_at, step, number, stairs):  # type: ignore[no-untyped-def]
    """One number of the draw, from the beginning, with all its bits."""
    value = number & 0
    attempt = number & 0
    while attempt >= 0:
        block = 3 * attempt * REGION + number // 16
        chosen = _word_of(key_at, step, block, number % 16)
        level = _word_of(key_at, step, block + REGION, number % 16)
        place = _word_of(key_at, step, block + 2 * REGION, number % 16)
        l0, l1, l2, p0, p1, p2 = _further(key_at, step, attempt, number)
        cell = _cell(stairs, chosen)
        accepted, taken = _decided(stairs, cell, _wide(level, l0), _wide(l1, l2), _wide(place, p0), _wide(p1, p2))
        value = _integer(stairs, cell, taken, chosen)
        attempt = tl.where(accepted, -1, attempt + 1)
    return value


@functools.lru_cache(maxsize=256)
def staircase_on(device: torch.device, sigma: float) -> Tensor:
    """The staircase of this deviation in the memory of a device."""
    return to_device(_words_of(staircase(sigma)), device)


def _words_of(stairs: Staircase) -> Table:
    """The staircase as the kernel reads it."""
    head = np.zeros(64, np.uint64)
    head[0] = stairs.shift
    head[1] = int(np.float32(float(stairs.curvature)).view(np.uint32))
    curvature = int(stairs.curvature * (1 << 128))
    factorials = [(1 << 128) // math.factorial(n) for n in range(2, _TERMS.value + 1)]
    wide = np.array([divmod(number, 1 << 64) for number in (curvature, *factorials)], np.uint64)
    head[2 : 2 + wide.size] = wide.ravel()
    columns = (stairs.thresholds << np.uint32(12)) | stairs.aliases.astype(np.uint32)
    rough = np.zeros(COLUMNS, np.float32)
    rough[: len(stairs.shares)] = stairs.shares
    fine = np.zeros((2, COLUMNS), np.uint64)
    fine[:, : len(stairs.weights)] = np.array(
        [divmod(number, 1 << 64) for number in _exact_shares(stairs)], np.uint64
    ).T
    return np.concatenate([head, columns.view(np.uint64), rough.view(np.uint64), *fine]).view(np.int64)


def _exact_shares(stairs: Staircase) -> list[int]:
    """The shares S_j in units of 2^-128, from exp(-c j^2) in 192 bits, built up by products."""
    bits = 192
    curvature = stairs.curvature
    ratio, fall = _exponential(-curvature, bits), _exponential(-2 * curvature, bits)
    height, shares = 1 << bits, []
    for weight in stairs.weights:
        shares.append((height * stairs.height.numerator // (2 * weight * stairs.height.denominator)) >> (bits - 128))
        height = height * ratio >> bits
        ratio = ratio * fall >> bits
    return shares


def _exponential(power: Fraction, bits: int) -> int:
    """exp(power) in units of 2^-bits."""
    with decimal.localcontext() as context:
        context.prec = 80
        number = (decimal.Decimal(power.numerator) / decimal.Decimal(power.denominator)).exp()
        return int(number * (1 << bits))
