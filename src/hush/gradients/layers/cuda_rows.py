"""Half precision products of linear layers on a GPU, several rows an example: formed twice, or once and kept.

As in `cuda_products`: products of two half precision numbers are exact in fp32, and an example's factor is applied
after its rows are added up, so the rows of different examples never meet. What is kept is rounded to half precision,
as the gradient of such a layer is in PyTorch; it is then the example's gradient, and its norm is that of the rounded
numbers, so the bound is as true as before. What is not kept is never rounded.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from hush.gradients.sums.blocks import BLOCK, add_blocks, blocked_additions, even
from hush.gradients.sums.per_example import Contribution, Weights


@dataclass(frozen=True)
class FusedRows(Contribution):
    """G_i = sum over the rows t of example i of gradient_t input_t^T, never kept."""

    inputs: Tensor
    """[batch, T, i], half precision."""
    gradients: Tensor
    """[batch, T, j], the same dtype."""
    by_pairs: bool = False
    """Whether norms come from the inner products of pairs of rows."""

    @property
    def terms(self) -> int:
        # Matrix units cut off where others round: twice the unit of a sum.
        return 2 * self.inputs.shape[1] if self.by_pairs else 1

    @property
    def pairs(self) -> bool:
        return self.by_pairs

    @property
    def apart(self) -> bool:
        return True

    def chain(self, shape: tuple[int, ...]) -> int:
        from hush.kernels.gradients.grams import longest_chain

        length, i, j = *self.inputs.shape[1:], self.gradients.shape[2]
        # Matrix units cut off where others round: twice the unit of a sum.
        return 2 * (longest_chain(len(self.inputs), length, i, j) if self.by_pairs else 2 * length + sum(shape))

    def additions(self, batch: int) -> float:
        from hush.kernels.gradients.products import LONGEST

        return blocked_additions(batch, LONGEST)

    @cached_property
    def _aligned(self) -> tuple[Tensor, Tensor]:
        from hush.kernels.gradients.rows import aligned

        return aligned(self.inputs), aligned(self.gradients)

    @cached_property
    def _norms(self) -> tuple[Tensor, Tensor]:
        from hush.kernels.gradients import grams, products, row_products, rows

        inputs, gradients = self._aligned
        if self.by_pairs:
            return grams.row_norms(inputs, gradients)
        if rows.serves(inputs, gradients):
            norms = row_products.squared_norms(inputs, gradients)
        else:
            norms = products.squared_norms(inputs, gradients)
        return norms, norms

    def squared_norms(self) -> Tensor:
        return self._norms[0]

    def squared_mass(self) -> Tensor:
        return self._norms[1]

    def weighted_sum(self, weights: Weights) -> Tensor:
        """[j, i]"""
        from hush.kernels.gradients import rows
        from hush.kernels.gradients.products import block_of

        inputs, gradients = self._aligned
        if rows.serves(inputs, gradients):
            sums = rows.weighted_sum(inputs, gradients, weights.factors)
            return sums[: self.gradients.shape[2], : self.inputs.shape[2]]
        block = block_of(len(inputs), gradients.shape[2], inputs.shape[2])
        return add_blocks([self._in_blocks(weights.factors, block)])

    def per_example(self) -> Tensor:
        """[batch, j, i]"""
        return self._in_blocks(torch.ones(len(self.inputs), device=self.inputs.device), 1)

    def _in_blocks(self, factors: Tensor, block: int) -> Tensor:
        from hush.kernels.gradients.products import weighted_sums

        inputs, gradients = self._aligned
        sums = weighted_sums(inputs, gradients, factors, block)
        return sums[:, : self.gradients.shape[2], : self.inputs.shape[2]]


def fused_rows(inputs: Tensor, gradients: Tensor) -> FusedRows:
    """For [batch, T, i] and [batch, T, j]; norms from pairs of rows where that is several times less work.

    Rounding of inner products is relative to the mass of the rows, up to T times the squared norm, and lowers factors.
    """
    length, i, j = inputs.shape[1], inputs.shape[2], gradients.shape[2]
    return FusedRows(inputs, gradients, by_pairs=4 * length * (i + j) < i * j)


_LEAST = 1 << 16
"""Entries of a matrix from which on its products are worth kernels of their own."""
_MEMORY = 1.25
"""Kept products may take so many times the memory of their factors, which are let go."""


@dataclass(frozen=True)
class KeptRows(Contribution):
    """G_i, rounded to half precision, and the norms of the rounded numbers."""

    pieces: tuple[Tensor, ...]
    """[batch, some of j, i] each, together j or more and i or more, zero beyond j and i."""
    norms: Tensor
    sizes: tuple[int, int]
    """j and i."""
    links: int
    """The longest chain of additions behind a norm."""
    transposed: bool = False
    """Whether the tensor is [i, j]; if not, it is [j, i]."""

    def chain(self, shape: tuple[int, ...]) -> int:
        return 2 + self.links

    def additions(self, batch: int) -> float:
        return blocked_additions(batch, BLOCK)

    def squared_norms(self) -> Tensor:
        return self.norms

    def weighted_sum(self, weights: Weights) -> Tensor:
        from hush.kernels.gradients.stored import weighted_rows

        block = even(len(self.norms), BLOCK)
        sums = weighted_rows([piece.flatten(1) for piece in self.pieces], weights.factors, block)
        return self._home(add_blocks([sums]).view(-1, self.pieces[0].shape[2]))

    def per_example(self) -> Tensor:
        return self._home(torch.cat(self.pieces, 1).float())

    def _home(self, values: Tensor) -> Tensor:
        values = values[..., : self.sizes[0], : self.sizes[1]]
        return values.transpose(-2, -1) if self.transposed else values

    def t(self) -> "KeptRows":
        return replace(self, transposed=not self.transposed)


def worth_keeping(length: int, i: int, j: int) -> bool:
    """Whether products [batch, j, i] are better kept than formed a second time: by shapes alone.

    To write and read them takes less time than to form them if an example has a few hundred rows; then they are also
    about as large as their factors.
    """
    return _LEAST <= i * j <= _MEMORY * length * (i + j)


def kept_rows(inputs: Tensor, gradients: Tensor) -> KeptRows:
    """For [batch, T, i] and [batch, T, j] in half precision: everything is computed now, the factors may be let go.

    In pieces no larger than the smaller factor, if there are not too many: the memory of a recorded step is in blocks
    of the sizes that were asked for, and the pieces are to lie where such tensors lay.
    """
    from hush.kernels.gradients import row_products, rows, stored

    sizes = gradients.shape[2], inputs.shape[2]
    inputs, gradients = rows.aligned(inputs), rows.aligned(gradients)
    shape = gradients.shape[2], inputs.shape[2]
    if min(shape) >= rows.NARROWEST and row_products.keeps_busy(inputs, gradients):
        pieces, norms = row_products.kept_products(inputs, gradients, -(-max(shape) // inputs.shape[1]))
        return KeptRows(tuple(pieces), norms, sizes, row_products.longest_chain(*shape))
    whole = torch.bmm(gradients.transpose(1, 2), inputs)  # however the library rounds: the norm is of what it gives
    norms = stored.squared_norms(whole.flatten(1))
    return KeptRows((whole,), norms, sizes, stored.longest_chain(whole[0].numel()))
