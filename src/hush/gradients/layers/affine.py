"""A linear layer with one row for each example, weight and bias together: large tensors are read as rarely as can be.

On a CPU a pass over activations that have left the cache costs as much as the arithmetic on them. The norms are taken
while the rows are still warm, and one product gives the sums of the weight and of the bias.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hush.gradients.sums.blocks import CHAIN, chained, chained_additions
from hush.gradients.sums.per_example import Contribution, Layout, Weights, wide

_COLUMNS_WORTH_COPYING = 4
"""Weight and bias come from one product if the weight has so many times fewer columns than there are rows."""
_ALIGNED = 16
"""Columns in one register: products of such a width are faster, even with columns of zeros."""


class Affine:
    """The rows of a layer: G_i is gradient_i input_i^T for the weight and gradient_i for the bias."""

    def __init__(self, inputs: Tensor, gradients: Tensor, layout: Layout) -> None:
        self.inputs = inputs
        """[rows, i]"""
        self.gradients = gradients
        """[rows, j]"""
        self.layout = layout
        self.squared_inputs = squared(one_row(inputs, layout))
        """[batch]: squared norms of the inputs, and below of the gradients."""
        self.squared_gradients = squared(one_row(gradients, layout))
        self._last: tuple[Weights, Tensor, Tensor] | None = None

    def sums(self, weights: Weights) -> tuple[Tensor, Tensor]:
        """[j, i] and [j]: the weighted sums of weight and bias. Asked again with the same weights, the same tensors."""
        if self._last is None or self._last[0] is not weights:
            self._last = (weights, *self._sums(weights))
        return self._last[1:]

    def _sums(self, weights: Weights) -> tuple[Tensor, Tensor]:
        inputs = wide(weights.clean_rows(self.inputs, self.layout, 0))
        gradients = wide(weights.clean_rows(self.gradients, self.layout, 0))
        factors = self.layout.per_row(weights.factors).to(gradients.dtype)[:, None]
        # Either side may carry the factors: the narrower one is the shorter pass over memory.
        width = inputs.shape[1]
        if width >= gradients.shape[1]:
            scaled = gradients * factors
            return self._added(scaled, inputs), self._bias(scaled)
        if _COLUMNS_WORTH_COPYING * width > inputs.shape[0]:
            return self._added(gradients, inputs * factors), self._added(factors, gradients)[0]
        scaled = inputs.new_zeros(inputs.shape[0], _ALIGNED * (width // _ALIGNED + 1))
        torch.mul(inputs, factors, out=scaled[:, :width])
        scaled[:, width : width + 1] = factors
        both = self._added(gradients, scaled)
        return both[:, :width].contiguous(), both[:, width].contiguous()

    def _bias(self, scaled: Tensor) -> Tensor:
        if self.layout.batch <= CHAIN:
            return scaled.sum(0)
        return self._added(scaled.new_ones(scaled.shape[0], 1), scaled)[0]

    def _added(self, left: Tensor, right: Tensor) -> Tensor:
        return chained(left, right)


@dataclass(frozen=True)
class Bias(Contribution):
    """The bias of a layer whose weight is summed together with it."""

    layer: Affine

    def additions(self, batch: int) -> float:
        return chained_additions(batch)

    def squared_norms(self) -> Tensor:
        return self.layer.squared_gradients

    def weighted_sum(self, weights: Weights) -> Tensor:
        return self.layer.sums(weights)[1]

    def per_example(self) -> Tensor:
        return wide(one_row(self.layer.gradients, self.layer.layout))


def one_row(tensor: Tensor, layout: Layout) -> Tensor:
    """[rows, ..] -> [batch, ..], where each example has one row."""
    if layout.order is None and layout.outer == 1 == layout.inner:
        return tensor
    return layout.split(tensor, 0)[:, 0]


def squared(rows: Tensor) -> Tensor:
    """[batch, ..] -> [batch]: squared norms, summed in fp32 or wider."""
    kind = rows.dtype if rows.dtype == torch.float64 else torch.float32
    return torch.linalg.vector_norm(rows, dim=-1, dtype=kind).square()
