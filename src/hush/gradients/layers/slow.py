"""Any other node: its own backward, called after the pass. Exact for whatever the node computes.

Called by itself, a node leaves it to autograd to undo broadcasting. So where its answer has the shape of the output's
gradient, it is the gradient of the broadcast input, one row for each row, and is summed by example: one call for all.
Otherwise it is called once for each example, with the rows of the others set to zero.
Never inside a running pass: there a node computes nothing for inputs that the pass does not ask for.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hush.errors import NotSupported
from hush.gradients.layers.elementwise import reduce
from hush.gradients.sums.per_example import Contribution, Layout, Site, Stored, wide


def contributions(site: Site) -> dict[int, Contribution] | None:
    found: dict[int, Contribution] = {}
    answers: Sequence[Tensor | None] = ()
    if sum(grad is not None for grad in site.grads) == 1 and site.grad.dim():
        answers = _call(site, site.grads)
    by_example: dict[int, list[Tensor]] = {}
    for index in site.wanted:
        value, shape = answers[index] if answers else None, site.shapes[index] or ()
        if value is not None and not value.is_sparse and value.shape == site.grad.shape:
            summed = reduce(wide(value), site.layout, shape)
            if summed is not None:
                found[index] = Stored(summed)
                continue
        by_example[index] = []
    for example in range(site.batch if by_example else 0):
        grads = [
            grad if grad is None or layout is None else only(grad, layout, example)
            for grad, layout in zip(site.grads, site.layouts, strict=True)
        ]
        each = _call(site, grads)
        for index, rows in by_example.items():
            value, shape = each[index], site.shapes[index] or ()
            if value is None:
                rows.append(site.grad.new_zeros(shape))
            else:
                rows.append((value.to_dense() if value.is_sparse else value).sum_to_size(shape))
    return found | {index: isolated(rows) for index, rows in by_example.items()}


class Spoiled(Exception):
    """An example whose numbers are not finite: 0 times infinity is NaN in the gradients of all others."""


def isolated(rows: Sequence[Tensor]) -> Stored:
    """Gradients that were found by setting the weights or rows of other examples to zero, if that did isolate them."""
    values = wide(torch.stack(list(rows)))
    if torch._C._len_torch_dispatch_stack():
        raise NotSupported(
            "a gradient that is taken example by example cannot be recorded or compiled, because one example that is "
            "not finite would spoil the others unseen: run without compile, or give the layer a form that has a rule"
        )
    if not bool(values.isfinite().all()):
        raise Spoiled
    return Stored(values)


def _call(site: Site, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    node: Any = site.node
    run = node if callable(node) else node.apply  # a function with a backward of its own in Python
    with torch.no_grad():
        answer = run(*grads, *[None] * (len(node._input_metadata) - len(grads)))
    return answer if isinstance(answer, tuple) else (answer,)


def only(grad: Tensor, layout: Layout, example: int) -> Tensor:
    """The gradient with the rows of all other examples set to zero."""
    if grad.dim() == 0:
        return grad
    rows = torch.zeros(layout.batch, dtype=torch.bool, device=grad.device)
    rows[example] = True
    shape = [1] * grad.dim()
    shape[layout.dim] = -1
    return torch.where(layout.per_row(rows).view(shape), grad, 0)
