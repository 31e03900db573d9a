"""Exact random subsets, permutations and binomial numbers from a stream, in time and memory of what is drawn."""

from bisect import bisect_right
from collections.abc import Sequence
from decimal import Context, Decimal, localcontext
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from hush.randomness.streams import Stream

Indices = npt.NDArray[np.int64]


def subsets(stream: Stream, examples: int, sizes: Sequence[int]) -> list[Indices]:
    """Independent uniform subsets of these sizes, each sorted: draw with replacement, keep what is new, until enough.

    All of them are drawn together: subset k lives in the numbers from k * examples on, and one sorted array holds all.
    Of a subset of more than half of the examples, those that are left out are drawn.
    """
    wanted = np.asarray(sizes, np.int64)
    few = np.minimum(wanted, examples - wanted)
    starts = np.arange(len(few), dtype=np.int64) * examples
    found: Indices = np.empty(0, np.int64)
    missing = few
    while total := int(missing.sum()):
        drawn = stream.below(examples, total)
        drawn += np.repeat(starts, missing)
        found = _merged(found, _distinct(drawn, np.cumsum(missing)))
        missing = few - np.diff(np.searchsorted(found, starts + examples), prepend=0)
    found -= np.repeat(starts, few)
    ends = np.cumsum(few).tolist()
    parts = [found[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    return [part if len(part) == size else _others(part, examples) for part, size in zip(parts, sizes, strict=True)]


def _distinct(drawn: Indices, ends: Indices) -> Indices:
    """The numbers in order, each once, given in pieces that end here and whose ranges follow each other."""
    begin = 0
    for end in ends.tolist():
        drawn[begin:end].sort()  # piece by piece: half the time of sorting all at once
        begin = end
    return np.delete(drawn, np.flatnonzero(drawn[1:] == drawn[:-1]))


def _merged(found: Indices, drawn: Indices) -> Indices:
    """Two sorted arrays without repetitions as one."""
    if not len(found):
        return drawn
    places = np.searchsorted(found, drawn)
    new = found[np.minimum(places, len(found) - 1)] != drawn
    return np.insert(found, places[new], drawn[new])


def _others(left_out: Indices, examples: int) -> Indices:
    if not len(left_out):
        return np.arange(examples)
    rest = np.ones(examples, bool)
    rest[left_out] = False
    return np.flatnonzero(rest)


def permutation(stream: Stream, examples: int) -> Indices:
    """A uniform permutation: the order of random keys; equal keys, which would favour some orders, are drawn again."""
    while True:
        keys = stream.uint64(examples)
        order = np.argsort(keys)
        keys = keys[order]
        if not np.any(keys[1:] == keys[:-1]):
            return order


def binomials(stream: Stream, examples: int, expected: int, count: int) -> list[int]:
    """Independent Binomial(examples, expected / examples) numbers, each from 128 random bits."""
    first, cumulative = _binomial_table(examples, expected)
    if not cumulative:
        return [first] * count
    words = stream.uint64(2 * count).tolist()
    return [first + bisect_right(cumulative, (words[k + 1] << 64) | words[k]) for k in range(0, 2 * count, 2)]


@lru_cache(maxsize=16)
def _binomial_table(examples: int, expected: int) -> tuple[int, list[int]]:
    """The distribution function in units of 2^-128, from its first value that matters.

    Ratios of neighbouring probabilities are exact fractions, so one walk outwards from the mode in 60 digits, stopped
    where the terms fall below 1e-45 of the largest, gives all of it in O(sqrt(expected)) steps.
    """
    if examples == expected:
        return examples, []
    with localcontext(Context(prec=60)):
        odds = Decimal(expected) / Decimal(examples - expected)
        mode = (examples + 1) * expected // examples
        below, above = [], [Decimal(1)]
        smallest = Decimal("1e-45")
        for k in range(mode, examples):  # P(k + 1) / P(k)
            above.append(above[-1] * odds * (examples - k) / (k + 1))
            if above[-1] < smallest:
                break
        weight = Decimal(1)
        for k in range(mode, 0, -1):  # P(k - 1) / P(k)
            weight = weight * k / (odds * (examples - k + 1))
            below.append(weight)
            if weight < smallest:
                break
        weights = below[::-1] + above
        scale = Decimal(1 << 128) / sum(weights)
        cumulative, total = [], Decimal(0)
        for weight in weights[:-1]:
            total += weight
            cumulative.append(int(total * scale))
    return mode - len(below), cumulative
