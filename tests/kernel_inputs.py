"""What tests of the kernels for linear layers have in common: where they run, half precision numbers, the oracle."""

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.float16  # the interpreter multiplies no bfloat16


def halves(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(HALF)


def per_example(inputs: Tensor, gradients: Tensor) -> Tensor:
    """[batch, j, i] in float64: the gradients of a linear layer, one example at a time."""
    return torch.stack([g.double().t() @ x.double() for x, g in zip(inputs, gradients, strict=True)])
