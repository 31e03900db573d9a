"""Weights without zeros, for the time of a probe: what a closed gate hides belongs to the graph as well.

A weight that is zero when a plan is made (an adapter, a new branch) lets no gradient through, so that a probe sees
nothing of what lies behind it, and the first step opens it. A backward pass reads weights where the forward pass left
them; there the small ones are replaced, and put back bit for bit afterwards.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from hush.gradients.graph import Graph

_CLOSED = 2.0**-10
"""Weights that are so many times smaller than those of a fresh layer let hardly anything through."""


@contextmanager
def opened(graph: Graph, parameter_side: Sequence[bool]) -> Iterator[None]:
    """No weight in what backward passes through this graph read is near zero inside; none is changed afterwards."""
    before: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    try:
        with torch.no_grad():
            for weights in _weights(graph, parameter_side):
                place = weights.untyped_storage().data_ptr()
                if place in before or not weights.numel() or not weights.is_floating_point():
                    continue
                whole = torch.empty(0, dtype=weights.dtype, device=weights.device).set_(weights.untyped_storage())
                size = weights[:1].numel() ** -0.5 if weights.dim() > 1 else 1.0
                closed = whole.abs() <= _CLOSED * size
                before[place] = whole, closed, whole[closed]
                generator = torch.Generator(whole.device).manual_seed(len(before))
                signs = torch.randint(2, before[place][2].shape, generator=generator, device=whole.device)
                whole[closed] = (size * (2 * signs - 1)).to(whole.dtype)
        yield
    finally:
        for whole, closed, values in before.values():
            whole[closed] = values


def _weights(graph: Graph, parameter_side: Sequence[bool]) -> Iterator[Tensor]:
    """The parameters, and what was computed from them alone (casts, normed weights), where the data side reads it."""
    yield from (graph.nodes[leaf].variable for leaf in graph.leaves)  # type: ignore[attr-defined]
    ours = {node for node, ours in zip(graph.nodes, parameter_side, strict=True) if ours}
    for node, edges in enumerate(graph.inputs):
        if parameter_side[node] or not any(edge is not None and parameter_side[edge[0]] for edge in edges):
            continue
        for name in graph.saved_tensors(node):
            value = graph.saved(node, name)
            yield from (one for one in (value if isinstance(value, tuple) else (value,)) if _is(one, ours))


def _is(value: object, ours: set[torch.autograd.graph.Node]) -> bool:
    return isinstance(value, Tensor) and value.grad_fn in ours
