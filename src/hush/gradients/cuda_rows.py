"""Half precision products of linear layers on a GPU, several rows an example: no gradient of an example is kept.

As in `cuda_products`: products of two half precision numbers are exact in fp32, and an example's factor is applied
after its rows are added up, so nothing is rounded to half precision and the rows of different examples never meet.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hush.gradients.blocks import add_blocks, blocked_additions
from hush.gradients.site import Contribution, Weights


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
        from hush.kernels.grams import longest_chain

        length, i, j = *self.inputs.shape[1:], self.gradients.shape[2]
        # Matrix units cut off where others round: twice the unit of a sum.
        return 2 * (longest_chain(len(self.inputs), length, i, j) if self.by_pairs else 2 * length + sum(shape))

    def additions(self, batch: int) -> float:
        from hush.kernels.products import LONGEST

        return blocked_additions(batch, LONGEST)

    @cached_property
    def _aligned(self) -> tuple[Tensor, Tensor]:
        from hush.kernels.rows import aligned

        return aligned(self.inputs), aligned(self.gradients)

    @cached_property
    def _norms(self) -> tuple[Tensor, Tensor]:
        from hush.kernels import grams, products, rows

        inputs, gradients = self._aligned
        if self.by_pairs:
            return grams.row_norms(inputs, gradients)
        if rows.serves(inputs, gradients):
            norms = rows.squared_norms(inputs, gradients)
        else:
            norms = products.squared_norms(inputs, gradients)
        return norms, norms

    def squared_norms(self) -> Tensor:
        return self._norms[0]

    def squared_mass(self) -> Tensor:
        return self._norms[1]

    def weighted_sum(self, weights: Weights) -> Tensor:
        """[j, i]"""
        from hush.kernels import rows
        from hush.kernels.products import block_of

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
        from hush.kernels.products import weighted_sums

        inputs, gradients = self._aligned
        sums = weighted_sums(inputs, gradients, factors, block)
        return sums[:, : self.gradients.shape[2], : self.inputs.shape[2]]


def fused_rows(inputs: Tensor, gradients: Tensor) -> FusedRows:
    """For [batch, T, i] and [batch, T, j]; norms from pairs of rows where that is several times less work.

    Rounding of inner products is relative to the mass of the rows, up to T times the squared norm, and lowers factors.
    """
    length, i, j = inputs.shape[1], inputs.shape[2], gradients.shape[2]
    return FusedRows(inputs, gradients, by_pairs=4 * length * (i + j) < i * j)
