"""Random streams: ChaCha20 keyed by the operating system, one stream for each purpose, step, tensor and rank.

Every stream is the keystream of its own (subkey, nonce):

    subkey = BLAKE2b-256(key = the 32 secret bytes, person = "hush.streams.v1",
                         message = length of purpose (8 bytes) | purpose in UTF-8 | tensor (8 bytes) | rank (8 bytes)
                                   | fresh bytes (40, of a private key only))
    nonce  = step (8 bytes)

All integers are little endian. The lengths are fixed or written, so two different requests never encode alike; the
block counter has 64 bits.

Nothing is drawn twice, for three reasons of which each is enough while all is well:

- A key hands out each purpose and rank step by step, and only forwards (`Key.claim`). What was claimed is noted in the
  key itself, which cannot be copied; so a copy of whatever draws from it is refused, and threads take turns.
- Of a private key every claim takes 32 fresh bytes from the operating system. So a process whose memory was copied (a
  fork, a restored snapshot of a virtual machine or a container) draws other numbers than its twin.
- Beside them stand 8 bytes of the clock, for a twin whose operating system repeats its bytes as well; and in a forked
  child a private key becomes another one.
"""

import hashlib
import operator
import os
import threading
import time
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


def _fresh_bytes() -> bytes:
    """What no other call returns, here or in a copy of this process."""
    return os.urandom(32) + (time.time_ns() % _LIMIT).to_bytes(8, "little")


class NeverCopied:
    """What cannot be copied or pickled, because the copy would repeat its random numbers."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} is never pickled or copied, since the copy would draw the same random numbers: "
            "make a new one where it is needed"
        )


class Key(NeverCopied):
    """A secret from which random streams are derived; it is never shown, written or pickled.

    Guarantee: no two streams coincide, whoever asks for them, in any thread: each step of a purpose and rank is handed
    out once. Of an operating system's key no stream can be had a second time either from a copy of the process's
    memory. A key from a seed gives the same streams in the same order, is reproducible and protects nobody (`private`
    is False).

    Several mechanisms that share a key each take a `child` of it.

    >>> Key.from_os()
    Key(private=True)
    >>> Key.from_seed(7).stream("noise", step=3).bytes(4).hex()
    'db6997ec'
    """

    __slots__ = ("_claimed", "_home", "_lock", "_secret", "private")

    def __init__(self, secret: bytes, *, private: bool) -> None:
        if len(secret) != 32:
            raise ValueError(f"a key has 32 bytes, got {len(secret)}; use Key.from_os() or Key.from_seed(seed)")
        self._secret = bytes(secret)
        self.private = private
        self._settle()

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

    def claim(self, purpose: str, *, step: int | None = None, rank: int = 0) -> "Claim":
        """Take a step of a purpose, which nobody can take again; without a number, the next one.

        Steps only go forward: it and all steps before it are refused from now on.
        """
        rank, wanted = _word("rank", rank), None if step is None else _word("step", step)
        if self._home != this_process():
            self._leave_to_parent()
        with self._lock:
            last = self._claimed.get((purpose, rank), -1)
            number = last + 1 if wanted is None else wanted
            if number <= last:
                raise RuntimeError(
                    f"{purpose!r} of step {number} was asked for after that of step {last}: what belongs to a step is "
                    "drawn once, since noise that is used twice cancels; use a later step, or a child of the key"
                )
            self._claimed[purpose, rank] = number
        return Claim(self._secret, purpose, number, rank, _fresh_bytes() if self.private else b"")

    def stream(self, purpose: str, *, step: int = 0, rank: int = 0) -> "Stream":
        """The stream of this purpose, step and rank, from its beginning; claims the step."""
        return Stream(self.claim(purpose, step=step, rank=rank))

    def child(self, purpose: str) -> "Key":
        """A key for one mechanism, which shares no stream with this one or with any other child of it."""
        return Key(Stream(self.claim(f"child/{purpose}")).bytes(32), private=self.private)

    def _settle(self) -> None:
        self._home = this_process()
        self._lock = threading.Lock()
        self._claimed: dict[tuple[str, int], int] = {}

    def _leave_to_parent(self) -> None:
        """In a forked child: a private key becomes another one; the lock may be held by a thread of the parent."""
        if self.private:
            self._secret = os.urandom(32)
        self._settle()

    def __repr__(self) -> str:
        return f"Key(private={self.private})"


class Claim(NeverCopied):
    """A step of a purpose, taken from a key once; the keys of its streams, one for each tensor or device.

    A claim of a private key is refused in a forked child, where it would be the parent's.
    """

    __slots__ = ("_fresh", "_home", "_purpose", "_rank", "_secret", "step")

    def __init__(self, secret: bytes, purpose: str, step: int, rank: int, fresh: bytes) -> None:
        self._secret = secret
        self._purpose = purpose.encode()
        self.step = step
        """The nonce of the streams."""
        self._rank = rank
        self._fresh = fresh
        self._home = this_process()

    def subkey(self, tensor: int = 0) -> bytes:
        """The 32 bytes that key the stream of one tensor; for kernels that compute the keystream elsewhere."""
        if self._fresh and self._home != this_process():
            raise RuntimeError("this stream belongs to the process before the fork; take a new one from its key")
        numbers = _word("tensor", tensor).to_bytes(8, "little") + self._rank.to_bytes(8, "little")
        message = len(self._purpose).to_bytes(8, "little") + self._purpose + numbers + self._fresh
        return hashlib.blake2b(message, key=self._secret, digest_size=32, person=b"hush.streams.v1").digest()


class Stream(NeverCopied):
    """The random numbers of one purpose, step and rank, in order; made by `Key.stream`.

    Guarantee: what is drawn never repeats, and depends only on how many bytes were drawn before. A stream of an
    operating system's key refuses to go on in a forked child. It belongs to one thread.
    """

    __slots__ = ("_claim", "_position")

    def __init__(self, claim: Claim) -> None:
        self._claim = claim
        self._position = 0

    def fill(self, out: npt.NDArray[np.generic]) -> None:
        """Overwrite a contiguous array with the next bytes of the stream."""
        if out.size == 0:
            return
        subkey, nonce = self._claim.subkey(), self._claim.step
        view = out.data.cast("B")
        done, offset = 0, self._position % BLOCK_BYTES
        if offset:
            block = bytearray(BLOCK_BYTES)
            fill_keystream(memoryview(block), subkey, nonce, self._position // BLOCK_BYTES)
            done = min(len(view), BLOCK_BYTES - offset)
            view[:done] = block[offset : offset + done]
        if done < len(view):
            fill_keystream(view[done:], subkey, nonce, (self._position + done) // BLOCK_BYTES)
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


def _word(name: str, value: int) -> int:
    number = operator.index(value)
    if not 0 <= number < _LIMIT:
        raise ValueError(f"{name} must be an integer in [0, 2^64), got {value!r}")
    return number
