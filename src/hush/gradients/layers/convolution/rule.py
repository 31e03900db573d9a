"""Convolutions: Conv1d/2d/3d and their transposes, any stride, padding, dilation and groups.

Padding modes other than zeros are a separate node before the convolution. For each layer one of two exact ways is
chosen by shapes alone: the gradients of the examples are formed (`conv_kernels`), and kept where they are no larger
than the layer's own tensors; or their norms are computed without them (`conv_ghost`), and the sum is one ordinary
kernel gradient in which the examples are scaled.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hush.gradients.layers.convolution.geometry import Geometry, flat_grid, phase_combinations
from hush.gradients.layers.convolution.ghost import ghost_norms, line_length
from hush.gradients.layers.convolution.kernels import (
    kernel_gradient,
    kernel_gradients,
    kernel_norms,
    squared_norms,
)
from hush.gradients.layers.convolution.on_cuda import on_gpu
from hush.gradients.layers.cuda_products import on_matrix_units
from hush.gradients.sums.blocks import added, blocked_sum, chained_additions, even, long_block
from hush.gradients.sums.per_example import TINY, Contribution, Layout, Rule, Site, Stored, Weights, wide

# What one element costs in a pass over memory, in multiplications of a matrix product. Measured: benchmarks/NOTES.md.
_PASS_COST = {"cpu": 13, "other": 60}


@dataclass(frozen=True)
class Convolution:
    """The arguments of the convolution as autograd saved them, and where the examples lie in its rows."""

    pixels: Tensor
    gradient: Tensor
    geometry: Geometry
    layout: Layout

    @property
    def outputs(self) -> int:
        """Places of the gradient that belong to one example, over which products are added up."""
        return self.layout.rows * math.prod(self.gradient.shape[2:])

    def split(self) -> tuple[Tensor, Tensor]:
        """[batch, T, channels, *sizes] of the pixels, and the same of the gradient."""
        return self.layout.split(self.pixels, 0), self.layout.split(self.gradient, 0)

    def with_rows_as_axis(self) -> tuple[Tensor, Tensor, Geometry]:
        """[batch, channels, *sizes] of both; several rows of an example become one more axis, with a kernel of one."""
        pixels, gradient = self.split()
        if pixels.shape[1] == 1:
            return pixels[:, 0], gradient[:, 0], self.geometry
        shape = self.geometry.weight_shape
        geometry = Geometry(
            (*shape[:2], 1, *shape[2:]),
            (1, *self.geometry.stride),
            (0, *self.geometry.padding),
            (1, *self.geometry.dilation),
            self.geometry.groups,
        )
        return pixels.transpose(1, 2), gradient.transpose(1, 2), geometry


@dataclass(frozen=True)
class KeptKernels(Contribution):
    """Kernel gradients of all examples, kept as the product left them: [batch, groups, channels * taps, outputs]."""

    values: Tensor
    shape: tuple[int, ...]

    def squared_norms(self) -> Tensor:
        return squared_norms(self.values if self.values.is_contiguous() else self.values.transpose(2, 3))

    def weighted_sum(self, weights: Weights) -> Tensor:
        values = weights.clean(self.values)
        factors = weights.factors.to(values.dtype)
        if not values.is_contiguous():
            return blocked_sum(factors, values.transpose(2, 3).reshape(len(factors), -1)).view(self.shape)
        return blocked_sum(factors, values.flatten(1)).view(values.shape[1:]).transpose(1, 2).reshape(self.shape)

    def additions(self, batch: int) -> float:
        return chained_additions(batch)

    def per_example(self) -> Tensor:
        return self.values.transpose(2, 3).reshape(-1, *self.shape)


@dataclass(frozen=True)
class NormedKernels(Contribution):
    """Norms now, and the sum later by one ordinary kernel gradient."""

    convolution: Convolution
    norms: Tensor
    masses: Tensor
    ghost: bool
    """Whether norms come from inner products of windows."""

    @property
    def terms(self) -> int:
        return self.convolution.outputs

    @property
    def convolves(self) -> bool:
        return True

    @property
    def pairs(self) -> bool:
        return self.ghost

    @property
    def apart(self) -> bool:
        return long_block(self.terms) == 1

    def squared_norms(self) -> Tensor:
        return self.norms

    def squared_mass(self) -> Tensor:
        return self.masses

    def weighted_sum(self, weights: Weights) -> Tensor:
        return scaled_kernel_gradient(self.convolution, weights)

    def per_example(self) -> Tensor:
        values = kernel_gradients(*self.convolution.split(), self.convolution.geometry)
        return KeptKernels(values, self.convolution.geometry.weight_shape).per_example()


def scaled_kernel_gradient(convolution: Convolution, weights: Weights) -> Tensor:
    """sum_i factor_i G_i by one ordinary kernel gradient; the smaller of the two tensors carries the factors."""
    geometry, layout = convolution.geometry, convolution.layout
    pixels = weights.clean_rows(wide(convolution.pixels), layout, 0)
    gradient = weights.clean_rows(wide(convolution.gradient), layout, 0)
    factors = layout.per_row(weights.factors.to(pixels.dtype)).view(-1, *[1] * (pixels.dim() - 1))
    if pixels.numel() < gradient.numel():
        pixels = pixels * factors
    else:
        gradient = gradient * factors
    # One example after another, in blocks: a chain of additions over the whole batch would round too much.
    block = even(layout.batch, long_block(convolution.outputs))
    split = [layout.split(tensor, 0).split(block) for tensor in (pixels, gradient)]
    blocks = [(x.flatten(0, 1), g.flatten(0, 1)) for x, g in zip(*split, strict=True)]
    return added((kernel_gradient(x, g, geometry) for x, g in blocks), len(blocks))


def kernel_contribution(convolution: Convolution) -> Contribution:
    """The cheaper way for these shapes, the sum over examples included."""
    pixels, gradient, geometry = convolution.pixels, convolution.gradient, convolution.geometry
    layout = convolution.layout
    whole = layout.outer * layout.inner == 1 and layout.order is None
    if whole and geometry.axes <= 2 and geometry.groups == 1 and on_matrix_units(pixels, gradient):
        return on_gpu(pixels, gradient, geometry)
    size = math.prod(geometry.weight_shape)
    keep = convolution.layout.batch * size <= pixels.numel() + gradient.numel()
    if ghost_is_cheaper(convolution, keep):
        norms, masses = ghost_norms(*convolution.with_rows_as_axis())
        return NormedKernels(convolution, norms, masses, ghost=True)
    if keep:
        return KeptKernels(kernel_gradients(*convolution.split(), geometry), geometry.weight_shape)
    norms = kernel_norms(*convolution.split(), geometry)
    return NormedKernels(convolution, norms, squared_mass(convolution), ghost=False)


def squared_mass(convolution: Convolution) -> Tensor:
    """[batch]: (sum over outputs of |window| |gradient|)^2 for each group of channels, added up over the groups.

    An output meets only the pixels that its window reads, of its own group: their squares are summed over the window as
    the layer itself would, stride, padding and dilation included.
    """
    pixels, gradient = (wide(side) for side in convolution.split())
    geometry, outputs = convolution.geometry, tuple(gradient.shape[3:])
    squares = [
        side.flatten(0, 1).square().unflatten(1, (geometry.groups, -1)).sum(2) + TINY for side in (pixels, gradient)
    ]
    ones = squares[0].new_ones(geometry.groups, 1, *geometry.kernel)
    sums = torch.convolution(
        geometry.padded(squares[0], outputs), ones, None, list(geometry.stride), [0] * geometry.axes,
        list(geometry.dilation), False, [0] * geometry.axes, geometry.groups,
    )  # fmt: skip
    each = (sums.clamp(min=0).sqrt() * squares[1].sqrt()).unflatten(0, pixels.shape[:2])
    return each.transpose(1, 2).flatten(2).sum(2).square().sum(1) * (1 + 1e-4)


def ghost_is_cheaper(convolution: Convolution, keep: bool) -> bool:
    """Compares multiplications and passes over memory for one example, weighed for the device; no value is read."""
    pixels, gradient, geometry = convolution.with_rows_as_axis()
    grid = flat_grid(geometry, pixels.shape[2:], gradient.shape[2:])
    pass_cost = _PASS_COST.get(pixels.device.type, _PASS_COST["other"])
    taps = math.prod(geometry.kernel)
    outputs = math.prod(gradient.shape[2:])
    side = line_length(geometry, grid, pixels.shape[2])
    additions = 2 + sum(tap.count for tap in geometry.phases[0]) + 2 * (geometry.axes - 1)
    phases = len(phase_combinations(geometry))
    ghost = phases * side**2 * (pixels.shape[1] + pass_cost * geometry.groups * additions)
    ghost += grid.used**2 * gradient.shape[1]
    windows = outputs * (math.prod(geometry.weight_shape) + pass_cost * pixels.shape[1] * taps)
    saved = outputs * math.prod(geometry.weight_shape) if keep else 0
    return ghost < windows - saved


def contributions(site: Site) -> dict[int, Contribution] | None:
    """Kernel (1) and bias (2); None where the input derives from a parameter and the kernel is data."""
    if site.layout.dim != 0 or 0 in site.wanted:
        return None
    found: dict[int, Contribution] = {}
    if 1 in site.wanted:
        found[1] = kernel_contribution(_convolution(site))
    if 2 in site.wanted:
        bias = site.layout.split(site.grad).transpose(1, 2).flatten(2)
        found[2] = Stored(bias.sum(-1, dtype=wide(bias[:0]).dtype))
    return found


def _convolution(site: Site) -> Convolution:
    saved, shape = site.saved, site.shapes[1]
    assert shape is not None
    axes = len(shape) - 2
    # A list of one number stands for all axes.
    stride, padding, dilation = (
        tuple(saved[name]) * (axes if len(saved[name]) == 1 else 1) for name in ("stride", "padding", "dilation")
    )
    geometry = Geometry(tuple(shape), stride, padding, dilation, saved["groups"])
    if saved["transposed"]:
        return Convolution(site.grad, saved["input"], geometry, site.layout)
    return Convolution(saved["input"], site.grad, geometry, site.layout)


RULES = {
    "ConvolutionBackward0": Rule(
        contributions, saved=("input", "stride", "padding", "dilation", "transposed", "groups")
    ),
}
