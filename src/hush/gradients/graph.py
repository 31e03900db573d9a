"""Reads the autograd graph behind a vector of losses: its nodes, who feeds whom, and a key that tells graphs apart.

Nothing is attached to the model, to its parameters or to the graph.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

LEAF = "torch::autograd::AccumulateGrad"
COPY_SLICES = "torch::autograd::CopySlices"
"""A slice that was written in place; where it lies is not to be read."""

Edge = tuple[int, int]
"""A node, by its number, and which of its outputs."""


@dataclass(frozen=True)
class Graph:
    """The nodes behind the losses, the losses' own first, with the inputs of each node as (node, output) pairs."""

    nodes: tuple[Node, ...]
    names: tuple[str, ...]
    inputs: tuple[tuple[Edge | None, ...], ...]
    leaves: Mapping[int, str]
    """Node index -> name of the parameter that it stands for."""
    batch: int
    traits: tuple[tuple[Any, ...], ...]
    """For each node the shapes, dtypes and devices of its outputs, and its whole-number arguments."""
    key: object
    """Equal for two graphs if and only if nodes, edges, shapes, dtypes, whole-number arguments and leaves are equal."""

    def edge(self, node: int, output: int) -> GradientEdge:
        return GradientEdge(self.nodes[node], output)

    def shape(self, node: int, output: int) -> tuple[int, ...]:
        return self.traits[node][0][output][0]

    @property
    def family(self) -> object:
        """Equal for graphs that differ in sizes alone."""
        return self.names, self.inputs, tuple(self.leaves.items())

    @property
    def kind(self) -> object:
        """Equal for graphs that differ in whole numbers alone: in sizes, in where a slice begins."""
        dtypes = tuple([tuple([output[1] for output in traits[0]]) for traits in self.traits])
        return self.names, self.inputs, tuple(self.leaves.items()), dtypes

    def numbers(self) -> list[int]:
        """Every whole number of the graph in a fixed order, lists with their lengths."""
        flat: list[int] = []

        def put(value: object) -> None:
            if isinstance(value, (tuple, list)):
                flat.append(-1 - len(value))
                for one in value:
                    put(one)
            elif isinstance(value, int):
                flat.append(int(value) if value < 1 << 62 else int(value) - (1 << 64))

        for traits in self.traits:
            put([output[0] for output in traits[0]])
            put(traits[1:])
        return flat

    def used(self) -> list[list[int]]:
        """For each node which of its outputs something reads."""
        found: list[set[int]] = [set() for _ in self.nodes]
        found[0].add(0)
        for edges in self.inputs:
            for edge in edges:
                if edge is not None:
                    found[edge[0]].add(edge[1])
        return [sorted(outputs) for outputs in found]

    def inputs_first(self) -> list[int]:
        """All nodes, each after its inputs."""
        order: list[int] = []
        done = [False] * len(self.nodes)
        stack = [0]
        while stack:
            node = stack[-1]
            waiting = [edge[0] for edge in self.inputs[node] if edge is not None and not done[edge[0]]]
            if waiting and not done[node]:
                stack.extend(waiting)
                continue
            stack.pop()
            if not done[node]:
                done[node] = True
                order.append(node)
        return order

    def saved(self, node: int, attribute: str) -> Any:
        name = attribute if self.is_python(node) else "_saved_" + attribute
        return getattr(self.nodes[node], name, None)

    def is_python(self, node: int) -> bool:
        """Whether a node was written in Python (a function of one's own, a compiled part): nobody sees what it does."""
        return isinstance(self.nodes[node], torch.autograd.function.BackwardCFunction)

    def saved_tensors(self, node: int) -> list[str]:
        """The attributes of the node that are saved tensors."""
        if self.is_python(node):
            return ["saved_tensors"]
        raw = "_raw_saved_"
        return [name.removeprefix(raw) for name in dir(type(self.nodes[node])) if name.startswith(raw)]


def back(steps: Sequence[tuple[Node, int]], gradient: Tensor) -> Tensor:
    """Takes a gradient backwards through single nodes with one input each, in the gradient's own dtype."""
    for node, output in steps:
        run: Any = node
        answer = run(*[gradient if place == output else None for place in range(len(node._input_metadata))])
        gradient = answer[0] if isinstance(answer, tuple) else answer
    return gradient


def read(losses: Tensor, params: Mapping[str, Tensor], also: Mapping[str, Tensor] | None = None) -> Graph:
    """The graph behind `losses`; raises if it holds trainable parameters that are not in `params`, or hides some.

    `also` holds other tensors that stand for parameters of these names.
    """
    if losses.grad_fn is None:
        raise ValueError(
            "the losses do not depend on any parameter that requires a gradient: expected losses computed from the "
            "trainable parameters with gradients enabled (no torch.no_grad(), no detach())"
        )
    place: dict[Node, int] = {losses.grad_fn: 0}
    nodes: list[Node] = [losses.grad_fn]
    inputs: list[tuple[Edge | None, ...]] = []
    for node in nodes:
        edges: list[Edge | None] = []
        for source, output in node.next_functions:
            if source is None:
                edges.append(None)
                continue
            index = place.get(source)
            if index is None:
                index = place[source] = len(nodes)
                nodes.append(source)
            edges.append((index, output))
        inputs.append(tuple(edges))
    names = tuple(node.name() for node in nodes)
    leaves = _leaves(nodes, names, params, also or {})
    traits = tuple([_traits(node) for node in nodes])
    key = (losses.shape[0], names, tuple(inputs), tuple(leaves.items()), traits)
    return Graph(tuple(nodes), names, tuple(inputs), leaves, losses.shape[0], traits, key)


def _leaves(
    nodes: list[Node], names: tuple[str, ...], params: Mapping[str, Tensor], also: Mapping[str, Tensor]
) -> dict[int, str]:
    name_of = {id(tensor): name for given in (also, params) for name, tensor in given.items()}
    leaves: dict[int, str] = {}
    strangers: list[tuple[int, ...]] = []
    for index, (node, name) in enumerate(zip(nodes, names, strict=True)):
        if name == "CheckpointFunctionBackward":
            raise ValueError(
                "reentrant checkpointing hides the parameters inside the checkpointed part from the graph, so their "
                "gradients would be lost: call torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        if name == LEAF:
            variable = node.variable  # type: ignore[attr-defined]
            found = name_of.get(id(variable))
            if found is not None:
                leaves[index] = found
            elif isinstance(variable, torch.nn.Parameter):
                strangers.append(tuple(variable.shape))
    if strangers:
        raise ValueError(
            f"the losses depend on {len(strangers)} trainable parameter(s) that are not among the {len(params)} given, "
            f"of shape {', '.join(map(str, strangers[:8]))}: give all trainable parameters, or freeze these with "
            "requires_grad_(False) before the forward pass"
        )
    return leaves


def _traits(node: Node) -> tuple[Any, ...]:
    """Shapes and dtypes of the outputs, and every saved argument that is a whole number or several."""
    outputs = tuple([(tuple(data.shape), data.dtype, data.device) for data in node._input_metadata])
    return (outputs, *[_whole(getattr(node, attribute)) for attribute in _arguments(type(node))])


def _whole(value: Any) -> object:
    """Numbers that say where entries go (start, dim, sizes); a factor such as a temperature may change freely."""
    if isinstance(value, (tuple, list)):
        return tuple([number if isinstance(number, int) else None for number in value])
    return value if isinstance(value, int) else None


@cache
def _arguments(kind: type) -> tuple[str, ...]:
    """Names of the saved arguments that are no tensors; to read a saved tensor may recompute a checkpointed part."""
    return tuple(
        name
        for name in dir(kind)
        if name.startswith("_saved_") and not hasattr(kind, "_raw" + name) and "strides" not in name
    )
