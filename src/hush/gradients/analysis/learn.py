"""Learns where the examples lie in the graphs of a function, from slices of two and three of a batch's rows."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hush.errors import MixedExamples
from hush.gradients.analysis.function import Function
from hush.gradients.analysis.movers import Mover, edges_of, mover, suspects
from hush.gradients.analysis.owners import Owners, follows, looked_up, one_hot, regular, shared_entries
from hush.gradients.analysis.plan import Known, Lesson
from hush.gradients.graph import LEAF, Edge, Graph, read
from hush.gradients.inputs import Inputs
from hush.gradients.layers.table import RESHAPES
from hush.gradients.sums.per_example import Layout

_REMEDY = (
    "expected that each loss depends on its own example only; examples are mixed after this point (batch statistics, a "
    "loss that compares examples, a mean over the batch). Remove the mixing"
)


@dataclass(frozen=True)
class Slices:
    """The losses of two and of three examples, with their graphs."""

    two: Tensor
    three: Tensor
    graph_of_two: Graph
    graph: Graph

    def sizes_grow(self, edge: Edge) -> list[int]:
        """The dimensions that are one and a half times as large for three examples as for two."""
        one, other = self.graph_of_two.shape(*edge), self.graph.shape(*edge)
        return [d for d in range(len(other)) if len(one) == len(other) and other[d] and 2 * other[d] == 3 * one[d]]

    def same_size(self, node: int) -> bool:
        return self.graph_of_two.traits[node][0] == self.graph.traits[node][0]

    def where(self, edges: list[Edge]) -> dict[Edge, Layout | None]:
        """The one regular layout of each edge that both slices show; None where there are several, or none."""
        three = one_hot(self.three, [self.graph.edge(*edge) for edge in edges])
        two = one_hot(self.two, [self.graph_of_two.edge(*edge) for edge in edges])
        return {edge: self._layout(edge, a, b) for edge, a, b in zip(edges, three, two, strict=True)}

    def _layout(self, edge: Edge, three: Owners | None, two: Owners | None) -> Layout | None:
        if three is None or two is None:
            return None
        fitting = []
        for dim in self.sizes_grow(edge):
            one, other = three[dim], two[dim]
            for layout in regular(one, dim, 3) if one is not None and other is not None else ():
                if other is not None and len(other) == layout.outer * 2 * layout.inner:
                    fitting += [layout] if follows(other, layout.inner, 2) else []
        return fitting[0] if len(fitting) == 1 else None


def slices(function: Function, inputs: Inputs, rows: Tensor, weights: Mapping[str, Tensor] | None) -> Slices | None:
    """Slices of these rows; None if the graph of two examples is not that of three."""
    own = function.trainable()
    two, three = (function.trial(inputs.take(rows[:count]), weights, like_a_batch=True) for count in (2, 3))
    graphs = [read(losses, weights or own, own) for losses in (two, three)]
    return Slices(two, three, *graphs) if graphs[0].kind == graphs[1].kind else None


def learn(seen: Slices, sizes: tuple[int, ...], slow: frozenset[str] = frozenset()) -> Known:
    """What these slices show; refuses examples that mix."""
    graph = seen.graph
    side = _constant_by_shape(seen)
    while True:
        sites = sites_of(graph, side)
        used = graph.used()
        edges = [(node, output) for node in sites for output in used[node]]
        where = seen.where(edges)
        mixed = _mixed(seen, [edge for edge, layout in where.items() if layout is None], side)
        if not mixed:
            break
        for node in mixed:
            side[node] = True
    doubtful = suspects(graph, side)
    around = sorted({edge for node in doubtful for edge in edges_of(graph, node, side)} - set(where))
    where_around = where | seen.where(around)
    found = [mover(graph, node, side, where_around) for node in doubtful]
    movers = tuple(one for one in found if one is not None)
    _refuse_statistics(seen, side, bool(movers))
    layouts = {edge: None if one is None else (one.dim, one.outer, one.inner) for edge, one in where.items()}
    numbers = [np.asarray(g.numbers(), dtype=np.float64) for g in (seen.graph_of_two, graph)]
    if len(numbers[0]) != len(numbers[1]):
        numbers[0] = numbers[1] = np.zeros(0)  # fits no graph: looked up in each batch
    lesson = Lesson(sizes, numbers[0], numbers[1], layouts)
    return Known(side, movers, _behind(graph, sites, movers), slow, [lesson])


def sites_of(graph: Graph, side: list[bool]) -> list[int]:
    """Nodes with data in them that something constant goes into."""
    return [
        node
        for node, inputs in enumerate(graph.inputs)
        if not side[node] and any(edge is not None and side[edge[0]] for edge in inputs)
    ]


def _constant_by_shape(seen: Slices) -> list[bool]:
    graph = seen.graph
    side = [False] * len(graph.nodes)
    for node in graph.inputs_first():
        inputs = [edge[0] for edge in graph.inputs[node] if edge is not None]
        made = bool(inputs) and node != 0 and all(side[one] for one in inputs) and seen.same_size(node)
        side[node] = node in graph.leaves or made
    return side


def _mixed(seen: Slices, edges: list[Edge], side: list[bool]) -> list[int]:
    """Nodes made of constants alone that several losses reach at the same entry: they are constant, though they grow.

    Where data goes in, that is mixing.
    """
    graph = seen.graph
    found = []
    shared = shared_entries(seen.three, [graph.edge(*edge) for edge in edges])
    for (node, output), several in zip(edges, shared, strict=True):
        if several:
            if node == 0 or any(edge is not None and not side[edge[0]] for edge in graph.inputs[node]):
                raise MixedExamples(
                    f"several losses reach the same entries at the node {graph.names[node]}, whose output has shape "
                    f"{graph.shape(node, output)} for 3 examples: {_REMEDY}"
                )
            found.append(node)
    return found


def _refuse_statistics(seen: Slices, side: list[bool], routed: bool) -> None:
    """Data that keeps its size when the batch grows is a statistic of the batch, if several losses use it."""
    graph, used = seen.graph, seen.graph.used()
    odd = [
        (node, output)
        for node in range(1, len(graph.nodes))
        if not side[node] and graph.names[node] != LEAF and seen.same_size(node)
        for output in used[node]
    ]
    shared = shared_entries(seen.three, [graph.edge(*edge) for edge in odd])
    for (node, output), several in zip(odd, shared, strict=True):
        if several or (several is None and not routed and 0 not in graph.shape(node, output)):
            raise MixedExamples(
                f"the node {graph.names[node]} makes something of shape {graph.shape(node, output)} from data, of the "
                f"same size whatever the batch, and the losses use it: {_REMEDY}"
            )


def _behind(graph: Graph, sites: list[int], movers: tuple[Mover, ...]) -> dict[int, frozenset[int]]:
    """For each site the movers between it and the losses, itself included."""
    names = {one.node for one in movers}
    above: list[set[int]] = [set() for _ in graph.nodes]
    for node in reversed(graph.inputs_first()):
        here = above[node] | ({node} & names)
        for edge in graph.inputs[node]:
            if edge is not None:
                above[edge[0]] |= here
    return {node: frozenset(above[node] | ({node} & names)) for node in sites}


def by_owners(graph: Graph, losses: Tensor) -> tuple[list[bool], dict[Edge, Layout | None]]:
    """The constant side and the layouts of one batch alone, for graphs that no slice shows.

    Right where examples are known to be independent: what several losses then reach at one entry cannot hold data.
    """
    used = graph.used()
    pure = [False] * len(graph.nodes)
    for node in graph.inputs_first():
        inputs = [edge[0] for edge in graph.inputs[node] if edge is not None]
        pure[node] = node in graph.leaves or (bool(inputs) and node != 0 and all(pure[one] for one in inputs))
    look = [
        (node, output)
        for node in range(len(graph.nodes))
        if graph.names[node] != LEAF
        and not (pure[node] and graph.names[node] in RESHAPES)
        and (pure[node] or any(edge is not None and pure[edge[0]] for edge in graph.inputs[node]))
        for output in used[node]
    ]
    narrow = any(output[1] == torch.float16 for traits in graph.traits for output in traits[0])
    where = dict(zip(look, looked_up(losses, [graph.edge(*edge) for edge in look], narrow)[0], strict=True))
    side = [False] * len(graph.nodes)
    for node in graph.inputs_first():
        inputs = [edge[0] for edge in graph.inputs[node] if edge is not None]
        if node in graph.leaves:
            side[node] = True
        elif pure[node] and all(side[one] for one in inputs):
            # Rows that come in like their parameter's own are weights; a layout would be one of the examples.
            reshape = graph.names[node] in RESHAPES
            side[node] = reshape or any(where.get((node, output)) is None for output in used[node])
    return side, where
