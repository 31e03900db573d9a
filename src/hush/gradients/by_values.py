"""What values, and not shapes, decide: to which example a row belongs, and whether examples meet at all.

A plan is made on one batch and used for the next ones. Where an index, a zero in a matrix or a gradient that does not
arrive says how the examples lie, the next batch may say otherwise: the plan then holds for the same indices alone, or
for this batch alone.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from hush.gradients.graph import LEAF, Edge, Graph
from hush.gradients.layers.table import BROADCASTS, MOVERS, PRODUCTS, RESHAPES
from hush.gradients.opened import gates, opened, opened_gates
from hush.gradients.probe import Finding, in_groups, probe
from hush.gradients.sums.per_example import Layout

Place = tuple[int, str, int]
"""Node, saved attribute, position in it."""
Guarded = tuple[int, str, int, Tensor]
"""The same, and the value that stands there and must not change."""


def movers(graph: Graph, side: Sequence[bool]) -> list[int]:
    """Nodes of the data side (`side` says who is not) that move entries to places named by indices, or may do so."""
    named = [node for node, name in enumerate(graph.names) if name in MOVERS or graph.is_python(node)]
    return [node for node in named if not side[node]]


def guarded(graph: Graph, node: int, seen: dict[Edge, Finding]) -> Iterator[Guarded]:
    """The index values that decide where examples go: along other dimensions they may be anything."""
    edge = None if graph.is_python(node) else graph.inputs[node][0]
    layout = seen[edge].layout if edge is not None and seen[edge].certain else None
    if layout is not None and edge is not None:
        along = _dims(graph, node, len(graph.shape(*edge)))
        if along and layout.dim not in along:
            return
    for name in graph.saved_tensors(node):
        value = graph.saved(node, name)
        for item, tensor in enumerate(value if isinstance(value, tuple) else (value,)):
            if not isinstance(tensor, Tensor) or tensor.is_floating_point() or tensor.is_complex():
                continue
            along_examples = layout is None or not isinstance(value, tuple) or item == layout.dim
            if along_examples or tensor.dtype in (torch.bool, torch.uint8):  # a mask is an index of several dimensions
                yield node, name, item, tensor.detach().clone()


def item_at(graph: Graph, place: Place) -> Tensor:
    """The tensor that is saved at a place."""
    node, name, item = place
    value = graph.saved(node, name)
    found: Tensor = value[item] if isinstance(value, tuple) else value
    return found


def unchanged(graph: Graph, guard: Guarded) -> bool:
    """Whether the value that a guard names is the same in this graph."""
    node, name, item, kept = guard
    now = item_at(graph, (node, name, item))
    return isinstance(now, Tensor) and now.shape == kept.shape and torch.equal(now, kept)


def joins(graph: Graph, node: int, side: Sequence[bool]) -> bool:
    """Whether a node might bring examples together or take them apart by the values of its other input."""
    name, inputs = graph.names[node], _data_inputs(graph, node, side)
    if not inputs or name in RESHAPES:
        return False
    if name in PRODUCTS or name.startswith("ScaledDotProduct"):
        return True
    return name in BROADCASTS and any(graph.shape(*edge) != graph.shape(node, 0) for edge in inputs.values())


def joined_by_values(graph: Graph, node: int, finding: Finding, side: Sequence[bool]) -> bool:
    """Whether the examples lie apart below this node because of zeros in what they are multiplied with.

    They do where the dimension along which they lie is summed over, or was broadcast, on the way back.
    """
    layout, name, inputs = finding.layout, graph.names[node], _data_inputs(graph, node, side)
    if layout is None or layout.batch == 1:
        return False
    if name.startswith("ScaledDotProduct"):
        return layout.dim > 1
    rank = len(graph.shape(node, 0))
    if name in PRODUCTS:
        first = PRODUCTS[name]
        kept = {first: rank - (2 if rank > 1 else 1), first + 1: rank - 1 if rank > 1 else -1}
        return any(
            layout.dim != kept[index] and not (rank == 3 and layout.dim == 0) for index in inputs if index in kept
        )
    shapes = [graph.shape(*edge) for edge in inputs.values()]
    sizes = [((1,) * (rank - len(shape)) + shape)[layout.dim] for shape in shapes]
    return any(size != graph.shape(node, 0)[layout.dim] for size in sizes)


def routed(graph: Graph, node: int, seen: dict[Edge, Finding]) -> bool:
    """Whether a node picks one value along the dimension in which examples lie: the next batch may pick another's."""
    edge = graph.inputs[node][0]
    layout = seen[edge].layout if edge is not None else None
    if edge is None or layout is None or layout.batch == 1:
        return False
    reduced = _dims(graph, node, len(graph.shape(*edge)))
    return not reduced or layout.dim in reduced


def gated(graph: Graph, losses: Tensor, seen: dict[Edge, Finding], ends: Sequence[Edge], side: Sequence[bool]) -> bool:
    """Whether examples would lie otherwise at these ends if no factor were zero and masks said something else."""
    if not gates(graph, side):
        return False
    for condition in (True, False):
        with opened(graph, side), opened_gates(graph, side, condition):
            found = probe(losses, [graph.edge(*end) for end in ends])
        for end, finding in zip(ends, found, strict=True):
            if not (finding.blank or _alike(finding.layout, seen[end].layout)):
                return True
    return False


def _dims(graph: Graph, node: int, rank: int) -> set[int]:
    """The dimensions that a node names; negative ones are saved as if they had no sign."""
    named = getattr(graph.nodes[node], "_saved_dim", None)
    several = (named,) if isinstance(named, int) else tuple(named or ())
    return {(dim - 2**64 if dim >= 2**63 else dim) % max(1, rank) for dim in several}


def _alike(one: Layout | None, other: Layout | None) -> bool:
    if one is None or other is None or one.order is not None or other.order is not None:
        return one is other
    return one == other


def silent(graph: Graph, losses: Tensor, ends: Sequence[Edge], side: Sequence[bool]) -> set[int]:
    """Nodes on the way to these ends that no gradient reaches: what they join is not seen on this batch."""
    found: set[int] = set()

    def look(node: int, grads: Sequence[Tensor | None]) -> None:
        if not any(grad is not None and bool(grad.any()) for grad in grads):
            found.add(node)

    hooks = [
        graph.nodes[node].register_prehook(partial(look, node))
        for node in range(1, len(graph.nodes))
        if not side[node] and graph.names[node] != LEAF
    ]
    try:
        with torch.autograd.set_multithreading_enabled(False):
            for edges in in_groups([graph.edge(*end) for end in ends], losses.device):
                torch.autograd.grad(losses, edges, torch.ones_like(losses), retain_graph=True, allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _data_inputs(graph: Graph, node: int, side: Sequence[bool]) -> dict[int, Edge]:
    return {i: edge for i, edge in enumerate(graph.inputs[node]) if edge is not None and not side[edge[0]]}
