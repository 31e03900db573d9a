"""Exact random subsets, permutations and binomial numbers from a stream, in time and memory of what is drawn."""

from bisect import bisect_right
from decimal import Context, Decimal, localcontext
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from hush.streams import Stream

Indices = npt.NDArray[np.int64]


def subset(stream: Stream, examples: int, size: int) -> Indices:
    """A uniform subset of this size, sorted: draw with replacement, keep what is new, until there are enough."""
    few = min(size, examples - size)
    found: Indices = np.empty(0, np.int64)
    while len(found) < few:
        found = np.unique(np.concatenate([found, stream.below(examples, few - len(found))]))
    if few == size:
        return found
    rest = np.ones(examples, bool)
    rest[found] = False
    return np.flatnonzero(rest)


def permutation(stream: Stream, examples: int) -> Indices:
    """A uniform permutation: the order of random keys; equal keys, which would favour some orders, are drawn again."""
    while True:
        keys = stream.uint64(examples)
        order = np.argsort(keys)
        keys = keys[order]
        if not np.any(keys[1:] == keys[:-1]):
            return order


def binomial(stream: Stream, examples: int, expected: int) -> int:
    """Binomial(examples, expected / examples) from 128 random bits."""
    first, cumulative = _binomial_table(examples, expected)
    low, high = (int(word) for word in stream.uint64(2))
    return first + bisect_right(cumulative, (high << 64) | low)


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
