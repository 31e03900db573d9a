"""Clipped sums the slow way: one backward pass for each example, in float64, by plain autograd. Nothing of hush."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

Losses = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Reference:
    """The gradient of each example alone, through a float64 copy of the model."""

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, losses: Losses) -> None:
        exact = copy.deepcopy(model).double()
        params = [param for param in exact.parameters() if param.requires_grad]
        x = x.double() if x.is_floating_point() else x
        self.gradients: list[list[Tensor]] = []
        for at in range(len(x)):
            loss = losses(exact, x[at : at + 1], y[at : at + 1])
            found = torch.autograd.grad(loss[0], params, allow_unused=True)
            self.gradients.append([torch.zeros_like(p) if g is None else g for p, g in zip(params, found, strict=True)])
        self.norms = torch.stack([norm_of(gradient) for gradient in self.gradients])

    def clipped_sum(self, weights: Tensor, bound: float) -> list[Tensor]:
        """sum_i w_i g_i min(1, bound / |w_i g_i|), Algorithm 1 of Abadi et al. 2016 for the losses w_i * loss_i."""
        factors = weights.double() * (bound / (weights.double() * self.norms)).clamp(max=1)
        return [
            torch.stack([factor * part for factor, part in zip(factors, parts, strict=True)]).sum(0)
            for parts in zip(*self.gradients, strict=True)
        ]


def norm_of(tensors: list[Tensor]) -> Tensor:
    return torch.stack([tensor.double().square().sum() for tensor in tensors]).sum().sqrt()


def difference(found: list[Tensor], wanted: list[Tensor]) -> float:
    """|found - wanted| / |wanted| over all tensors together."""
    gap = norm_of([one.double() - other for one, other in zip(found, wanted, strict=True)])
    return float(gap / norm_of(wanted))
