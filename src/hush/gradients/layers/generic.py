"""Any other node: its own backward, run once for each example on the output gradients of that example alone."""

from typing import Any

import torch
from torch import Tensor

from hush.gradients.sums.per_example import Contribution, Layout, Site, Stored, wide


def contributions(site: Site) -> dict[int, Contribution]:
    """Exact for whatever the node computes, at the price of one pass through this node per example."""
    node: Any = site.node
    # A function with a backward of its own in Python is called another way.
    backward = node if callable(node) else node.apply
    gathered: dict[int, list[Tensor]] = {index: [] for index in site.wanted}
    for example in range(site.batch):
        grads = [
            grad if grad is None or layout is None else only(grad, layout, example)
            for grad, layout in zip(site.grads, site.layouts, strict=True)
        ]
        unused = [None] * (len(node._input_metadata) - len(grads))
        answer = backward(*grads, *unused)
        answers = answer if isinstance(answer, tuple) else (answer,)
        for index, found in gathered.items():
            value, shape = answers[index], site.shapes[index] or ()
            # A node leaves it to the engine to undo broadcasting.
            found.append(site.grad.new_zeros(shape) if value is None else value.sum_to_size(shape))
    return {index: Stored(wide(torch.stack(found))) for index, found in gathered.items()}


def only(grad: Tensor, layout: Layout, example: int) -> Tensor:
    """The gradient with the rows of all other examples set to zero."""
    if grad.dim() == 0:
        return grad
    rows = torch.zeros(layout.batch, dtype=torch.bool, device=grad.device)
    rows[example] = True
    shape = [1] * grad.dim()
    shape[layout.dim] = -1
    return torch.where(layout.per_row(rows).view(shape), grad, 0)
