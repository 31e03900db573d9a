"""Normal numbers from keystream words, one at a time, written from the documented map and its two roundings alone."""

import math
import struct
from collections.abc import Callable


def signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def float32(number: float) -> float:
    return float(struct.unpack("f", struct.pack("f", number))[0])


def normals(count: int, word: Callable[[int], int], refinement: Callable[[int], int]) -> list[float]:
    """`word(i)` is word i of the keystream, `refinement(i)` word i of the second one."""
    answer: list[float] = []
    run = 262_144
    for first in range(0, count, run):
        length = min(run, count - first)
        half = 16 * math.ceil(length / 32)
        cosines, sines = [], []
        for e in range(half):
            k = signed(word(first + e))
            fraction = math.sqrt(float32(float32(abs(k) / 2**31) ** 2))
            if -4096 <= k < 4096:
                cell = k if k >= 0 else -1 - k
                fraction = (cell + (refinement(first + e) + 0.5) / 2**32) / 2**31
            radius = math.sqrt(-2 * math.log(fraction))
            angle = math.pi * signed(word(first + e + half)) / 2**31
            cosines.append(radius * math.cos(angle))
            sines.append(radius * math.sin(angle))
        answer += (cosines + sines)[:length]
    return answer
