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

from hush.gradients.layers.convolution.geometry import Geometry
from hush.gradients.sums.blocks import BLOCK, add_blocks, blocked_additions
from hush.gradients.sums.per_example import Contribution, Weights

if TYPE_CHECKING:
    from hush.kernels.gradients.convolutions import Window

# Rates of one H200 with half precision factors (benchmarks/choices.py measures them): multiplications in a microsecond
# while gradients are formed, while they are summed, and among inner products of windows; bytes in a microsecond.
_FORMED, _SUMMED, _WINDOWED = 1.8e8, 1.5e8, 2.0e8
_MOVED = 3.5e6
_NARROW = 4.5
"""Times as long for channels that do not lie in groups of eight, which are read two bytes at a time."""
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

    pieces: tuple[Tensor, ...]
    """[some, outputs, taps * channels] each, one example after another."""

    def additions(self, batch: int) -> float:
        return blocked_additions(batch, BLOCK)

    def weighted_sum(self, weights: Weights) -> Tensor:
        from hush.kernels.gradients.stored import block_of, weighted_rows

        blocks = []
        for piece, factors in zip(
            self.pieces, weights.factors.split([len(piece) for piece in self.pieces]), strict=True
        ):
            values = piece.flatten(1)
            blocks.append(weighted_rows([values], factors, block_of(len(values), values.shape[1], BLOCK)))
        return self._home(add_blocks(blocks))

    def per_example(self) -> Tensor:
        values = torch.cat(self.pieces).unflatten(2, (-1, self.shape[1])).transpose(2, 3)
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
        # Matrix units cut off where others round: twice the unit of a sum.
        return 1 if self.masses is None else 2 * self.positions

    @property
    def pairs(self) -> bool:
        return self.masses is not None

    def squared_mass(self) -> Tensor:
        return self.norms if self.masses is None else self.masses

    def additions(self, batch: int) -> float:
        from hush.kernels.gradients.products import LONGEST

        return blocked_additions(batch, LONGEST)

    def weighted_sum(self, weights: Weights) -> Tensor:
        from hush.kernels.gradients.convolutions import block_of

        block = block_of(len(self.pixels), self.shape[0], math.prod(self.shape[1:]), self.positions)
        return self._home(add_blocks([self._sums(weights.factors, block)]))

    def per_example(self) -> Tensor:
        sums = self._sums(torch.ones(len(self.pixels), device=self.pixels.device), 1)
        return sums.unflatten(2, (-1, self.shape[1])).transpose(2, 3).reshape(-1, *self.shape)

    def _sums(self, factors: Tensor, block: int) -> Tensor:
        from hush.kernels.gradients.convolutions import weighted_sums

        return weighted_sums(self.pixels, self.gradient, factors, self.window, block)


class Way(Enum):
    """How the norms of a layer's gradients are found, and their sum."""

    KEEP = "gradients are formed once and kept"
    TWICE = "gradients are formed for their norms, and again for the sum"
    WINDOWS = "norms from inner products of windows, gradients are formed for the sum"


_APART = {Way.KEEP: 16.0, Way.TWICE: 25.0, Way.WINDOWS: 27.0}
"""Microseconds that a way takes however small the layer: starts of kernels, pieces added up, the sum's own layout."""


@dataclass(frozen=True)
class Sizes:
    """What the choice depends on: shapes alone."""

    batch: int
    outputs: int
    channels: int
    taps: int
    positions: int
    """Outputs of one example in one channel."""
    pixels: int
    """Numbers in one example's input."""

    @property
    def columns(self) -> int:
        """Of an example's gradient, which has a row for each output."""
        return self.channels * self.taps


def microseconds(sizes: Sizes) -> dict[Way, float]:
    """What norms and sum cost on each way that is open; kept gradients must be no larger than their factors."""
    product = sizes.batch * sizes.positions * sizes.outputs * sizes.columns * (_NARROW if sizes.channels % 8 else 1)
    costs = {Way.TWICE: _APART[Way.TWICE] + product / _FORMED + product / _SUMMED}
    kept = 4 * sizes.batch * sizes.outputs * sizes.columns
    if kept <= 2 * sizes.batch * (sizes.pixels + sizes.positions * sizes.outputs):
        costs[Way.KEEP] = _APART[Way.KEEP] + product / _FORMED + 2 * kept / _MOVED
    if sizes.positions <= _MOST_WINDOWS:
        pairs = sizes.batch * sizes.positions**2 * (sizes.columns + sizes.outputs)
        costs[Way.WINDOWS] = _APART[Way.WINDOWS] + pairs / _WINDOWED + product / _SUMMED
    return costs


def cheapest_way(sizes: Sizes) -> Way:
    costs = microseconds(sizes)
    return min(costs, key=lambda way: costs[way])


def on_gpu(pixels: Tensor, gradient: Tensor, geometry: Geometry) -> Contribution:
    """For [batch, channels, *sizes] and [batch, outputs, *sizes] along one or two axes, one group."""
    from hush.kernels.gradients.convolutions import Window

    if geometry.axes == 1:
        pixels, gradient = pixels[:, :, None], gradient[:, :, None]

    def pair(values: tuple[int, ...], filler: int) -> tuple[int, int]:
        return (values[0], values[1]) if geometry.axes == 2 else (filler, values[0])

    window = Window(
        pair(geometry.kernel, 1), pair(geometry.stride, 1), pair(geometry.padding, 0), pair(geometry.dilation, 1)
    )
    shape = geometry.weight_shape
    sizes = Sizes(
        batch=len(pixels),
        outputs=shape[0],
        channels=shape[1],
        taps=math.prod(shape[2:]),
        positions=math.prod(gradient.shape[2:]),
        pixels=math.prod(pixels.shape[1:]),
    )
    return by_way(cheapest_way(sizes), pixels, gradient, window, shape)


def by_way(way: Way, pixels: Tensor, gradient: Tensor, window: "Window", shape: tuple[int, ...]) -> Contribution:
    """The contribution to a weight of this shape, taken in this way."""
    from hush.kernels.gradients.convolutions import gradients, squared_norms
    from hush.kernels.gradients.windows import window_norms

    positions = math.prod(gradient.shape[2:])
    if way is Way.KEEP:
        kept, norms = gradients(pixels, gradient, window)
        return KeptOnGpu(norms, shape, positions, kept)
    if way is Way.WINDOWS:
        norms, masses = window_norms(pixels, gradient, window)
        return FormedTwice(norms, shape, positions, pixels, gradient, window, masses)
    return FormedTwice(squared_norms(pixels, gradient, window), shape, positions, pixels, gradient, window)
