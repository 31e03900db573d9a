"""Standard normal numbers from a ChaCha20 stream, by Box and Muller's transform in float32 with right tails.

How the words of the keystream become numbers (the Triton kernel follows the same map):

    The numbers of a draw are cut into runs of 262,144, the last one shorter. A run of m numbers pairs word e of its
    keystream with word e + h, where h = 16 ceil(m / 32) (131,072 in a full run), so that both halves are contiguous:
        radius  r = sqrt(-ln(f^2)),  f = signed word e / 2^31          number e     = r cos(angle)
        angle     = pi * signed word (e + h) / 2^31                    number e + h = r sin(angle)
    with f and f^2 rounded to float32.
    If the signed word k of the radius lies in [-4096, 4096), its cell is too coarse for the tail: f becomes
    (k' + (v + 1/2) / 2^32) / 2^31 with k' = k or -1 - k >= 0 and v = word e' of a second keystream, where e' is the
    number's place in the whole draw. The second keystream has the same key and nonce and starts at block 2^63.

What is exact and what is not: the probability that the radius exceeds r is right to one part in 2^12 for every r up to
9.42, the largest radius (a true radius is larger with probability 2^-64), and the probability that it is below r is
right to 2^-23: float32 rounds f by one part in 2^24, and then logarithm, root, sine and cosine by a few more. Without
the refinement the largest radius would be 6.6. These are continuous normals rounded to float32: see
`hush.noise.float_safe` for noise that stays exact in finite precision.
"""

import math
import threading

import numpy as np
import numpy.typing as npt

from hush.randomness.chacha20 import BLOCK_BYTES, fill_keystream
from hush.randomness.streams import Claim, Key, NeverCopied

RUN = 1 << 18
REFINED_BELOW = 4_096
REFINEMENT_BLOCK = 1 << 63
_WORDS_PER_BLOCK = BLOCK_BYTES // 4

Floats = npt.NDArray[np.float32]


class _Workspace(threading.local):
    """Scratch of one thread: 2 MiB."""

    def __init__(self) -> None:
        self.words = np.empty(RUN, "<i4")
        self.radius = np.empty(RUN // 2, np.float32)
        self.angle = np.empty(RUN // 2, np.float32)


_workspace = _Workspace()


def fill_normals(out: Floats, subkey: bytes, nonce: int, *, first: int = 0) -> None:
    """Write numbers first, first + 1, ... of the stream (subkey, nonce) over `out`; `first` is a multiple of RUN.

    >>> out = np.empty(3, np.float32)
    >>> fill_normals(out, bytes(32), 0)
    >>> [f"{number:.3f}" for number in out]
    ['-0.025', '-0.516', '-1.767']
    """
    if first % RUN:
        raise ValueError(f"a draw is continued at multiples of {RUN}, got {first}")
    for start in range(0, len(out), RUN):
        _fill_run(out[start : start + RUN], subkey, nonce, first + start)


def half_of(run_length: int) -> int:
    """The distance of the two words of a pair in a run of this length."""
    return _WORDS_PER_BLOCK * -(-run_length // (2 * _WORDS_PER_BLOCK))


def _fill_run(out: Floats, subkey: bytes, nonce: int, first: int) -> None:
    half = half_of(len(out))
    words = _workspace.words[: 2 * half]
    fill_keystream(words.data.cast("B"), subkey, nonce, first // _WORDS_PER_BLOCK)

    radius = _workspace.radius[:half]
    np.copyto(radius, words[:half], casting="unsafe")
    radius *= np.float32(2.0**-31)
    radius *= radius
    coarse: npt.NDArray[np.intp] | None = None
    if radius.min() < (REFINED_BELOW * 2.0**-31) ** 2:
        coarse = np.flatnonzero((words[:half] >= -REFINED_BELOW) & (words[:half] < REFINED_BELOW))
        radius[coarse] = 1.0
    np.log(radius, out=radius)
    np.negative(radius, out=radius)
    np.sqrt(radius, out=radius)
    if coarse is not None:
        for place in coarse.tolist():
            radius[place] = _tail_radius(int(words[place]), subkey, nonce, first + place)

    angle = _workspace.angle[:half]
    np.copyto(angle, words[half:], casting="unsafe")
    angle *= np.float32(math.pi * 2.0**-31)
    cosines, sines = out[:half], out[half:]
    np.cos(angle[: len(cosines)], out=cosines)
    cosines *= radius[: len(cosines)]
    np.sin(angle[: len(sines)], out=sines)
    sines *= radius[: len(sines)]


def _tail_radius(word: int, subkey: bytes, nonce: int, place: int) -> float:
    """The radius of a word whose cell is coarse, with 32 further bits to place it inside the cell."""
    block = bytearray(BLOCK_BYTES)
    fill_keystream(memoryview(block), subkey, nonce, REFINEMENT_BLOCK + place // _WORDS_PER_BLOCK)
    at = 4 * (place % _WORDS_PER_BLOCK)
    fraction = (int.from_bytes(block[at : at + 4], "little") + 0.5) * 2.0**-32
    cell = word if word >= 0 else -1 - word
    return math.sqrt(-2.0 * math.log((cell + fraction) * 2.0**-31))


class _Buffer(threading.local):
    """Memory of one thread that was touched before: fresh pages cost as much as the numbers in them."""

    def __init__(self) -> None:
        self._floats = np.empty(0, np.float32)

    def of(self, count: int) -> Floats:
        if len(self._floats) != count:
            self._floats = np.empty(count, np.float32)
        return self._floats


class Normals(NeverCopied):
    """Standard normal numbers for one purpose of a run: a vector for each step, from the key's stream for that step.

    Guarantee: no vector is handed out twice, not by another `Normals` of the same key either (`Key.claim`); threads may
    share one. After a fork the child draws from a key of its own (a seeded key stays as it is).

    >>> [f"{number:.3f}" for number in Normals(Key.from_seed(0)).draw(step=0, count=2)]
    ['0.564', '0.101']
    """

    def __init__(self, key: Key, purpose: str = "gradient", *, rank: int = 0) -> None:
        self.key = key
        self._purpose = f"noise/{purpose}"
        self._rank = rank
        self._buffer = _Buffer()

    def draw(self, step: int, count: int) -> Floats:
        """The step's first `count` numbers; valid until this thread draws again, which may overwrite them."""
        return self.on_cpu(self.begin(step), count)

    def begin(self, step: int | None = None) -> Claim:
        """Use up a step, without a number the next one: it and all steps before it are refused from now on."""
        return self.key.claim(self._purpose, step=step, rank=self._rank)

    def on_cpu(self, claim: Claim, count: int, device_number: int = 0) -> Floats:
        """The numbers of a step that was begun, for one device."""
        out = self._buffer.of(count)
        fill_normals(out, claim.subkey(device_number), claim.step)
        return out
