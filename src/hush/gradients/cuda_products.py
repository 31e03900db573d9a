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
    def _factors(self) -> tuple[Tensor, Tensor]:
        """Pixels and gradient as the kernels want them."""
        from hush.kernels.products import aligned

        return aligned(self.pixels), aligned(self.gradient)

    @cached_property
    def _norms(self) -> Tensor:
        from hush.kernels.products import squared_norms

        return squared_norms(*self._factors, self.window)

    def squared_norms(self) -> Tensor:
        return self._norms

    def weighted_sum(self, weights: Weights) -> Tensor:
        """[outputs, taps, channels]."""
        return add_blocks([self._sums(weights.factors, self._block)])

    def per_example(self) -> Tensor:
        """[batch, outputs, taps, channels]."""
        return self._sums(torch.ones(len(self.pixels), device=self.pixels.device), 1)

    def _sums(self, factors: Tensor, block: int) -> Tensor:
        from hush.kernels.products import weighted_sums

        sums = weighted_sums(*self._factors, factors, self.window, block)
        return sums[:, : self.gradient.shape[3], :, : self.pixels.shape[3]]
