"""ChaCha20 keystreams (RFC 8439's block function): from the OpenSSL of `cryptography`, by numpy where it is missing.

numpy takes a hundred times as long for the same bytes.

Layout of the sixteen 32-bit input words, the same on every device:

    0..3    the constant "expand 32-byte k"
    4..11   the key, 256 bits
    12, 13  the number of the 64-byte block, 64 bits, low word first
    14, 15  the nonce, 64 bits, low word first

RFC 8439 gives the block 32 bits and the nonce 96. For blocks below 2^32 the two layouts are the same function, with
the RFC's first nonce word equal to zero here; the wider counter only means that a stream does not end at 256 GiB.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

BLOCK_BYTES = 64
_CONSTANT = np.frombuffer(b"expand 32-byte k", dtype="<u4").astype(np.uint32)
_HALF = 1 << 32
_NUMPY_BLOCKS = 2048  # 128 KiB of state a round: stays in the second-level cache
_ZEROS = bytes(1 << 18)

Words = npt.NDArray[np.uint32]


def fill_keystream(out: memoryview, key: bytes, nonce: int, first_block: int) -> None:
    """Write the keystream of (key, nonce), from block first_block on, over the writable bytes of `out`.

    Pure: the same arguments always give the same bytes, whether OpenSSL or numpy computes them.

    >>> out = bytearray(4)
    >>> fill_keystream(memoryview(out), bytes(32), 0, 0)
    >>> out.hex()
    '76b8e0ad'
    """
    if len(key) != 32:
        raise ValueError(f"a ChaCha20 key has 32 bytes, got {len(key)}")
    if not (0 <= nonce < 1 << 64 and first_block >= 0 and first_block + (len(out) >> 6) < 1 << 64):
        raise ValueError("nonce and block numbers must lie in [0, 2^64)")
    fill = _fill_numpy if _openssl_cipher() is None else _fill_openssl
    fill(out, key, nonce, first_block)


@functools.cache
def _openssl_cipher() -> Callable[[bytes, bytes], Any] | None:
    """Make an encryptor from (key, 16 bytes of counter and nonce); None where `cryptography` has no ChaCha20."""
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import ciphers
    except ImportError:
        return None

    def encryptor(key: bytes, counter_and_nonce: bytes) -> Any:
        return ciphers.Cipher(ciphers.algorithms.ChaCha20(key, counter_and_nonce), mode=None).encryptor()

    try:
        encryptor(bytes(32), bytes(16))
    except UnsupportedAlgorithm:  # an OpenSSL restricted to FIPS algorithms
        return None
    return encryptor


def _fill_openssl(out: memoryview, key: bytes, nonce: int, first_block: int) -> None:
    make = _openssl_cipher()
    assert make is not None
    done = 0
    while done < len(out):
        # OpenSSL counts 32 bits of blocks and refuses to go on; a new cipher takes over at each such border.
        block = first_block + done // BLOCK_BYTES
        end = min(len(out), done + (_HALF - block % _HALF) * BLOCK_BYTES)
        cipher = make(key, block.to_bytes(8, "little") + nonce.to_bytes(8, "little"))
        while done < end:
            size = min(end - done, len(_ZEROS))
            cipher.update_into(_ZEROS if size == len(_ZEROS) else bytes(size), out[done : done + size])
            done += size


def _fill_numpy(out: memoryview, key: bytes, nonce: int, first_block: int) -> None:
    for done in range(0, len(out), _NUMPY_BLOCKS * BLOCK_BYTES):
        part = out[done : done + _NUMPY_BLOCKS * BLOCK_BYTES]
        blocks = -(-len(part) // BLOCK_BYTES)
        words = chacha20_blocks(key, nonce, first_block + done // BLOCK_BYTES, blocks)
        part[:] = words.astype("<u4").tobytes()[: len(part)]


def chacha20_blocks(key: bytes, nonce: int, first_block: int, count: int) -> Words:
    """The keystream as an array [count, 16] of 32-bit words, computed by numpy over all blocks at once."""
    return scattered_blocks(key, nonce, np.arange(count, dtype=np.uint64) + np.uint64(first_block))


def scattered_blocks(key: bytes, nonce: int, numbers: npt.NDArray[np.uint64]) -> Words:
    """The blocks with these numbers, in any order, as an array [len(numbers), 16] of 32-bit words."""
    start = np.empty((16, len(numbers)), np.uint32)
    start[:4] = _CONSTANT[:, None]
    start[4:12] = np.frombuffer(key, dtype="<u4").astype(np.uint32)[:, None]
    start[12] = (numbers & np.uint64(_HALF - 1)).astype(np.uint32)
    start[13] = (numbers >> np.uint64(32)).astype(np.uint32)
    start[14] = np.uint32(nonce % _HALF)
    start[15] = np.uint32(nonce // _HALF)
    # Rows of the 4 x 4 state, so that one numpy call does four quarter rounds of all blocks.
    a, b, c, d = (start[i : i + 4].copy() for i in range(0, 16, 4))
    for _ in range(10):
        _quarter_rounds(a, b, c, d)
        b, c, d = np.roll(b, -1, axis=0), np.roll(c, -2, axis=0), np.roll(d, -3, axis=0)
        _quarter_rounds(a, b, c, d)
        b, c, d = np.roll(b, 1, axis=0), np.roll(c, 2, axis=0), np.roll(d, 3, axis=0)
    return np.ascontiguousarray((np.concatenate([a, b, c, d]) + start).T)


def _quarter_rounds(a: Words, b: Words, c: Words, d: Words) -> None:
    for left, right, turn, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
        left += right
        turn ^= left
        high = turn >> np.uint32(32 - bits)
        turn <<= np.uint32(bits)
        turn |= high
