"""Half precision convolutions on a GPU: the gradients of the examples by kernels, kept or formed a second time.

Products of two half precision numbers are exact in fp32. An example's factor is multiplied with its gradient after its
outputs are added up, so nothing is rounded to half precision and examples never meet before they are scaled.
"""

import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hush.gradients.conv_geometry import Geometry
from hush.gradients.site import BLOCK, Contribution, Weights, add_blocks, blocked_additions

if TYPE_CHECKING:
    from hush.kernels.products import Window

_MULTIPLICATIONS_PER_BYTE = 30
"""Of a product, in the time in which one byte goes to or from memory. Measured: benchmarks/NOTES.md."""
_WINDOWS_SLOWER = 2.0
"""How much longer a multiplication takes among inner products of windows."""
_MOST_WINDOWS = 64
"""Outputs of an example whose pairs one program holds."""


@dataclass(frozen=True)
class _OnGpu(Contribution):
    """Norms are there at once, so that a backward pass lets go of what is not needed for the sum."""

    norms: Tensor
    shape: tuple[int, ...]
    """Of the weight: [outputs, channels, *kernel]."""
    positions: int
    """Outputs of one example, over which products are added up."""

    def squared_norms(self) -> Tensor:
        return self.norms

    @property
    def apart(self) -> bool:
        return True

    def chain(self, shape: tuple[int, ...]) -> int:
        # Matrix units cut off where others round: twice the unit of a sum.
        return 2 * (2 * self.positions + sum(shape) + math.prod(self.shape[2:]))

    def _home(self, sums: Tensor) -> Tensor:
        """[outputs, taps * channels] -> the shape of the weight."""
        return sums.view(self.shape[0], -1, self.shape[1]).transpose(1, 2).reshape(self.shape).contiguous()


@dataclass(frozen=True)
class KeptOnGpu(_OnGpu):
    """The gradients of all examples, where they are smaller than what they are made of."""

    values: Tensor
    """[batch, outputs, taps * channels]"""

    def additions(self, batch: int) -> float:
        return blocked_additions(batch, BLOCK)

    def weighted_sum(self, weights: Weights) -> Tensor:
        from hush.kernels.stored import block_of, weighted_rows

        values = self.values.flatten(1)
        block = block_of(len(values), values.shape[1], BLOCK)
        return self._home(add_blocks([weighted_rows(values, weights.factors, block)]))

    def per_example(self) -> Tensor:
        values = self.values.unflatten(2, (-1, self.shape[1])).transpose(2, 3)
        return values.reshape(-1, *self.shape)


@dataclass(frozen=True)
class FormedTwice(_OnGpu):
    """Gradients that are formed for their norms, or not at all, and again for their sum."""

    pixels: Tensor
    gradient: Tensor
    window: "Window"
    masses: Tensor | None = None
    """Where the norms come from inner products of windows: the squared masses."""

    @property
    def terms(self) -> int:
        return 1 if self.masses is None else self.positions

    def squared_mass(self) -> Tensor:
        return self.norms if self.masses is None else self.masses

    def additions(self, batch: int) -> float:
        from hush.kernels.products import LONGEST

        return blocked_additions(batch, LONGEST)

    def weighted_sum(self, weights: Weights) -> Tensor:
        from hush.kernels.convolutions import block_of

        block = block_of(len(self.pixels), self.shape[0], math.prod(self.shape[1:]), self.positions)
        return self._home(add_blocks([self._sums(weights.factors, block)]))

    def per_example(self) -> Tensor:
        sums = self._sums(torch.ones(len(self.pixels), device=self.pixels.device), 1)
        return sums.unflatten(2, (-1, self.shape[1])).transpose(2, 3).reshape(-1, *self.shape)

    def _sums(self, factors: Tensor, block: int) -> Tensor:
        from hush.kernels.convolutions import weighted_sums

        return weighted_sums(self.pixels, self.gradient, factors, self.window, block)


class Way(Enum):
    """How the norms of a layer's gradients are found, and their sum."""

    KEEP = "gradients are formed once and kept"
    TWICE = "gradients are formed for their norms, and again for the sum"
    WINDOWS = "norms from inner products of windows, gradients are formed for the sum"


def cheapest_way(*, batch: int, outputs: int, columns: int, positions: int, pixels: int) -> Way:
    """By shapes alone: multiplications and bytes. Gradients are kept only where they are no larger than their factors.

    `columns` are channels times taps, `positions` the outputs of an example, `pixels` its input numbers.
    """
    product = positions * outputs * columns
    costs = {Way.TWICE: 2.0 * product}
    kept_bytes = 4 * outputs * columns
    if kept_bytes <= 2 * (pixels + positions * outputs):
        costs[Way.KEEP] = product + 2.0 * kept_bytes * _MULTIPLICATIONS_PER_BYTE
    if positions <= _MOST_WINDOWS:
        costs[Way.WINDOWS] = product + _WINDOWS_SLOWER * positions**2 * (columns + outputs)
    return min(costs, key=lambda way: costs[way])


def on_gpu(pixels: Tensor, gradient: Tensor, geometry: Geometry) -> Contribution:
    """For [batch, channels, *sizes] and [batch, outputs, *sizes] along one or two axes, one group."""
    from hush.kernels.convolutions import gradients, squared_norms
    from hush.kernels.products import Window
    from hush.kernels.windows import window_norms

    if geometry.axes == 1:
        pixels, gradient = pixels[:, :, None], gradient[:, :, None]

    def pair(values: tuple[int, ...], filler: int) -> tuple[int, int]:
        return (values[0], values[1]) if geometry.axes == 2 else (filler, values[0])

    window = Window(
        pair(geometry.kernel, 1), pair(geometry.stride, 1), pair(geometry.padding, 0), pair(geometry.dilation, 1)
    )
    shape, positions = geometry.weight_shape, math.prod(gradient.shape[2:])
    way = cheapest_way(
        batch=len(pixels),
        outputs=shape[0],
        columns=math.prod(shape[1:]),
        positions=positions,
        pixels=math.prod(pixels.shape[1:]),
    )
    if way is Way.KEEP:
        kept, norms = gradients(pixels, gradient, window)
        return KeptOnGpu(norms, shape, positions, kept)
    if way is Way.WINDOWS:
        norms, masses = window_norms(pixels, gradient, window)
        return FormedTwice(norms, shape, positions, pixels, gradient, window, masses)
    return FormedTwice(squared_norms(pixels, gradient, window), shape, positions, pixels, gradient, window)
