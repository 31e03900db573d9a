"""Tensors without zeros, for the time of a probe: what a closed gate hides belongs to the graph as well.

A weight that is zero when a plan is made (an adapter, a new branch) lets no gradient through, so that a probe sees
nothing of what lies behind it, and the first step opens it. A mask may give rows to examples: on the next batch its
zeros lie elsewhere. A backward pass reads both where the forward pass left them; there zeros are replaced, and put back
bit for bit afterwards.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from hush.gradients.graph import Graph
from hush.gradients.layers.table import GATES

_CLOSED = 2.0**-10
"""Weights that are so many times smaller than those of a fresh layer let hardly anything through."""


@contextmanager
def opened(graph: Graph, parameter_side: Sequence[bool]) -> Iterator[None]:
    """No weight in what backward passes through this graph read is near zero inside; none is changed afterwards."""
    sized = (
        (one, max(1, one[:1].numel()) ** -0.5 if one.dim() > 1 else 1.0) for one in _weights(graph, parameter_side)
    )
    with _replaced(sized, True):
        yield


@contextmanager
def opened_gates(graph: Graph, parameter_side: Sequence[bool], condition: bool) -> Iterator[None]:
    """No factor on the data side is near zero inside, and all masks say `condition`; none is changed afterwards."""
    with _replaced(((gate, 1.0) for gate in gates(graph, parameter_side)), condition):
        yield


def gates(graph: Graph, parameter_side: Sequence[bool]) -> list[Tensor]:
    """What nodes of the data side multiply gradients with, or choose between them by."""
    nodes = [node for node, name in enumerate(graph.names) if name in GATES and not parameter_side[node]]
    saved = [graph.saved(node, name) for node in nodes for name in graph.saved_tensors(node)]
    return [tensor for tensor in saved if isinstance(tensor, Tensor)]


@contextmanager
def _replaced(tensors: Iterable[tuple[Tensor, float]], condition: bool) -> Iterator[None]:
    """Numbers near zero become plus or minus the given size, whole numbers 1, and what is true or false `condition`."""
    before: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    try:
        with torch.no_grad():
            for tensor, size in tensors:
                place = tensor.untyped_storage().data_ptr()
                if place in before or not tensor.numel() or tensor.is_complex():
                    continue
                whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
                if tensor.dtype == torch.bool:
                    closed, fresh = whole != condition, torch.full_like(whole, condition)
                elif tensor.is_floating_point():
                    generator = torch.Generator(whole.device).manual_seed(len(before))
                    signs = torch.randint(2, whole.shape, generator=generator, device=whole.device, dtype=torch.int8)
                    closed, fresh = whole.abs() <= _CLOSED * size, (size * (2 * signs - 1)).to(whole.dtype)
                else:
                    closed, fresh = whole == 0, torch.ones_like(whole)
                before[place] = whole, closed, whole[closed]
                whole[closed] = fresh[closed]
        yield
    finally:
        for whole, closed, values in before.values():
            whole[closed] = values
        torch.clear_autocast_cache()  # a checkpointed part that ran meanwhile left casts of opened weights there


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
