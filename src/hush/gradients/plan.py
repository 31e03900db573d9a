"""Splits a graph into parameters, data, and the sites where they meet; once for each new graph, then from a cache.

A node is on the *parameter side* if all its inputs are and its output gradient is not separated by example (so it is
the gradient of a weight, or of something made of weights alone). A *site* is a node that is not, but has such an input.
"""

import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from hush.gradients.analysis.plan import Inlet as Inlet
from hush.gradients.analysis.plan import moves as moves
from hush.gradients.by_values import (
    Guarded,
    Place,
    gated,
    guarded,
    item_at,
    joined_by_values,
    joins,
    movers,
    routed,
    silent,
    unchanged,
)
from hush.gradients.graph import COPY_SLICES, Edge, Graph, back
from hush.gradients.layers import generic
from hush.gradients.layers.table import RESHAPES, ROUTERS, RULES
from hush.gradients.opened import opened
from hush.gradients.probe import Finding, probe
from hush.gradients.sides import doubtful, has_data_below, inputs_first, made_of_parameters, parameter_side
from hush.gradients.sums.per_example import Layout, Rule
from hush.gradients.transfer import remember, transferred

GENERIC = Rule(generic.contributions)

_BATCH_NORMS = frozenset({"NativeBatchNormBackward0", "CudnnBatchNormBackward0", "MiopenBatchNormBackward0"})


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
    """All sites of a graph, and the values that must stay the same for the plan to hold."""

    sites: tuple[PlannedSite, ...]
    guards: tuple[Guarded, ...]
    """Indices along the examples' dimension."""
    doubtful: tuple[Place, ...]
    """Constants that parameters are joined with, as large as a batch: if they change, they are data."""
    lasting: bool
    """Whether the layouts are certain for every batch of the same graph; if not, the next batch is probed again."""
    disjoint: frozenset[Edge]
    """Leaves that several sites feed in pieces that do not overlap (chunks of a packed projection)."""

    @cached_property
    def alone(self) -> tuple[tuple[int, ...], ...]:
        """For each site the inputs that hang together with parameters as no other input does."""
        times = Counter(inlet.source for site in self.sites for inlet in site.inlets)
        return tuple(tuple(inlet.input for inlet in site.inlets if times[inlet.source] == 1) for site in self.sites)

    def holds(self, graph: Graph) -> bool:
        return all(unchanged(graph, guard) for guard in self.guards)


_CACHED = 256
_cache: OrderedDict[object, list[Plan]] = OrderedDict()
_constants: OrderedDict[object, tuple[Guarded, ...]] = OrderedDict()
"""For each model the constants that its parameters were joined with when they were first seen."""


def plan_for(graph: Graph, losses: Tensor, settle: Callable[[Plan], Plan]) -> Plan:
    """The plan for this graph: a cached one, one of other batch sizes, or one made by a few backward passes.

    `settle` tries a new plan and hands the sites that no rule covers to the generic one.
    """
    plans = _cache.setdefault(graph.key, [])
    _cache.move_to_end(graph.key)
    for plan in plans:
        if plan.holds(graph):
            _refuse_changed(graph, plan.doubtful)
            return plan
    known = transferred(graph)
    plan = settle(known if known is not None else _make(graph, losses))
    if known is None:
        remember(graph, plan)
    if plan.lasting:
        plans.insert(0, plan)
        del plans[4:]
    while len(_cache) > _CACHED:
        _cache.popitem(last=False)
    return plan


def _make(graph: Graph, losses: Tensor) -> Plan:
    used = _used_outputs(graph)
    side, seen = parameter_side(graph, losses, used)
    data_side = [node for node in range(len(graph.nodes)) if not side[node]]
    places = [node for node in data_side if _parameter_inputs(graph, node, side)]
    norms = [node for node, name in enumerate(graph.names) if name in _BATCH_NORMS and graph.saved(node, "training")]
    moving = [node for node in movers(graph, side) if node not in places]
    joints = [node for node in data_side if joins(graph, node, side)]
    routers = [node for node in data_side if graph.names[node] in ROUTERS]
    ends = [(place, output) for place in places for output in used[place]]
    wanted = {*ends} | {(node, output) for node in {*norms, *moving, *joints} for output in used[node]}
    wanted |= {edge for node in {*moving, *routers} for edge in graph.inputs[node] if edge is not None}
    missing = sorted(edge for edge in wanted if edge not in seen)
    with opened(graph, side):
        seen |= dict(zip(missing, probe(losses, [graph.edge(*edge) for edge in missing]), strict=True))
        unseen = silent(graph, losses, ends, side) if ends else []
    for node in norms:
        _refuse_batch_statistics(graph, node, seen[node, 0])
    sites = [_site(graph, node, used[node], seen, side) for node in places]
    guards = [guard for node in moving for guard in guarded(graph, node, seen)]
    uncertain = [graph.names[end[0]] for end in ends if not seen[end].certain]
    uncertain += [graph.names[node] for node in joints if joined_by_values(graph, node, seen[node, 0], side)]
    uncertain += [graph.names[node] for node in places if made_of_parameters(graph, node, side)]
    uncertain += [graph.names[node] for node in unseen]
    uncertain += [graph.names[node] for node in data_side if graph.names[node] == COPY_SLICES]
    uncertain += [graph.names[node] for node in routers if routed(graph, node, seen)]
    if not uncertain and gated(graph, losses, seen, ends, side):
        uncertain.append("products with masks")
    if uncertain:
        warnings.warn(
            f"where the examples lie at {', '.join(sorted(set(uncertain)))} depends on this batch (gradients that are "
            "zero, or examples with different numbers of rows); the result is exact, but the next batch is probed "
            "again, which costs a few backward passes",
            stacklevel=2,
        )
    found = _passed(graph, [site for site in sites if site is not None])
    constants = tuple([one for node in range(len(graph.nodes)) if side[node] for one in doubtful(graph, node)])
    _refuse_changed(graph, constants)
    return Plan(found, tuple(guards), constants, not uncertain, _disjoint(graph, found))


def _refuse_changed(graph: Graph, places: tuple[Place, ...]) -> None:
    """Refuse constants that are not what they were on an earlier batch of any size of the same model.

    While work is recorded or traced nothing can be compared; the same was compared right before.
    """
    if not places or _recording():
        return
    key = graph.family, tuple(graph.nodes[leaf].variable.data_ptr() for leaf in graph.leaves)  # type: ignore[attr-defined]
    kept = _constants.setdefault(key, tuple((*place, item_at(graph, place).detach().clone()) for place in places))
    while len(_constants) > _CACHED:
        _constants.popitem(last=False)
    for constant in kept:
        if not unchanged(graph, constant):
            raise ValueError(
                f"{graph.names[constant[0]]} joins parameters with an index or a matrix that was another one on an "
                "earlier batch, and several examples use the result: expected that it does not depend on the batch. If "
                "it comes from the examples they are mixed (negatives from the batch, rows picked for all of it): let "
                "each loss use its own example only, or look rows up with an embedding for each example"
            )


def _recording() -> bool:
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    return capturing or get_proxy_mode() is not None


def _passed(graph: Graph, sites: list[PlannedSite]) -> tuple[PlannedSite, ...]:
    """The sites, each told whether another one lies below it."""
    places = {site.node for site in sites}
    above: set[int] = set()
    for node in inputs_first(graph):
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


def _used_outputs(graph: Graph) -> list[list[int]]:
    used: list[set[int]] = [set() for _ in graph.nodes]
    used[0].add(0)
    for edges in graph.inputs:
        for edge in edges:
            if edge is not None:
                used[edge[0]].add(edge[1])
    return [sorted(outputs) for outputs in used]


def _parameter_inputs(graph: Graph, node: int, side: list[bool]) -> list[int]:
    return [index for index, edge in enumerate(graph.inputs[node]) if edge is not None and side[edge[0]]]


def _site(
    graph: Graph, node: int, outputs: list[int], seen: dict[Edge, Finding], side: list[bool]
) -> PlannedSite | None:
    """The plan for one node, None if its gradient is zero on this batch."""
    findings = {output: seen[node, output] for output in outputs}
    if all(finding.blank for finding in findings.values()):
        return None
    for finding in findings.values():
        joined = made_of_parameters(graph, node, side) and has_data_below(graph, node)
        if joined or (finding.layout is None and not finding.blank):
            raise ValueError(_mixed(graph.names[node]))
    layouts = [findings[output].layout if output in findings else None for output in range(max(outputs) + 1)]
    inlets = [_inlet(graph, node, index) for index in _parameter_inputs(graph, node, side)]
    return PlannedSite(node, RULES.get(graph.names[node], GENERIC), tuple(layouts), tuple(inlets))


def _mixed(name: str) -> str:
    return (
        f"at the node {name} the gradients of the losses cannot be told apart by example: expected that each loss "
        "depends on its own example only, but examples are mixed after this point (batch statistics, a loss that "
        "compares examples, a mean over the batch). Remove the mixing"
    )


def _inlet(graph: Graph, node: int, index: int) -> Inlet:
    edge = graph.inputs[node][index]
    reshapes: list[Edge] = []
    while edge is not None and graph.names[edge[0]] in RESHAPES:
        reshapes.append(edge)
        edge = graph.inputs[edge[0]][0]
    assert edge is not None
    return Inlet(index, tuple(reshapes), edge)


def _refuse_batch_statistics(graph: Graph, node: int, finding: Finding) -> None:
    """Statistics over a batch mix its examples. InstanceNorm uses the same node, its examples among the channels."""
    keeps_statistics = graph.saved(node, "running_mean") is not None
    mixes = graph.batch > 1 and finding.layout is not None and finding.layout.dim != 1
    if keeps_statistics or mixes:
        raise ValueError(
            "a BatchNorm in training mode (or an InstanceNorm with running statistics) normalises each example by the "
            "others and keeps statistics of the raw data: use GroupNorm (hush.replace_batchnorm(model)), or put it "
            "into eval mode"
        )


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)
