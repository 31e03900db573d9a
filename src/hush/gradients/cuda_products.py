"""Half precision products on a GPU: norms and weighted sums by kernels that keep no gradient of any example.

Products of two half precision numbers are exact in fp32. The weighted sum multiplies with an example's factor after its
rows are added up, so nothing is rounded to half precision and the rows of different examples never meet.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hush import kernels
from hush.gradients.site import Contribution, Weights, add_blocks, blocked_additions

if TYPE_CHECKING:
    from hush.kernels.products import Window

_HALF = (torch.bfloat16, torch.float16)


def on_matrix_units(*tensors: Tensor) -> bool:
    """Whether the kernels serve these tensors: half precision, all of one dtype, on a GPU with Triton."""
    first = tensors[0]
    fits = first.is_cuda and first.dtype in _HALF and all(tensor.dtype == first.dtype for tensor in tensors)
    return fits and kernels.available()


@dataclass(frozen=True)
class FusedProducts(Contribution):
    """G_i[j, tap, c] = sum over positions of gradient[i, p, j] pixels[i, p moved by tap, c], never kept."""

    pixels: Tensor
    """[batch, height, width, channels], half precision."""
    gradient: Tensor
    """[batch, rows, columns, outputs], the same dtype."""
    window: "Window"
    by_rows: bool = False
    """Whether norms come from inner products of rows (one row of positions, one tap)."""

    @property
    def terms(self) -> int:
        return self.gradient.shape[1] * self.gradient.shape[2] if self.by_rows else 1

    @property
    def apart(self) -> bool:
        return True

    def chain(self, shape: tuple[int, ...]) -> int:
        # Matrix units cut off where others round: twice the unit of a sum.
        return 2 * (2 * self.gradient.shape[1] * self.gradient.shape[2] + sum(shape))

    def additions(self, batch: int) -> float:
        from hush.kernels.products import LONGEST

        return blocked_additions(batch, LONGEST)

    @property
    def _block(self) -> int:
        from hush.kernels.products import block_of

        taps = self.window.kernel[0] * self.window.kernel[1]
        return block_of(len(self.pixels), self.gradient.shape[3], self.pixels.shape[3], taps)

    @cached_property
    def _norms(self) -> tuple[Tensor, Tensor]:
        from hush.kernels.grams import row_norms
        from hush.kernels.products import squared_norms

        if self.by_rows:
            return row_norms(self.pixels[:, 0], self.gradient[:, 0])
        norms = squared_norms(self.pixels, self.gradient, self.window)
        return norms, norms

    def squared_norms(self) -> Tensor:
        return self._norms[0]

    def squared_mass(self) -> Tensor:
        return self._norms[1]

    def weighted_sum(self, weights: Weights) -> Tensor:
        """[outputs, taps, channels]."""
        from hush.kernels.products import weighted_sums

        return add_blocks([weighted_sums(self.pixels, self.gradient, weights.factors, self.window, self._block)])

    def per_example(self) -> Tensor:
        """[batch, outputs, taps, channels]."""
        from hush.kernels.products import weighted_sums

        ones = torch.ones(len(self.pixels), device=self.pixels.device)
        return weighted_sums(self.pixels, self.gradient, ones, self.window, 1)


def fused_rows(inputs: Tensor, gradients: Tensor) -> FusedProducts:
    """For [batch, T, i] and [batch, T, j]; the cheaper way to the norms by a count of multiplications."""
    from hush.kernels.products import Window

    length, i, j = inputs.shape[1], inputs.shape[2], gradients.shape[2]
    return FusedProducts(inputs[:, None], gradients[:, None], Window(), by_rows=0.6 * length * (i + j) < i * j)
