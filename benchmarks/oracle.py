"""Clipped sums the slow way: one backward pass for each example, in float64, by plain autograd. Nothing of hush."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

Losses = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Reference:
    """The gradient of each example alone, through a float64 copy of the model; one is kept at a time."""

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, losses: Losses) -> None:
        self._model = copy.deepcopy(model).double()
        self._params = [param for param in self._model.parameters() if param.requires_grad]
        self._x, self._y = x.double() if x.is_floating_point() else x, y
        self._losses = losses
        self.norms = torch.stack([norm_of(self._gradient(at)) for at in range(len(x))])

    def _gradient(self, at: int) -> list[Tensor]:
        loss = self._losses(self._model, self._x[at : at + 1], self._y[at : at + 1])
        found = torch.autograd.grad(loss[0], self._params, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for p, g in zip(self._params, found, strict=True)]

    def clipped_sum(self, weights: Tensor, bound: float) -> list[Tensor]:
        """sum_i w_i g_i min(1, bound / |w_i g_i|), Algorithm 1 of Abadi et al. 2016 for the losses w_i * loss_i."""
        total = [torch.zeros_like(param) for param in self._params]
        for at, weight in enumerate(weights.double()):
            factor = weight * (bound / (weight * self.norms[at])).clamp(max=1)
            for part, gradient in zip(total, self._gradient(at), strict=True):
                part += factor * gradient
        return [part.detach() for part in total]


def norm_of(tensors: list[Tensor]) -> Tensor:
    return torch.stack([tensor.double().square().sum() for tensor in tensors]).sum().sqrt()


def difference(found: list[Tensor], wanted: list[Tensor]) -> float:
    """|found - wanted| / |wanted| over all tensors together."""
    gap = norm_of([one.double() - other for one, other in zip(found, wanted, strict=True)])
    return float(gap / norm_of(wanted))
