"""What is kept of an analysis: which nodes are made of parameters alone, where they meet data, where the rows lie.

A node is *constant* if all its inputs are and its outputs keep their size when the batch grows. A *site* is a node
with data in it that has a constant input. Numbers of a graph follow from the sizes of its inputs, as lessons on
batches of a few sizes showed; a graph whose numbers do not is looked at again.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch

from hush.gradients.analysis.movers import Mover
from hush.gradients.graph import Edge, Graph, back
from hush.gradients.layers import slow
from hush.gradients.layers.table import RESHAPES, RULES
from hush.gradients.sums.per_example import Layout, Rule

SLOW = Rule(slow.contributions)
_NO_MOVES = ("ToCopyBackward0", "CloneBackward0", "AliasBackward0")


@dataclass(frozen=True)
class Inlet:
    """How one input of a site hangs together with parameters."""

    input: int
    reshapes: tuple[Edge, ...]
    """Nodes (and outputs) that only move entries, from the site downwards."""
    source: Edge
    """Where these end: a leaf, or a node that computes with parameters."""


@dataclass(frozen=True)
class PlannedSite:
    """A node where parameters meet data, the rule that reads it, and where the examples lie in its outputs."""

    node: int
    rule: Rule
    layouts: tuple[Layout | None, ...]
    inlets: tuple[Inlet, ...]
    passed: bool = False
    """Whether the backward pass goes on below this site, to another one."""


@dataclass(frozen=True)
class Plan:
    """The sites of one graph, with layouts for its batch."""

    sites: tuple[PlannedSite, ...]
    disjoint: frozenset[Edge]
    """Leaves that several sites feed in pieces that do not overlap (chunks of a packed projection)."""
    slow: frozenset[str] = frozenset()
    """Parameters whose gradients are taken one example after another."""
    unknown: frozenset[Edge] = frozenset()
    """Outputs of sites whose rows are looked up in each batch."""

    @cached_property
    def alone(self) -> tuple[tuple[int, ...], ...]:
        """For each site the inputs that hang together with parameters as no other input does."""
        times = Counter(inlet.source for site in self.sites for inlet in site.inlets)
        return tuple(tuple(inlet.input for inlet in site.inlets if times[inlet.source] == 1) for site in self.sites)

    def with_layouts(self, found: Mapping[Edge, Layout | None]) -> "Plan":
        """The same plan with layouts that were looked up."""
        sites = tuple(
            replace(site, layouts=tuple(found.get((site.node, o), one) for o, one in enumerate(site.layouts)))
            for site in self.sites
        )
        return replace(self, sites=sites, unknown=frozenset())


def make(
    graph: Graph,
    side: list[bool],
    layouts: Mapping[Edge, Layout | None],
    slow: frozenset[str],
    declined: Collection[int] = (),
) -> Plan:
    """The plan for a graph whose constant side is known; outputs without a layout are looked up.

    `slow` are parameters that go one by one, `declined` nodes whose rule does not answer.
    """
    used, names = graph.used(), _leaves_of_all(graph)
    sites, unknown = [], set()
    for node, inputs in enumerate(graph.inputs):
        if side[node]:
            continue
        at = [place for place, edge in enumerate(inputs) if edge is not None and side[edge[0]]]
        inlets = [_inlet(graph, node, place) for place in at]
        inlets = [inlet for inlet in inlets if not names[inlet.source[0]] <= slow]
        if not inlets:
            continue
        found = tuple(layouts.get((node, output)) for output in range(max(used[node], default=0) + 1))
        unknown |= {(node, output) for output in used[node] if found[output] is None}
        rule = SLOW if node in declined else _rule(graph, node)
        sites.append(PlannedSite(node, rule, found, tuple(inlets)))
    planned = _passed(graph, sites)
    return Plan(planned, _disjoint(graph, planned), slow, frozenset(unknown))


def _rule(graph: Graph, node: int) -> Rule:
    """The rule by the node's name; complex numbers go the slow way, whose pieces autograd itself computes."""
    if any(output[1].is_complex for output in graph.traits[node][0]):
        return SLOW
    return RULES.get(graph.names[node], SLOW)


def _leaves_of_all(graph: Graph) -> list[frozenset[str]]:
    """For each node the parameters below it."""
    found: list[frozenset[str]] = [frozenset()] * len(graph.nodes)
    for node in graph.inputs_first():
        below = frozenset().union(*[found[edge[0]] for edge in graph.inputs[node] if edge is not None])
        found[node] = frozenset((graph.leaves[node],)) if node in graph.leaves else below
    return found


def _inlet(graph: Graph, node: int, place: int) -> Inlet:
    edge = graph.inputs[node][place]
    reshapes: list[Edge] = []
    while edge is not None and graph.names[edge[0]] in RESHAPES:
        reshapes.append(edge)
        edge = graph.inputs[edge[0]][0]
    assert edge is not None
    return Inlet(place, tuple(reshapes), edge)


def _passed(graph: Graph, sites: list[PlannedSite]) -> tuple[PlannedSite, ...]:
    """The sites, each told whether another one lies below it."""
    places = {site.node for site in sites}
    above: set[int] = set()
    for node in graph.inputs_first():
        if any(edge is not None and (edge[0] in places or edge[0] in above) for edge in graph.inputs[node]):
            above.add(node)
    return tuple(replace(site, passed=site.node in above) for site in sites)


def _disjoint(graph: Graph, sites: tuple[PlannedSite, ...]) -> frozenset[Edge]:
    pieces: dict[Edge, list[Inlet]] = {}
    for inlet in (inlet for site in sites for inlet in site.inlets if inlet.source[0] in graph.leaves):
        pieces.setdefault(inlet.source, []).append(inlet)
    found = set()
    for source, inlets in pieces.items():
        if len(inlets) > 1 and all(inlet.reshapes for inlet in inlets):
            device = graph.nodes[source[0]].variable.device  # type: ignore[attr-defined]
            covered = torch.zeros(graph.shape(*source), dtype=torch.float32, device=device)
            for inlet in inlets:
                ones = torch.ones(graph.shape(*inlet.reshapes[0]), dtype=torch.float32, device=device)
                steps = [(graph.nodes[node], output) for node, output in inlet.reshapes if moves(graph, node)]
                covered += back(steps, ones)
            if int(covered.max()) <= 1:
                found.add(source)
    return frozenset(found)


def moves(graph: Graph, node: int) -> bool:
    """Whether a reshape changes more than the dtype or the memory; one that does not is passed over."""
    return graph.names[node] not in _NO_MOVES


# What is learnt of graphs of one kind ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lesson:
    """The numbers of the graphs of two and of three examples of one size, and the layouts there."""

    sizes: tuple[int, ...]
    two: np.ndarray
    three: np.ndarray
    layouts: dict[Edge, tuple[int, int, int] | None]
    """Dimension, outer, inner."""

    def at(self, batch: int) -> np.ndarray:
        return self.three + (batch - 3) * (self.three - self.two)


@dataclass
class Known:
    """All that was learnt of graphs of one kind."""

    side: list[bool]
    movers: tuple[Mover, ...]
    behind: dict[int, frozenset[int]]
    """For each site the movers that gradients pass before they reach it."""
    slow: frozenset[str]
    lessons: list[Lesson] = field(default_factory=list)
    declined: frozenset[int] = frozenset()
    """Sites whose rule does not answer."""
    by_values: bool = False
    """Whether batches of equal sizes were met whose numbers differ: values decide them, and no lesson will."""

    @property
    def movers_at(self) -> list[int]:
        return [one.node for one in self.movers]

    def layouts(self, graph: Graph, sizes: tuple[int, ...]) -> dict[Edge, Layout | None] | None:
        """Where the examples lie in a graph of these sizes; None if its numbers do not follow from the lessons."""
        numbers = np.asarray(graph.numbers(), dtype=np.float64)
        for shares in self._shares(sizes):
            parts = [(share, lesson) for share, lesson in zip(shares, self.lessons, strict=True) if share]
            if any(len(lesson.three) != len(numbers) for _, lesson in parts):
                continue
            expected = sum(share * lesson.at(graph.batch) for share, lesson in parts)
            if np.abs(expected - numbers).max(initial=0) < 1e-3:
                found = {edge: self._layout(graph, edge, parts) for edge in self.lessons[0].layouts}
                return found
        return None

    def _shares(self, sizes: tuple[int, ...]) -> list[list[float]]:
        """Ways to write these sizes as a sum of the lessons' sizes with shares that add up to one."""
        count = len(self.lessons)
        ways = [[float(k == one) for k in range(count)] for one in range(count) if self.lessons[one].sizes == sizes]
        fitting = [lesson for lesson in self.lessons if len(lesson.sizes) == len(sizes)]
        if ways or len(fitting) < count or count < 2:
            return ways
        points = np.asarray([(*lesson.sizes, 1) for lesson in self.lessons], dtype=np.float64).T
        wanted = np.asarray((*sizes, 1), dtype=np.float64)
        pairs = [[one, other] for one in range(count) for other in range(one)]
        for chosen in [*pairs, list(range(count))]:
            shares = np.linalg.lstsq(points[:, chosen], wanted, rcond=None)[0]
            if np.abs(points[:, chosen] @ shares - wanted).max() < 1e-6:
                full = [0.0] * count
                for place, share in zip(chosen, shares, strict=True):
                    full[place] = float(share)
                ways.append(full)
        return ways

    def _layout(self, graph: Graph, edge: Edge, parts: list[tuple[float, Lesson]]) -> Layout | None:
        known = [(share, lesson.layouts.get(edge)) for share, lesson in parts]
        if any(one is None for _, one in known):
            return None
        dims = {one[0] for _, one in known if one is not None}
        outer, inner = (round(sum(s * one[k] for s, one in known if one is not None)) for k in (1, 2))
        shape = graph.shape(*edge)
        if len(dims) > 1 or not (dim := min(dims)) < len(shape) or shape[dim] != outer * graph.batch * inner:
            return None
        return Layout(dim, outer, graph.batch, inner)


@dataclass
class Settled:
    """The plan for graphs that are equal in every number, and its variants for movers that are out of place."""

    side: list[bool]
    plan: Plan
    movers: tuple[Mover, ...] = ()
    behind: dict[int, frozenset[int]] = field(default_factory=dict)

    def now(self, graph: Graph) -> Plan:
        """The plan for this batch: sites behind nodes that moved rows are looked up."""
        moved = {one.node for one in self.movers if not one.in_place(graph)}
        if not moved:
            return self.plan
        edges = {
            (site.node, output)
            for site in self.plan.sites
            if self.behind.get(site.node, frozenset()) & moved
            for output, layout in enumerate(site.layouts)
            if layout is not None
        }
        return replace(self.plan, unknown=self.plan.unknown | edges)


@dataclass(frozen=True)
class ParameterRow:
    """How the gradient of one parameter is found."""

    name: str
    shape: tuple[int, ...]
    how: str
    """"norm rule", "materialised" or "one by one"."""
    why: str = ""
