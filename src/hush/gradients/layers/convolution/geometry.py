"""The geometry of a convolution: which pixels meet which taps, for any stride, padding, dilation and groups."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Taps:
    """Taps of one axis whose pixels have one residue modulo the stride: output p reads p + first + j * step of them."""

    residue: int
    first: int
    step: int
    count: int

    @property
    def last(self) -> int:
        return self.first + (self.count - 1) * self.step


@dataclass(frozen=True)
class Geometry:
    """An ordinary convolution; a transposed one is the same with the roles of input and output gradient exchanged.

    G[o, c, k] = sum over outputs p of gradient[o, p] * pixels[c, stride * p + dilation * k - padding].
    """

    weight_shape: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1

    @property
    def kernel(self) -> tuple[int, ...]:
        return self.weight_shape[2:]

    @property
    def axes(self) -> int:
        return len(self.kernel)

    @cached_property
    def phases(self) -> tuple[tuple[Taps, ...], ...]:
        """For each axis the taps, sorted by the residue of the pixels that they read modulo the stride.

        Taps of different residues touch different entries of the kernel and different pixels, so a strided convolution
        is a sum over residues of convolutions with stride one.
        """
        return tuple(map(_taps_by_residue, self.kernel, self.stride, self.padding, self.dilation))

    def outputs(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """How many outputs an ordinary convolution of these sizes has along each axis."""
        extents = [dilation * (taps - 1) + 1 for dilation, taps in zip(self.dilation, self.kernel, strict=True)]
        rest = [size + 2 * pad - extent for size, pad, extent in zip(sizes, self.padding, extents, strict=True)]
        return tuple(left // stride + 1 for left, stride in zip(rest, self.stride, strict=True))

    def padded(self, pixels: Tensor, outputs: Sequence[int]) -> Tensor:
        """[.., *sizes] -> the pixels between the first and the last that the outputs read, with their zeros."""
        sizes = pixels.shape[-self.axes :]
        widths: list[int] = []
        for axis in reversed(range(self.axes)):
            needed = self.stride[axis] * (outputs[axis] - 1) + self.dilation[axis] * (self.kernel[axis] - 1) + 1
            widths += [self.padding[axis], needed - self.padding[axis] - sizes[axis]]
        return F.pad(pixels, widths) if any(widths) else pixels


def _taps_by_residue(kernel: int, stride: int, padding: int, dilation: int) -> tuple[Taps, ...]:
    step = dilation // math.gcd(dilation, stride)
    found: dict[int, list[int]] = {}
    for tap in range(kernel):
        shift, residue = divmod(dilation * tap - padding, stride)
        found.setdefault(residue, []).append(shift)
    return tuple(Taps(residue, shifts[0], step, len(shifts)) for residue, shifts in sorted(found.items()))


@dataclass(frozen=True)
class FlatGrid:
    """Pixels of one phase laid out in one line, so that every tap is a shift of that line.

    Rows share the zeros between them: the padding at the right of a row is the padding at the left of the next. The
    leading axis is not padded at all; its shifts are cut to the rows that exist.
    """

    outputs: tuple[int, ...]
    pitches: tuple[int, ...]

    @property
    def strides(self) -> tuple[int, ...]:
        return tuple(math.prod(self.pitches[axis:]) for axis in range(len(self.outputs)))

    @property
    def used(self) -> int:
        """One more than the place of the last output in the line."""
        return 1 + sum((size - 1) * stride for size, stride in zip(self.outputs, self.strides, strict=True))


def flat_grid(geometry: Geometry, sizes: Sequence[int], outputs: Sequence[int]) -> FlatGrid:
    """The smallest grid in which no tap of any phase wraps into pixels of another row."""
    pitches = []
    for axis in range(1, geometry.axes):
        stride, extent = geometry.stride[axis], sizes[axis]
        pitch = outputs[axis]
        for taps in geometry.phases[axis]:
            real = min(len(range(taps.residue, extent, stride)), outputs[axis] + taps.last)
            pitch = max(pitch, real - min(taps.first, 0), outputs[axis] + taps.last)
        pitches.append(pitch)
    return FlatGrid(tuple(outputs), tuple(pitches))


def phase_combinations(geometry: Geometry) -> list[tuple[Taps, ...]]:
    """One choice of residue for each axis."""
    return list(itertools.product(*geometry.phases))
