"""Which nodes of a graph are made of parameters alone, and which have data in them.

A node is on the *parameter side* if all its inputs are and its output gradient is not separated by example. A product
of data with a weight whose examples are mixed afterwards looks the same; shapes tell the two apart, or where they
cannot, what happens next.
"""

from collections.abc import Sequence
from math import prod

from torch import Tensor

from hush.gradients.by_values import Place, item_at
from hush.gradients.graph import LEAF, Edge, Graph
from hush.gradients.layers.table import MOVERS, PARAMETRIC, PRODUCTS, RESHAPES, RULES, SPREADERS
from hush.gradients.probe import Finding, probe


def parameter_side(graph: Graph, losses: Tensor, used: list[list[int]]) -> tuple[list[bool], dict[Edge, Finding]]:
    """For each node whether it is on the parameter side, found from the leaves upwards, and what was probed for it."""
    side: list[bool | None] = [None] * len(graph.nodes)
    seen: dict[Edge, Finding] = {}
    order = inputs_first(graph)
    while True:
        open_nodes = []
        for node in order:
            if side[node] is None:
                side[node] = _decide(graph, node, side)
                if side[node] is None and all(edge is None or side[edge[0]] for edge in graph.inputs[node]):
                    open_nodes.append(node)
        if not open_nodes:
            return [bool(answer) for answer in side], seen
        edges = [(node, output) for node in open_nodes for output in used[node]]
        seen |= dict(zip(edges, probe(losses, [graph.edge(*edge) for edge in edges]), strict=True))
        for node in open_nodes:
            findings = [seen[node, output] for output in used[node]]
            side[node] = all(finding.layout is None for finding in findings)


def _decide(graph: Graph, node: int, side: list[bool | None]) -> bool | None:
    """What can be said without a probe; None if nothing."""
    name = graph.names[node]
    if name == LEAF:
        return node in graph.leaves
    inputs = [side[edge[0]] for edge in graph.inputs[node] if edge is not None]
    if not inputs or False in inputs or node == 0:
        return False
    if None in inputs:
        return None
    if name in RESHAPES:
        return True
    if name not in PARAMETRIC or _takes_in_data(graph, node):
        return False
    if graph.batch > 1:
        return None
    # All that one example does belongs to it; what has no dimension has no rule either.
    return name not in RULES or graph.shape(node, 0) == ()


def _takes_in_data(graph: Graph, node: int) -> bool:
    """Whether a node joins parameters with a constant tensor that looks like data and not like a mask or a scale.

    What is larger than the parameters that go into it does, and so does a matrix product whose result has another shape
    than the parameter, with a size that is a multiple of the batch's; and an index with one entry for each example.
    """
    name, shape = graph.names[node], graph.shape(node, 0)
    if name in MOVERS:
        return any(item_at(graph, place).shape == (graph.batch,) for place in doubtful(graph, node))
    given = [graph.shape(*edge) for edge in graph.inputs[node] if edge is not None]
    if len(given) == len(graph.inputs[node]):
        return False
    if name in PRODUCTS and len(shape) > 1:
        return shape not in given and any(size % graph.batch == 0 for size in shape)
    if name in PRODUCTS and graph.inputs[node][PRODUCTS[name]] is None:
        return shape not in given and shape[0] % graph.batch == 0
    return prod(shape) > max(prod(one) for one in given)


def made_of_parameters(graph: Graph, node: int, side: Sequence[bool]) -> bool:
    """Whether nothing but parameters goes into a site: rows of a weight, one for each example by chance, or worse.

    What only spreads parameters over the examples, or picks some for each, is an ordinary site.
    """
    edges = [edge for edge in graph.inputs[node] if edge is not None]
    if graph.batch == 1 or graph.names[node] in MOVERS:
        return False
    if len(edges) < len(graph.inputs[node]) or not all(side[edge[0]] for edge in edges):
        return False
    grows = prod(graph.shape(node, 0)) > max(prod(graph.shape(*edge)) for edge in edges)
    return not (grows and graph.names[node] in SPREADERS)


def has_data_below(graph: Graph, node: int) -> bool:
    """Whether something other than parameters goes into this node further down: then it has data in it after all.

    A product with as many rows as the batch, or rows that were picked, look like weights if examples are mixed later.
    """
    below = [edge[0] for edge in graph.inputs[node] if edge is not None]
    for one in below:  # grows
        below += [edge[0] for edge in graph.inputs[one] if edge is not None and edge[0] not in below]
    names = {graph.names[one] for one in below}
    return bool(names & MOVERS) or "WhereBackward0" in names or any(None in graph.inputs[one] for one in below)


def doubtful(graph: Graph, node: int) -> list[Place]:
    """Constants that a node of the parameter side reads and that are large enough to be a batch.

    A fixed rotation and a table of relative positions are constants. Data that is mixed afterwards looks the same, but
    not on the next batch.
    """
    name = graph.names[node]
    if graph.batch == 1 or not (name in MOVERS or (name in PRODUCTS and None in graph.inputs[node])):
        return []
    found = []
    for attribute in graph.saved_tensors(node):
        value = graph.saved(node, attribute)
        for item, one in enumerate(value if isinstance(value, tuple) else (value,)):
            constant = isinstance(one, Tensor) and not one.requires_grad
            if constant and one.numel() and any(size % graph.batch == 0 for size in one.shape):
                found.append((node, attribute, item))
    return found


def inputs_first(graph: Graph) -> list[int]:
    """All nodes, each after its inputs."""
    order: list[int] = []
    done = [False] * len(graph.nodes)
    stack = [0]
    while stack:
        node = stack[-1]
        waiting = [edge[0] for edge in graph.inputs[node] if edge is not None and not done[edge[0]]]
        if waiting and not done[node]:
            stack.extend(waiting)
            continue
        stack.pop()
        if not done[node]:
            done[node] = True
            order.append(node)
    return order
