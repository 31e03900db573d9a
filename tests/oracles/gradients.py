"""Per-example gradients the slow way: one backward pass for each example, in float64, by plain autograd."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

Losses = Callable[[nn.Module, tuple[Tensor, ...]], Tensor]


def per_example_gradients(model: nn.Module, batch: Sequence[Tensor], losses: Losses) -> dict[str, Tensor]:
    """{parameter: [batch, *shape] in float64}: each example through a float64 copy of the model, alone in its batch."""
    exact = copy.deepcopy(model).double()
    names = [name for name, param in exact.named_parameters() if param.requires_grad]
    params = [param for param in exact.parameters() if param.requires_grad]
    gathered: dict[str, list[Tensor]] = {name: [] for name in names}
    for example in range(len(batch[0])):
        alone = tuple(wide(tensor[example : example + 1]) for tensor in batch)
        loss = losses(exact, alone)
        assert loss.shape == (1,)
        for name, gradient in zip(names, torch.autograd.grad(loss[0], params, allow_unused=True), strict=True):
            gathered[name].append(torch.zeros_like(exact.get_parameter(name)) if gradient is None else gradient)
    return {name: torch.stack(found).detach() for name, found in gathered.items()}


def wide(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def squared_norms(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: gradient.reshape(len(gradient), -1).square().sum(1) for name, gradient in gradients.items()}


def clipped_sum(gradients: Mapping[str, Tensor], bound: float) -> dict[str, Tensor]:
    """sum_i g_i * min(1, bound / |g_i|), Algorithm 1 of Abadi et al. 2016, written out."""
    total = {name: torch.zeros_like(gradient[0]) for name, gradient in gradients.items()}
    for example in range(len(next(iter(gradients.values())))):
        norm = math.sqrt(sum(float(gradient[example].square().sum()) for gradient in gradients.values()))
        factor = min(1.0, bound / norm) if norm > 0 else 1.0
        for name, gradient in gradients.items():
            total[name] += factor * gradient[example]
    return total
