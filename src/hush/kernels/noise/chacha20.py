"""ChaCha20 in Triton: the words of `hush.randomness.chacha20`, bit for bit, one block of sixteen words to a lane."""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

LANES = 128


@triton.jit
def _rotated(x, bits: tl.constexpr):  # type: ignore[no-untyped-def]
    return (x << bits) | (x >> (32 - bits))


@triton.jit
def _quarter_round(a, b, c, d):  # type: ignore[no-untyped-def]
    a += b
    d = _rotated(d ^ a, 16)
    c += d
    b = _rotated(b ^ c, 12)
    a += b
    d = _rotated(d ^ a, 8)
    c += d
    b = _rotated(b ^ c, 7)
    return a, b, c, d


@triton.jit
def _ordered(w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15):  # type: ignore[no-untyped-def]
    # Each join adds a last dimension of two, so the first join decides the highest bit of a word's place.
    even = tl.join(tl.join(tl.join(w0, w8), tl.join(w4, w12)), tl.join(tl.join(w2, w10), tl.join(w6, w14)))
    odd = tl.join(tl.join(tl.join(w1, w9), tl.join(w5, w13)), tl.join(tl.join(w3, w11), tl.join(w7, w15)))
    words = tl.join(even, odd)
    return tl.reshape(words, [words.shape[0] * 16])


@triton.jit
def chacha20_words(key_at, step, block):  # type: ignore[no-untyped-def]
    """The keystream words of blocks [n] (int64), as [16 n] words in order; key_at points to eight int64 words."""
    w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15 = chacha20_block(key_at, step, block)
    return _ordered(w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15)


@triton.jit
def chacha20_block(key_at, step, block):  # type: ignore[no-untyped-def]
    """The sixteen words of each block, one after another; `block` is a number or a vector of numbers (int64)."""
    low = block.to(tl.uint32)
    high = (block >> 32).to(tl.uint32)
    same = low & 0
    k0 = same + tl.load(key_at + 0).to(tl.uint32)
    k1 = same + tl.load(key_at + 1).to(tl.uint32)
    k2 = same + tl.load(key_at + 2).to(tl.uint32)
    k3 = same + tl.load(key_at + 3).to(tl.uint32)
    k4 = same + tl.load(key_at + 4).to(tl.uint32)
    k5 = same + tl.load(key_at + 5).to(tl.uint32)
    k6 = same + tl.load(key_at + 6).to(tl.uint32)
    k7 = same + tl.load(key_at + 7).to(tl.uint32)
    n0 = same + step.to(tl.uint32)
    n1 = same + (step >> 32).to(tl.uint32)
    c0 = same + 0x61707865
    c1 = same + 0x3320646E
    c2 = same + 0x79622D32
    c3 = same + 0x6B206574
    w0, w1, w2, w3 = c0, c1, c2, c3
    w4, w5, w6, w7 = k0, k1, k2, k3
    w8, w9, w10, w11 = k4, k5, k6, k7
    w12, w13, w14, w15 = low, high, n0, n1
    for _ in range(10):
        w0, w4, w8, w12 = _quarter_round(w0, w4, w8, w12)
        w1, w5, w9, w13 = _quarter_round(w1, w5, w9, w13)
        w2, w6, w10, w14 = _quarter_round(w2, w6, w10, w14)
        w3, w7, w11, w15 = _quarter_round(w3, w7, w11, w15)
        w0, w5, w10, w15 = _quarter_round(w0, w5, w10, w15)
        w1, w6, w11, w12 = _quarter_round(w1, w6, w11, w12)
        w2, w7, w8, w13 = _quarter_round(w2, w7, w8, w13)
        w3, w4, w9, w14 = _quarter_round(w3, w4, w9, w14)
    return (
        w0 + c0, w1 + c1, w2 + c2, w3 + c3, w4 + k0, w5 + k1, w6 + k2, w7 + k3,
        w8 + k4, w9 + k5, w10 + k6, w11 + k7, w12 + low, w13 + high, w14 + n0, w15 + n1,
    )  # fmt: skip


@triton.jit
def _keystream(out, state, first_block, lanes: tl.constexpr):  # type: ignore[no-untyped-def]
    start = tl.program_id(0).to(tl.int64) * lanes
    words = chacha20_words(state + 1, tl.load(state), first_block + start + tl.arange(0, lanes))
    tl.store(out + start * 16 + tl.arange(0, lanes * 16), words.to(tl.int32, bitcast=True))


def state_words(subkey: bytes, step: int) -> list[int]:
    """What the kernels read from device memory: the step, then the eight words of the key, all as int64."""
    return [step - (1 << 64) if step >= 1 << 63 else step, *np.frombuffer(subkey, "<u4").tolist()]


def keystream(subkey: bytes, step: int, *, first_block: int, blocks: int, device: torch.device | str) -> Tensor:
    """The keystream as int32 words on a device, for comparison with the CPU's."""
    programs = triton.cdiv(blocks, LANES)
    out = torch.empty(programs * LANES * 16, dtype=torch.int32, device=device)
    state = torch.tensor(state_words(subkey, step), dtype=torch.int64, device=device)
    _keystream[(programs,)](out, state, first_block, lanes=LANES)
    return out[: blocks * 16]
