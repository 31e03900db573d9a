"""What the release kernels read from device memory: one int64 table, so that a captured graph can be replayed.

    step | 8 key words | S + 1 borders of the S tensors in the draw | S addresses of totals | S of outs | settings

The settings are rows of S words, one for each tensor: the kernel's own business.
"""

import abc
import contextlib
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import triton.language as tl
from torch import Tensor

from hush.kernels.noise.chacha20 import state_words

TYPES = {torch.float32: tl.float32, torch.float64: tl.float64, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

Deviation = TypeVar("Deviation")
Table = npt.NDArray[np.int64]


class TableRelease(abc.ABC, Generic[Deviation]):
    """A release into fixed tensors, ready to be launched again and again, eagerly or inside a captured CUDA graph.

    A launch has the numbers of the key and step that lie in device memory; `at` writes others there, and must come
    before each launch for another sum. Tensors are contiguous, on one device, totals of one dtype and so are outs.
    """

    def __init__(
        self, parts: Sequence[tuple[Tensor, Deviation, Tensor]], *, scale: float, subkey: bytes, step: int
    ) -> None:
        if not fits(parts):
            raise ValueError(
                "expected contiguous floating point tensors on one device, one dtype for totals and one for outs"
            )
        totals, deviations, outs = zip(*parts, strict=True)
        self._keep = (totals, outs)  # the table holds their addresses
        self._sizes = tuple(total.numel() for total in totals)
        self._count = sum(self._sizes)
        self._scale = scale
        self._types = TYPES[totals[0].dtype], TYPES[outs[0].dtype]
        self._device: torch.device = totals[0].device
        addresses = [tensor.data_ptr() for tensor in (*totals, *outs)]
        start = np.array([*state_words(subkey, step), *np.cumsum((0, *self._sizes)), *addresses], np.int64)
        self._settings_at = len(start)
        self._host = np.concatenate([start, self._settings(deviations)])
        self._table = to_device(self._host, self._device)
        self._programs, self._first = self._division(self._sizes, self._device)

    @classmethod
    @abc.abstractmethod
    def _division(cls, sizes: tuple[int, ...], device: torch.device) -> tuple[int, Tensor]:
        """How many programs a draw of these sizes needs, and the tensors in which their shares of it begin."""

    @abc.abstractmethod
    def _settings(self, deviations: Sequence[Deviation]) -> Table:
        """The settings of the tensors at these deviations, row after row."""

    @abc.abstractmethod
    def _launch(self) -> None:
        """Launch the kernel."""

    def launch(self) -> None:
        """Write the release of the present step."""
        if self._programs:
            with torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext():
                self._launch()

    def at(self, subkey: bytes, step: int, deviations: Sequence[Deviation]) -> None:
        """Take this key's and step's numbers at these deviations; copies a table to the device, waits for nothing."""
        self._host[:9] = state_words(subkey, step)
        self._host[self._settings_at :] = self._settings(deviations)
        self._table.copy_(to_device(self._host.copy(), self._device), non_blocking=True)

    def onto(self, tensors: Sequence[Tensor]) -> None:
        """From the next `at` on, release these totals in place; they have the sizes and dtypes of the ones before."""
        if not fits([(tensor, 0.0, tensor) for tensor in tensors]) or not all(
            new.shape == old.shape and new.dtype == total.dtype
            for new, old, total in zip(tensors, self._keep[1], self._keep[0], strict=True)
        ):
            raise ValueError("expected tensors with the shapes and dtypes of those that were given first")
        self._keep = (tuple(tensors), tuple(tensors))
        start = 9 + len(tensors) + 1
        self._host[start : start + 2 * len(tensors)] = 2 * [tensor.data_ptr() for tensor in tensors]


def fits(parts: Sequence[tuple[Tensor, Any, Tensor]]) -> bool:
    """Whether one launch can serve these parts."""
    totals, outs = [part[0] for part in parts], [part[2] for part in parts]
    kinds = {t.dtype for t in totals}, {t.dtype for t in outs}, {t.device for t in totals + outs}
    return all(len(kind) == 1 for kind in kinds) and all(t.is_contiguous() and t.dtype in TYPES for t in totals + outs)


def first_tensors(sizes: Sequence[int], places: Sequence[int], device: torch.device) -> Tensor:
    """The tensor, by its number, in which each of these places of the draw lies."""
    table = np.searchsorted(np.cumsum(sizes), np.array(places, np.int64), side="right").clip(max=max(len(sizes) - 1, 0))
    return to_device(table, device)


def to_device(numbers: Table, device: torch.device) -> Tensor:
    """The numbers on a device, without waiting for it."""
    host = torch.from_numpy(np.ascontiguousarray(numbers, np.int64))
    if device.type != "cuda":
        return host
    return host.pin_memory().to(device, non_blocking=True)  # pinned: the copy does not wait for the GPU
