"""The gradients of a matrix as products: a term for each row of an example, from its input and output gradient."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from hush.clipping.rounding import product_unit, unit
from hush.gradients.layers.affine import Affine, one_row, squared
from hush.gradients.layers.cuda_products import on_matrix_units
from hush.gradients.layers.cuda_rows import FusedRows, fused_rows, kept_rows, worth_keeping
from hush.gradients.sums.blocks import added, blocked_sum, chained, chained_additions, even, long_block, product
from hush.gradients.sums.per_example import TINY, Contribution, Layout, Stored, Weights, wide

_KEEP_BYTES = 1 << 28
"""Per-example products of one layer are kept up to this size; larger ones are only taken for their norms."""

_LOST_TO_PAIRS = 0.02
"""Norms from pairs of rows are taken where their rounding shortens a clipped gradient by less than half of this."""
_PIECE = 256
"""Columns whose products are added up in one chain to an inner product of rows."""


@dataclass(frozen=True)
class Products(Contribution):
    """G_i = sum over the rows t of example i of gradient_t input_t^T, or its transpose."""

    inputs: Tensor
    """[rows, i]"""
    gradients: Tensor
    """[rows, j]"""
    layout: Layout
    """Where the examples lie among the rows (dim 0)."""
    transposed: bool
    """Whether the tensor is [i, j]; if not, it is [j, i]."""
    layer: Affine | None = None
    """Where a bias with the same rows is summed together with this."""

    @property
    def terms(self) -> int:
        if self._fused is not None:
            return self._fused.terms
        return 1 if self._keeps else self._length

    @property
    def pairs(self) -> bool:
        return self._by_rows if self._fused is None else self._fused.pairs

    @property
    def rounded(self) -> float:
        return torch.finfo(self.gradients.dtype).eps / 2 if self._length == 1 and self._brain else 0.0

    @property
    def apart(self) -> bool:
        return self._fused is not None or self.terms == 1 or self._one_by_one

    def chain(self, shape: tuple[int, ...]) -> int:
        if self._fused is not None:
            return self._fused.chain(shape)
        return self._chain_of_pairs if self._by_rows else super().chain(shape)

    def additions(self, batch: int) -> float:
        if self._fused is not None:
            return self._fused.additions(batch)
        if self._length == 1:
            return chained_additions(batch)
        return super().additions(batch) if self._kept is None else self._kept.additions(batch)

    @property
    def _half(self) -> bool:
        return on_matrix_units(self.inputs, self.gradients)

    @property
    def _brain(self) -> bool:
        """Whether gradients may be rounded to their own dtype: those of float16 get too small, or large."""
        return self._half and self.gradients.dtype == torch.bfloat16

    @cached_property
    def _fused(self) -> FusedRows | None:
        """The kernels of a GPU, for matrices so large that their products are not kept."""
        if self._length == 1 or not self._half or self._small:
            return None
        return fused_rows(self.layout.split(self.inputs, 0), self.layout.split(self.gradients, 0))

    @property
    def _small(self) -> bool:
        """Whether the products of all examples are smaller than what they are products of."""
        i, j = self.inputs.shape[1], self.gradients.shape[1]
        return i * j <= self._length * (i + j) and 4 * self.layout.batch * i * j <= _KEEP_BYTES

    @property
    def alone_on_cpu(self) -> bool:
        """Whether each example has one row, and all of them lie on a CPU."""
        return self._length == 1 and self.gradients.device.type == "cpu"

    @property
    def _length(self) -> int:
        return self.layout.rows

    @cached_property
    def split(self) -> tuple[Tensor, Tensor]:
        """[batch, T, i] and [batch, T, j], in fp32 or wider."""
        return wide(self.layout.split(self.inputs, 0)), wide(self.layout.split(self.gradients, 0))

    @cached_property
    def _kept(self) -> Stored | None:
        """[batch, j, i]: the products themselves, where that is cheaper than the inner products of rows."""
        if not self._keeps:
            return None
        inputs, gradients = self.layout.split(self.inputs, 0), self.layout.split(self.gradients, 0)
        return Stored(product(gradients.transpose(1, 2), inputs))

    @property
    def _keeps(self) -> bool:
        i, j = self.inputs.shape[1], self.gradients.shape[1]
        if self._length == 1 or self._by_rows or self._fused is not None:
            return False
        return 4 * self.layout.batch * i * j <= _KEEP_BYTES and i * j <= 2 * self._length * (i + j)

    @cached_property
    def _by_rows(self) -> bool:
        """Whether the inner products of all pairs of rows cost less than the product itself, and round hardly more."""
        i, j = self.inputs.shape[1], self.gradients.shape[1]
        if self._length == 1 or self._length * (i + j) >= i * j or self._fused is not None:
            return False
        if wide(self.gradients[:0]).dtype == torch.float64:
            return True
        steady = product_unit(self.gradients.device, convolution=False) == 0
        return steady and self._length * self._chain_of_pairs * unit(torch.float32) <= _LOST_TO_PAIRS

    @property
    def _chain_of_pairs(self) -> int:
        widths = self.inputs.shape[1], self.gradients.shape[1]
        return 2 * self._length + sum(min(width, _PIECE + -(-width // _PIECE)) for width in widths)

    @property
    def _one_by_one(self) -> bool:
        """Whether examples are so long that each is added up by itself."""
        return long_block(self._length) == 1

    @cached_property
    def _grams(self) -> tuple[Tensor, Tensor]:
        inputs, gradients = self.split
        return _gram(inputs), _gram(gradients)

    def squared_norms(self) -> Tensor:
        if self.layer is not None:
            return (self.layer.squared_inputs + TINY) * (self.layer.squared_gradients + TINY)
        if self._length == 1:
            of_inputs, of_gradients = (squared(one_row(rows, self.layout)) for rows in (self.inputs, self.gradients))
            return (of_inputs + TINY) * (of_gradients + TINY)
        if self._fused is not None:
            return self._fused.squared_norms()
        if self._kept is not None:
            return self._kept.squared_norms()
        if self._by_rows:
            of_inputs, of_gradients = self._grams
            return (of_inputs * of_gradients).sum(-1).sum(-1).clamp(min=0)
        return torch.cat([Stored(some).squared_norms() for some in self._products(*self.split)])

    def _products(self, inputs: Tensor, gradients: Tensor) -> Iterator[Tensor]:
        """[some, j, i] of [batch, T, i] and [batch, T, j]: the products, as many at a time as there is memory for."""
        some = max(1, _KEEP_BYTES // (4 * inputs.shape[2] * gradients.shape[2]))
        for x, g in zip(inputs.split(some), gradients.split(some), strict=True):
            yield torch.bmm(g.transpose(1, 2), x)

    def squared_mass(self) -> Tensor:
        if self._length == 1 or self._kept is not None:
            return self.squared_norms()
        if self._fused is not None:
            return self._fused.squared_mass()
        if self._by_rows:
            of_inputs, of_gradients = (gram.diagonal(dim1=1, dim2=2) + TINY for gram in self._grams)
        else:
            of_inputs, of_gradients = (squared(rows) + TINY for rows in self.split)
        return (of_inputs * of_gradients).sqrt().sum(-1).square()

    def weighted_sum(self, weights: Weights) -> Tensor:
        if self.layer is not None:
            total = self.layer.sums(weights)[0]
        elif self._fused is not None:
            total = self._fused.weighted_sum(weights)
        elif self._length > 1 and self._kept is not None:
            total = self._kept.weighted_sum(weights)
        elif self._brain:
            inputs = weights.clean_rows(self.inputs, self.layout, 0)
            gradients = weights.clean_rows(self.gradients, self.layout, 0)
            scaled = wide(gradients) * self.layout.per_row(weights.factors)[:, None]
            total = chained(scaled.to(gradients.dtype), inputs)
        else:
            inputs = wide(weights.clean_rows(self.inputs, self.layout, 0))
            gradients = wide(weights.clean_rows(self.gradients, self.layout, 0))
            factors = self.layout.per_row(weights.factors).to(gradients.dtype)[:, None]
            # Either side may carry the factors: the narrower one is the shorter pass over memory.
            if inputs.shape[1] < gradients.shape[1]:
                inputs = inputs * factors
            else:
                gradients = gradients * factors
            total = self._summed(inputs, gradients)
        return total.t() if self.transposed else total

    def _summed(self, inputs: Tensor, gradients: Tensor) -> Tensor:
        """The product over all rows, one example after another, in blocks where one chain would round too much."""
        if self._length == 1:
            return chained(gradients, inputs)
        inputs, gradients = self.layout.split(inputs, 0), self.layout.split(gradients, 0)
        if self._one_by_one:
            ones = gradients.new_ones(self.layout.batch)
            parts = [blocked_sum(ones[: len(some)], some.flatten(1)) for some in self._products(inputs, gradients)]
            return added(parts, len(parts)).view(gradients.shape[2], -1)
        block = even(self.layout.batch, long_block(self._length))
        pairs = list(zip(inputs.split(block), gradients.split(block), strict=True))
        return added((g.flatten(0, 1).t() @ x.flatten(0, 1) for x, g in pairs), len(pairs))

    def per_example(self) -> Tensor:
        if self._kept is None:
            inputs, gradients = self.split
            kept = torch.bmm(gradients.transpose(1, 2), inputs)
        else:
            kept = self._kept.values
        return kept.transpose(1, 2) if self.transposed else kept

    def formed(self) -> Contribution:
        i, j = self.inputs.shape[1], self.gradients.shape[1]
        if self._length == 1 or not self._brain or not worth_keeping(self._length, i, j):
            return self
        kept = kept_rows(self.layout.split(self.inputs, 0), self.layout.split(self.gradients, 0))
        return kept.t() if self.transposed else kept

    def t(self) -> "Products":
        return replace(self, transposed=not self.transposed)


def _gram(rows: Tensor) -> Tensor:
    """[batch, T, T]: inner products of [batch, T, width], the columns in pieces to keep chains of additions short."""
    if rows.dtype == torch.float64 or rows.shape[2] <= _PIECE:
        return torch.bmm(rows, rows.transpose(1, 2))
    pieces = iter(rows.split(_PIECE, 2))
    first = next(pieces)
    total = torch.bmm(first, first.transpose(1, 2))
    for piece in pieces:
        total += torch.bmm(piece, piece.transpose(1, 2))
    return total


def join(parts: list[Products]) -> Products:
    """One contribution for several calls of the same matrix: the rows one after another, so that cross terms count."""
    first = parts[0]
    if len(parts) == 1:
        return first
    split = [part.split if part.transposed == first.transposed else part.split[::-1] for part in parts]
    inputs = torch.cat([inputs for inputs, _ in split], 1)
    gradients = torch.cat([gradients for _, gradients in split], 1)
    layout = Layout(0, 1, first.layout.batch, inputs.shape[1])
    return Products(inputs.flatten(0, 1), gradients.flatten(0, 1), layout, first.transposed)
