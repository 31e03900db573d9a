"""Random streams: ChaCha20 keyed by the operating system, one stream for each purpose, step, tensor and rank.

Every stream is the keystream of its own (subkey, nonce):

    subkey = BLAKE2b-256(key = the 32 secret bytes, person = "hush.streams.v1",
                         message = length of purpose (8 bytes) | purpose in UTF-8 | tensor (8 bytes) | rank (8 bytes))
    nonce  = step (8 bytes)

All integers are little endian. The lengths are fixed or written, so two different requests never encode alike; the
block counter has 64 bits. The step is the nonce, and not hashed, so that a captured GPU graph can move to the next
step by changing one number in device memory.
"""

import hashlib
import operator
import os
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from hush.randomness.chacha20 import BLOCK_BYTES, fill_keystream

_LIMIT = 1 << 64


class _Process:
    """Changes identity in a forked child, so that what was made before the fork can be told apart."""

    token = object()


def _after_fork_in_child() -> None:
    _Process.token = object()


os.register_at_fork(after_in_child=_after_fork_in_child)


def this_process() -> tuple[int, object]:
    """A value that differs between a process and the children it forks."""
    # The process number too: a fork by foreign C code does not run Python's fork handlers.
    return os.getpid(), _Process.token


class Key:
    """A secret from which all streams of a run are derived; it is never shown, written or pickled.

    Guarantee: two streams of a key coincide only if purpose, step, tensor and rank are all equal. In a forked child an
    operating system's key becomes a new one before its first use there, so that child and parent share no stream. A
    key from a seed stays what it is; what is drawn from it is reproducible and protects nobody (`private` is False).

    >>> Key.from_os()
    Key(private=True)
    >>> Key.from_seed(7).stream("noise", step=3).bytes(4).hex()
    'db6997ec'
    """

    __slots__ = ("_home", "_secret", "private")

    def __init__(self, secret: bytes, *, private: bool) -> None:
        if len(secret) != 32:
            raise ValueError(f"a key has 32 bytes, got {len(secret)}; use Key.from_os() or Key.from_seed(seed)")
        self._secret = bytearray(secret)
        self._home = this_process()
        self.private = private

    @classmethod
    def from_os(cls) -> "Key":
        """A new key of 32 bytes from the operating system."""
        return cls(os.urandom(32), private=True)

    @classmethod
    def from_seed(cls, seed: int) -> "Key":
        """The key of this seed, for tests and experiments; whatever uses it is NOT PRIVATE."""
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(f"a seed is an int, got {seed!r}")
        return cls(hashlib.blake2b(str(seed).encode(), digest_size=32, person=b"hush.seed.v1").digest(), private=False)

    def stream(self, purpose: str, *, step: int = 0, tensor: int = 0, rank: int = 0) -> "Stream":
        """The stream for this purpose, step, tensor and rank, from its beginning."""
        return Stream(self.subkey(purpose, tensor=tensor, rank=rank), _word("step", step), secret=self.private)

    def subkey(self, purpose: str, *, tensor: int = 0, rank: int = 0) -> bytes:
        """The 32 bytes that key the streams of all steps; for kernels that compute the keystream elsewhere."""
        if self.private and self._home != this_process():
            self._secret[:] = os.urandom(32)
            self._home = this_process()
        name = purpose.encode()
        numbers = _word("tensor", tensor).to_bytes(8, "little") + _word("rank", rank).to_bytes(8, "little")
        message = len(name).to_bytes(8, "little") + name + numbers
        return hashlib.blake2b(message, key=bytes(self._secret), digest_size=32, person=b"hush.streams.v1").digest()

    def __repr__(self) -> str:
        return f"Key(private={self.private})"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a Key is never pickled or copied: make a new one with Key.from_os() where it is needed")


class Stream:
    """The random numbers of one purpose, step, tensor and rank, in order; made by `Key.stream`.

    Guarantee: what is drawn never repeats, and depends only on how many bytes were drawn before. A stream of an
    operating system's key refuses to go on in a forked child.
    """

    __slots__ = ("_home", "_nonce", "_position", "_secret", "_subkey")

    def __init__(self, subkey: bytes, nonce: int, *, secret: bool) -> None:
        self._subkey = subkey
        self._nonce = nonce
        self._secret = secret
        self._position = 0
        self._home = this_process()

    def fill(self, out: npt.NDArray[np.generic]) -> None:
        """Overwrite a contiguous array with the next bytes of the stream."""
        if self._secret and self._home != this_process():
            raise RuntimeError(
                "this stream belongs to the process before the fork; take a new one from Key.stream(...)"
            )
        if out.size == 0:
            return
        view = out.data.cast("B")
        done, offset = 0, self._position % BLOCK_BYTES
        if offset:
            block = bytearray(BLOCK_BYTES)
            fill_keystream(memoryview(block), self._subkey, self._nonce, self._position // BLOCK_BYTES)
            done = min(len(view), BLOCK_BYTES - offset)
            view[:done] = block[offset : offset + done]
        if done < len(view):
            fill_keystream(view[done:], self._subkey, self._nonce, (self._position + done) // BLOCK_BYTES)
        self._position += len(view)

    def bytes(self, count: int) -> bytes:
        """The next `count` bytes."""
        return self._draw(count, "u1").tobytes()

    def uint32(self, count: int) -> npt.NDArray[np.uint32]:
        """The next `count` uniform 32-bit integers."""
        return self._draw(count, "<u4").astype(np.uint32, copy=False)

    def uint64(self, count: int) -> npt.NDArray[np.uint64]:
        """The next `count` uniform 64-bit integers."""
        return self._draw(count, "<u8").astype(np.uint64, copy=False)

    def below(self, bound: int, count: int) -> npt.NDArray[np.int64]:
        """`count` independent integers, exactly uniform on 0, ..., bound - 1."""
        if not 1 <= bound <= 1 << 63:
            raise ValueError(f"bound must lie in [1, 2^63], got {bound!r}")
        # Half the words for usual sizes; one number in 256 is drawn again at most.
        draw, kind = (self.uint32, np.uint32) if bound <= 1 << 24 else (self.uint64, np.uint64)
        values = 1 << 8 * kind().itemsize
        last = kind(values - values % bound - 1)  # the values above it would favour small remainders
        numbers = draw(count)
        while len(again := np.flatnonzero(numbers > last)):
            numbers[again] = draw(len(again))
        return (numbers % kind(bound)).astype(np.int64)

    def uniform(self, count: int) -> npt.NDArray[np.float64]:
        """`count` uniform numbers (k + 1/2) / 2^52: inside (0, 1), never 0 or 1."""
        return ((self.uint64(count) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52

    def _draw(self, count: int, dtype: str) -> npt.NDArray[np.generic]:
        out = np.empty(count, dtype)
        self.fill(out)
        return out

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a Stream is never pickled or copied, since a copy would repeat it; use Key.stream(...)")


def _word(name: str, value: int) -> int:
    number = operator.index(value)
    if not 0 <= number < _LIMIT:
        raise ValueError(f"{name} must be an integer in [0, 2^64), got {value!r}")
    return number
