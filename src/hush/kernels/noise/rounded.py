"""The release of a bounded sum on integer grids, on a GPU in one launch: the numbers and the results of the CPU.

    out = (round(total / grid step) + integer noise) * grid step * scale

Rounding the total and the product with the scale are float64. All that changes between steps lies in the table of
`hush.kernels.noise.table`, whose settings are S addresses of staircases, S inverse grid steps and S times grid step *
scale (float64).
"""

import functools
from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from hush.kernels.noise.chacha20 import LANES, chacha20_words
from hush.kernels.noise.integers import LARGEST, MARGIN, REGION, SMALLEST, proposed, settled, staircase_on
from hush.kernels.noise.table import Table, TableRelease, first_tensors, fits
from hush.randomness.rounded_gaussian import OnGrid


@triton.jit
def _release(  # type: ignore[no-untyped-def]
    table, first_segments, count, tensors,
    Total: tl.constexpr, Out: tl.constexpr, MARGIN: tl.constexpr, lanes: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    key_at = table + 1
    step = tl.load(table)
    block = program * lanes + tl.arange(0, lanes)
    chosen = chacha20_words(key_at, step, block)
    level = chacha20_words(key_at, step, block + REGION)
    places = chacha20_words(key_at, step, block + 2 * REGION)
    number = program * (16 * lanes) + tl.arange(0, 16 * lanes)
    end = tl.minimum((program + 1) * (16 * lanes), count)
    borders = table + 9
    totals = borders + tensors + 1
    segment = tl.load(first_segments + program)
    start = tl.load(borders + segment)
    while start < end:
        after = tl.load(borders + segment + 1)
        inside = (number >= start) & (number < tl.minimum(after, end))
        total = tl.load(totals + segment).to(tl.pointer_type(Total))
        out = tl.load(totals + tensors + segment).to(tl.pointer_type(Out))
        stairs = tl.load(totals + 2 * tensors + segment).to(tl.pointer_type(tl.int64))
        inverse = tl.load(totals + 3 * tensors + segment).to(tl.float64, bitcast=True)
        unit = tl.load(totals + 4 * tensors + segment).to(tl.float64, bitcast=True)
        noise, unsettled = proposed(stairs, chosen, level, places, MARGIN)
        last = tl.max(tl.where(unsettled & inside, number, -1), axis=0)
        while last >= 0:
            noise = tl.where(number == last, settled(key_at, step, last, stairs), noise)
            last = tl.max(tl.where(unsettled & inside & (number < last), number, -1), axis=0)
        value = tl.load(total + (number - start), mask=inside, other=0.0).to(tl.float64) * inverse
        value = tl.where(value == value, value, 0.0)
        value = tl.minimum(tl.maximum(value, -2251799813685248.0), 2251799813685248.0)  # 2^51
        # Adding 3 * 2^51 leaves no room for a fraction: the hardware rounds, halves to even.
        value = (value + 6755399441055744.0) - 6755399441055744.0
        value = (value.to(tl.int64) + noise).to(tl.float64) * unit
        tl.store(out + (number - start), value.to(Out), mask=inside)
        segment += 1
        start = after


class Release(TableRelease[OnGrid]):
    """A release with a rounded Gaussian on grids.

    Guarantee: what `hush.randomness.rounded_gaussian` and `hush.noise.float_safe` give on the CPU, number by number
    and bit by bit. Every sigma lies in [128, 2^36].
    """

    _margin = MARGIN
    _lanes = LANES

    @classmethod
    def _division(cls, sizes: tuple[int, ...], device: torch.device) -> tuple[int, Tensor]:
        return _first_segments(sizes, device, cls._lanes)

    def _settings(self, deviations: Sequence[OnGrid]) -> Table:
        if not can_draw(deviations):
            raise ValueError(f"expected deviations of {SMALLEST:g} to {LARGEST:g} grid steps, got {deviations}")
        # Kept, since the table holds their addresses.
        self._stairs = [staircase_on(self._device, grid.sigma) for grid in deviations]
        steps = np.array([grid.step for grid in deviations], np.float64)
        addresses = np.array([stairs.data_ptr() for stairs in self._stairs], np.int64)
        return np.concatenate([addresses, (1 / steps).view(np.int64), (steps * self._scale).view(np.int64)])

    def _launch(self) -> None:
        _release[(self._programs,)](
            self._table, self._first, self._count, len(self._sizes),
            Total=self._types[0], Out=self._types[1], MARGIN=self._margin, lanes=self._lanes,
        )  # fmt: skip


def can_draw(deviations: Sequence[OnGrid]) -> bool:
    """Whether the kernel's arithmetic is wide enough for these deviations."""
    return all(SMALLEST <= grid.sigma <= LARGEST for grid in deviations)


@functools.lru_cache(maxsize=16)
def _first_segments(sizes: tuple[int, ...], device: torch.device, lanes: int) -> tuple[int, Tensor]:
    firsts = range(0, sum(sizes), 16 * lanes)
    return len(firsts), first_tensors(sizes, firsts, device)


def release(parts: Sequence[tuple[Tensor, OnGrid, Tensor]], *, scale: float, subkey: bytes, step: int) -> None:
    """Release once; tensors that one launch cannot serve go through contiguous copies."""
    if fits(parts):
        Release(parts, scale=scale, subkey=subkey, step=step).launch()
        return
    copies = []
    for total, deviation, _ in parts:
        copy = total.to(torch.float64).contiguous()
        copies.append((copy, deviation, torch.empty_like(copy)))
    Release(copies, scale=scale, subkey=subkey, step=step).launch()
    for (_, _, out), (_, _, released) in zip(parts, copies, strict=True):
        out.copy_(released)
