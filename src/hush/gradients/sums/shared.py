"""Brings the contributions of all sites home to the parameters: reshapes undone, reuse and tying added up exactly."""

from dataclasses import dataclass
from functools import partial
from itertools import combinations

import torch
from torch import Tensor
from torch.autograd.graph import Node

from hush.gradients.analysis.plan import Inlet, moves
from hush.gradients.graph import Edge, Graph, back
from hush.gradients.layers import embedding, products
from hush.gradients.layers.embedding import Rows
from hush.gradients.layers.products import Products
from hush.gradients.sums.norms import add
from hush.gradients.sums.per_example import Contribution, Stored, Weights, wide

_MATRIX_TRANSPOSES = frozenset({"TBackward0", "TransposeBackward0"})
_PARTS = 4.0
"""Parts that overlap may be so many times as long as their sum; what cancels further is clipped as if it did not."""


@dataclass(frozen=True)
class Reshaped(Contribution):
    """A contribution seen through nodes that only move entries: norms stay, sums are moved back."""

    inside: Contribution
    steps: tuple[tuple[Node, int], ...]

    @property
    def terms(self) -> int:
        return self.inside.terms

    @property
    def convolves(self) -> bool:
        return self.inside.convolves

    @property
    def rounded(self) -> float:
        return self.inside.rounded

    @property
    def apart(self) -> bool:
        return self.inside.apart

    @property
    def pairs(self) -> bool:
        return self.inside.pairs

    def spread(self, shape: tuple[int, ...], more: int) -> Tensor:
        return self.inside.spread(shape, more)

    def floor(self) -> Tensor | None:
        return self.inside.floor()

    def additions(self, batch: int) -> float:
        return self.inside.additions(batch)

    def chain(self, shape: tuple[int, ...]) -> int:
        return self.inside.chain(shape)

    def squared_norms(self) -> Tensor:
        return self.inside.squared_norms()

    def squared_mass(self) -> Tensor:
        return self.inside.squared_mass()

    def weighted_sum(self, weights: Weights) -> Tensor:
        return back(self.steps, self.inside.weighted_sum(weights))

    def per_example(self) -> Tensor:
        return torch.func.vmap(partial(back, self.steps))(self.inside.per_example())


@dataclass(frozen=True)
class Several(Contribution):
    """Several contributions to one tensor whose inner products are known."""

    parts: tuple[Contribution, ...]
    products: tuple[Tensor, ...]
    """<G_i, G'_i> of every pair that overlaps."""

    @property
    def terms(self) -> int:
        return sum(part.terms for part in self.parts)

    @property
    def convolves(self) -> bool:
        return any(part.convolves for part in self.parts)

    @property
    def rounded(self) -> float:
        return max(part.rounded for part in self.parts)

    @property
    def apart(self) -> bool:
        return all(part.apart for part in self.parts)

    @property
    def pairs(self) -> bool:
        return True  # inner products of parts are relative to their masses, whatever the norms of the parts are

    @property
    def separate(self) -> tuple[Contribution, ...]:
        return (self,) if self.products else tuple(piece for part in self.parts for piece in part.separate)

    def spread(self, shape: tuple[int, ...], more: int) -> Tensor:
        own = [
            part.spread(shape, more) if part.pairs else part.squared_norms() * (part.chain(shape) + more)
            for part in self.parts
        ]
        masses = [part.squared_mass().sqrt() for part in self.parts]
        between = [2 * one * other for one, other in combinations(masses, 2)]
        return add(own) + add(between) * (self.chain(shape) + more)

    def floor(self) -> Tensor | None:
        """Parts that overlap may cancel each other, whatever each of them does by itself: none is longer than 4 C."""
        floors = [floor for part in self.parts if (floor := part.floor()) is not None]
        return add(floors + [part.squared_norms() * _PARTS**-2 for part in self.parts])

    def additions(self, batch: int) -> float:
        each = [part.additions(batch) for part in self.parts]
        return _PARTS * sum(each) + 2.0 * batch * len(each) if self.products else max(each)

    def chain(self, shape: tuple[int, ...]) -> int:
        return sum(part.chain(shape) for part in self.parts) + 3 * self.terms

    def squared_norms(self) -> Tensor:
        total = add([part.squared_norms() for part in self.parts])
        return (total + 2 * add(self.products)).clamp(min=0) if self.products else total

    def squared_mass(self) -> Tensor:
        if not self.products:
            return add([part.squared_mass() for part in self.parts])
        return add([part.squared_mass().sqrt() for part in self.parts]).square()

    def weighted_sum(self, weights: Weights) -> Tensor:
        return add([part.weighted_sum(weights) for part in self.parts])

    def per_example(self) -> Tensor:
        return add([part.per_example() for part in self.parts])


def reshaped(graph: Graph, inlet: Inlet, contribution: Contribution) -> Contribution:
    """The contribution to the source of the inlet."""
    steps: list[tuple[Node, int]] = []
    for node, output in inlet.reshapes:
        if not moves(graph, node):
            continue
        if not steps and graph.names[node] in _MATRIX_TRANSPOSES and len(graph.shape(node, output)) == 2:
            turned = contribution.t()
            if turned is not None:
                contribution = turned
                continue
        steps.append((graph.nodes[node], output))
    return Reshaped(contribution, tuple(steps)) if steps else contribution


def together(parts: list[Contribution], disjoint: bool = False) -> Contribution:
    """One contribution for several to the same tensor: cross terms exact, dense only where nothing cheaper is known."""
    if len(parts) == 1:
        return parts[0]
    if disjoint:
        return Several(tuple(parts), ())
    calls = [part for part in parts if isinstance(part, Products)]
    rows = [part for part in parts if isinstance(part, Rows)]
    parts = [part for part in parts if not isinstance(part, (Products, Rows))]
    parts += [products.join(calls)] if calls else []
    parts += [embedding.join(rows)] if rows else []
    if len(parts) == 1:
        return parts[0]
    crossed = []
    for one, other in combinations(parts, 2):
        product = one.inner(other)
        if product is None:
            product = other.inner(one)
        if product is None:
            return Stored(add([part.per_example() for part in parts]))
        crossed.append(product)
    return Several(tuple(parts), tuple(crossed))


def pulled_back(graph: Graph, edge: Edge, contribution: Contribution, leaves: list[int]) -> dict[int, Tensor]:
    """[batch, *shape] for each leaf: the per-example gradients taken through the computation behind the edge."""
    variables = [graph.nodes[leaf].variable for leaf in leaves]  # type: ignore[attr-defined]
    per_example = contribution.per_example().to(graph.nodes[edge[0]]._input_metadata[edge[1]].dtype)

    def back_from(grads: Tensor, batched: bool) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(
            [graph.edge(*edge)], variables, [grads], is_grads_batched=batched, retain_graph=True, allow_unused=True
        )

    try:
        answers = back_from(per_example, True)
    except RuntimeError:  # a node that vmap does not know
        each = [back_from(one, False) for one in per_example]
        answers = tuple(None if rows[0] is None else torch.stack(rows) for rows in zip(*each, strict=True))
    return {leaf: wide(answer) for leaf, answer in zip(leaves, answers, strict=True) if answer is not None}


def leaves_below(graph: Graph, edge: Edge) -> list[int]:
    """The parameters that a node on the parameter side is computed from."""
    found: list[int] = []
    seen = {edge[0]}
    stack = [edge[0]]
    while stack:
        node = stack.pop()
        if node in graph.leaves:
            found.append(node)
        for below in graph.inputs[node]:
            if below is not None and below[0] not in seen:
                seen.add(below[0])
                stack.append(below[0])
    return found
