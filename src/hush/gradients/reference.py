"""The definition: the gradients of one example after another, each alone in its batch. Slow, and exact by construction.

An example that is alone in its batch cannot meet another, so nothing has to be tested.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from hush.clipping.bounded_sum import BoundedSum, Group
from hush.clipping.clips import Clip
from hush.gradients.inputs import Inputs


def gradients_of(losses_of: Callable[..., Tensor], model: nn.Module, inputs: Inputs) -> Iterator[dict[str, Tensor]]:
    """For each example the gradient of its loss, by plain autograd; zeros for what its loss does not depend on."""
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    for row in range(inputs.rows):
        alone = inputs.take(torch.tensor([row]))
        with torch.enable_grad():
            loss = losses_of(model, *alone.args, **alone.kwargs).mean()  # of the views of the example
        found = torch.autograd.grad(loss, list(params.values()), allow_unused=True, materialize_grads=True)
        yield {name: g.to_dense() if g.is_sparse else g for name, g in zip(params, found, strict=True)}


def clipped_sum(
    losses_of: Callable[..., Tensor],
    model: nn.Module,
    inputs: Inputs,
    clip: Clip,
    mask: Tensor | None = None,
) -> BoundedSum:
    """sum_i g_i min(1, C / |g_i|) over each group, in float64 (Algorithm 1 of Abadi et al. 2016)."""
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    total = {name: torch.zeros_like(param, dtype=torch.float64) for name, param in params.items()}
    counts = clip.below(torch.zeros(0, dtype=torch.float64), 1.0)
    count = None if counts is None else torch.zeros((), dtype=torch.float64)
    for row, gradient in enumerate(gradients_of(losses_of, model, inputs) if inputs.rows else ()):
        if mask is not None and not mask[row]:
            continue
        for group in clip.groups(params):
            square = sum((gradient[name].double().square().sum() for name in group.names), torch.zeros(()))[None]
            factor = clip.factors(square * (1 + 1e-12), group.bound)
            if square.isfinite():
                for name in group.names:
                    total[name] += factor[0] * gradient[name]
            below = clip.below(square, group.bound)
            count = None if count is None or below is None else count + below.sum()
    of_count = None if count is None else BoundedSum({"count": count}, (Group(("count",), 0.5),))
    return BoundedSum(total, clip.sum_bounds(params), of_count)
