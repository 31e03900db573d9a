"""The release of a bounded sum on a GPU in one launch: out = (total + deviation * normal numbers) * scale.

The numbers are those of `hush.randomness.gaussian_samples`, place by place: the keystream equal bit for bit, the
normals to 1e-6. All that changes between steps lies in the table of `hush.kernels.noise.table`, whose settings are
the S deviations (float64).
"""

import functools
from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from hush.kernels.noise.chacha20 import LANES, chacha20_words
from hush.kernels.noise.table import Table, TableRelease, first_tensors, fits
from hush.randomness.gaussian_samples import RUN, half_of

_FEW_LANES = 32
_RUN = tl.constexpr(RUN)


@triton.jit
def _turned(angle):  # type: ignore[no-untyped-def]
    """Cosine and sine of an angle in [-pi, pi], each to 2^-23, by far fewer instructions than in general."""
    quarter = tl.floor(angle * 0.6366197723675814 + 0.5)
    # Two parts of pi / 2: the first product is exact by fused multiply-add, the second brings the missing digits.
    y = tl.fma(-quarter, 1.5707963705062866, angle)
    y = tl.fma(-quarter, -4.371139000186241e-08, y)
    z = y * y
    sine = tl.fma(tl.fma(-0.00019495291053317487, z, 0.008331975899636745), z, -0.16666650772094727)
    sine = tl.fma(sine, z * y, y)
    cosine = tl.fma(tl.fma(2.4438089894829318e-05, z, -0.0013887364184483886), z, 0.04166664555668831)
    cosine = tl.fma(cosine, z * z, tl.fma(z, -0.5, 1.0))
    turn = quarter.to(tl.int32)
    odd = (turn & 1) != 0
    x, y = tl.where(odd, sine, cosine), tl.where(odd, cosine, sine)
    return tl.where(((turn + 1) & 2) != 0, -x, x), tl.where((turn & 2) != 0, -y, y)


@triton.jit
def _radius(words, key_at, step, block):  # type: ignore[no-untyped-def]
    word = words.to(tl.int32, bitcast=True)
    coarse = (word >= -4096) & (word < 4096)
    fraction = word.to(tl.float32) * 4.656612873077393e-10  # 2^-31
    radius = tl.sqrt(-tl.log(tl.where(coarse, 1.0, fraction * fraction)))
    if tl.max(coarse.to(tl.int32), axis=0) > 0:
        # One pair in 2^19 needs further bits for its tail: the second keystream, which starts at block 2^63.
        further = chacha20_words(key_at, step, block ^ (-9223372036854775807 - 1))
        cell = tl.where(word < 0, -1 - word, word)
        finer = (cell.to(tl.float32) + (further.to(tl.float32) + 0.5) * 2.3283064365386963e-10) * 4.656612873077393e-10
        radius = tl.where(coarse, tl.sqrt_rn(-2.0 * tl.log(finer)), radius)
    return radius


@triton.jit
def _write(  # type: ignore[no-untyped-def]
    numbers, first, end, segment, borders, tensors, scale, Total: tl.constexpr, Out: tl.constexpr
):
    """Release the elements first, first + 1, ... below `end`, which may lie in several tensors."""
    at = tl.arange(0, numbers.shape[0])
    addresses = borders + tensors + 1
    start = tl.load(borders + segment)
    while start < end:
        after = tl.load(borders + segment + 1)
        # Places from `first` on fit into 32 bits, and what is the same for all of them is computed once.
        low, high = tl.maximum(start - first, 0).to(tl.int32), (tl.minimum(after, end) - first).to(tl.int32)
        total = tl.load(addresses + segment).to(tl.pointer_type(Total)) + (first - start)
        out = tl.load(addresses + tensors + segment).to(tl.pointer_type(Out)) + (first - start)
        deviation = tl.load(addresses + 2 * tensors + segment).to(tl.float64, bitcast=True).to(tl.float32)
        if high - low == numbers.shape[0]:  # nearly everywhere in a large model: nothing to ask for each number
            value = ((tl.load(total + at) + deviation * numbers) * scale).to(tl.float32).to(Out)
            tl.store(out + at, value)
        else:
            inside = (at >= low) & (at < high)
            value = ((tl.load(total + at, mask=inside, other=0.0) + deviation * numbers) * scale).to(tl.float32).to(Out)
            tl.store(out + at, value, mask=inside)
        segment += 1
        start = after


@triton.jit
def _release(  # type: ignore[no-untyped-def]
    table, first_segments, count, tensors, scale,
    Total: tl.constexpr, Out: tl.constexpr, lanes: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    programs_a_run: tl.constexpr = _RUN // (32 * lanes)
    run = (program // programs_a_run).to(tl.int64) * _RUN
    half = (tl.minimum(count - run, _RUN) + 31) // 32 * 16
    offset = (program % programs_a_run) * lanes
    step = tl.load(table)
    block = run // 16 + offset + tl.arange(0, lanes)
    radius = _radius(chacha20_words(table + 1, step, block), table + 1, step, block)
    turned = chacha20_words(table + 1, step, block + half // 16)
    angle = turned.to(tl.int32, bitcast=True).to(tl.float32) * 1.4629180792671596e-09  # pi 2^-31
    first = run + offset * 16
    first_end = tl.minimum(tl.minimum(run + half, first + lanes * 16), count)
    second_end = tl.minimum(first + half + lanes * 16, tl.minimum(run + 2 * half, count))
    one = tl.load(first_segments + 2 * program)
    two = tl.load(first_segments + 2 * program + 1)
    x, y = _turned(angle)
    _write(radius * x, first, first_end, one, table + 9, tensors, scale, Total, Out)
    _write(radius * y, first + half, second_end, two, table + 9, tensors, scale, Total, Out)


class Release(TableRelease[float]):
    """A release with normal numbers of these standard deviations."""

    @classmethod
    def _division(cls, sizes: tuple[int, ...], device: torch.device) -> tuple[int, Tensor]:
        return _first_segments(sizes, device)

    def _settings(self, deviations: Sequence[float]) -> Table:
        return np.array(deviations, np.float64).view(np.int64)

    def _launch(self) -> None:
        _release[(self._programs,)](
            self._table, self._first, self._count, len(self._sizes), self._scale,
            Total=self._types[0], Out=self._types[1], lanes=_lanes(self._count),
        )  # fmt: skip


def release(parts: Sequence[tuple[Tensor, float, Tensor]], *, scale: float, subkey: bytes, step: int) -> None:
    """Release once; tensors that one launch cannot serve go through contiguous copies."""
    if fits(parts):
        Release(parts, scale=scale, subkey=subkey, step=step).launch()
        return
    wide = torch.float64 if any(part[0].dtype == torch.float64 for part in parts) else torch.float32
    copies = []
    for total, deviation, _ in parts:
        copy = total.to(wide).contiguous()
        copies.append((copy, deviation, torch.empty_like(copy)))
    Release(copies, scale=scale, subkey=subkey, step=step).launch()
    for (_, _, out), (_, _, released) in zip(parts, copies, strict=True):
        out.copy_(released)


def _lanes(count: int) -> int:
    """Blocks of the keystream in a program: few where the numbers would not fill the GPU otherwise."""
    return LANES if count >= 1 << 20 else _FEW_LANES


@functools.lru_cache(maxsize=16)
def _first_segments(sizes: tuple[int, ...], device: torch.device) -> tuple[int, Tensor]:
    """How many programs a draw of these sizes needs, and the first tensor that each program's two halves touch."""
    firsts = []
    for run in range(0, sum(sizes), RUN):
        half = half_of(min(RUN, sum(sizes) - run))
        firsts += [place for at in range(run, run + half, 16 * _lanes(sum(sizes))) for place in (at, at + half)]
    return len(firsts) // 2, first_tensors(sizes, firsts, device)
