"""One backward pass to the sites of a plan: what the examples add to each parameter, not clipped or summed yet."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hush.errors import NotSupported
from hush.gradients.analysis.owners import looked_up
from hush.gradients.analysis.plan import SLOW, Plan, PlannedSite, make
from hush.gradients.graph import Edge, Graph
from hush.gradients.layers.slow import isolated
from hush.gradients.sums.per_example import Contribution, Site, Stored
from hush.gradients.sums.shared import leaves_below, pulled_back, reshaped, together

Answers = dict[int, Contribution]


log = logging.getLogger("hush")
_FAILS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, NotImplementedError)


class Declined(Exception):
    """A rule that answered for the slices does not answer for this batch."""


def contributions(
    graph: Graph, plan: Plan, losses: Tensor, side: Sequence[bool], retain: bool = False
) -> dict[str, Contribution]:
    """For each parameter that the losses reach what the examples add to it. `side` says which nodes are constant.

    Unless `retain`, the graph is used up as by a plain backward pass.
    """
    plan, given = _complete(graph, plan, losses, list(side))
    found = {name: _one_by_one(graph, losses, name) for name in sorted(plan.slow) if name in graph.leaves.values()}
    retain = retain or any(site.rule is SLOW for site in plan.sites)
    answers = _pass(graph, plan, losses, retain, given)
    if any(answer is None for answer in answers):
        raise Declined
    for leaf, part in _home(graph, plan, answers).items():
        found.setdefault(graph.leaves[leaf], part)
    return found


def settled(graph: Graph, plan: Plan, losses: Tensor, side: Sequence[bool]) -> Plan:
    """The plan with a rule at each site that answers for these shapes; the graph stays."""
    ready, given = _complete(graph, plan, losses, list(side))
    answers = _pass(graph, ready, losses, True, given)
    declined = {
        site.node: site.rule is SLOW for site, answer in zip(ready.sites, answers, strict=True) if answer is None
    }
    by_hand = frozenset(
        graph.leaves[leaf]
        for site in ready.sites
        if declined.get(site.node)
        for inlet in site.inlets
        for leaf in leaves_below(graph, inlet.source)
    )
    sites = tuple(replace(site, rule=SLOW) if site.node in declined else site for site in plan.sites)
    plan = replace(plan, sites=sites)
    if by_hand:
        return settled(graph, _without(graph, plan, by_hand, list(side)), losses, side)
    return settled(graph, plan, losses, side) if any(not slow for slow in declined.values()) else plan


def _without(graph: Graph, plan: Plan, names: frozenset[str], side: list[bool]) -> Plan:
    """The plan without sites whose parameters are all taken one example after another."""
    layouts = {(site.node, output): one for site in plan.sites for output, one in enumerate(site.layouts)}
    rules = {site.node: site.rule for site in plan.sites}
    fresh = make(graph, side, layouts, plan.slow | names)
    sites = tuple(replace(site, rule=rules.get(site.node, site.rule)) for site in fresh.sites)
    return replace(fresh, sites=sites, unknown=fresh.unknown & plan.unknown)


def _complete(graph: Graph, plan: Plan, losses: Tensor, side: list[bool]) -> tuple[Plan, dict[Edge, Tensor | None]]:
    """The plan with the rows of this batch where the plan does not know them; parameters below mixed rows go slow.

    And the gradients that were computed on the way.
    """
    if not plan.unknown:
        return plan, {}
    edges = sorted(plan.unknown)
    narrow = any(output[1] == torch.float16 for traits in graph.traits for output in traits[0])
    layouts, grads = looked_up(losses, [graph.edge(*edge) for edge in edges], narrow)
    found = dict(zip(edges, layouts, strict=True))
    given = {} if grads is None else dict(zip(edges, grads, strict=True))
    lost = {edge[0] for edge, layout in found.items() if layout is None}
    plan = plan.with_layouts(found)
    if not lost:
        return plan, given
    names = frozenset(
        graph.leaves[leaf]
        for site in plan.sites
        if site.node in lost
        for inlet in site.inlets
        for leaf in leaves_below(graph, inlet.source)
    )
    return _without(graph, plan, names, side), given


def _one_by_one(graph: Graph, losses: Tensor, name: str) -> Contribution:
    """A parameter's gradients, one backward pass for each example."""
    leaf = next(node for node, found in graph.leaves.items() if found == name)
    variable = graph.nodes[leaf].variable  # type: ignore[attr-defined]
    rows = []
    for example in range(len(losses)):
        weights = torch.zeros_like(losses)
        weights[example] = 1
        (grad,) = torch.autograd.grad(losses, variable, weights, retain_graph=True, allow_unused=True)
        grad = torch.zeros_like(variable) if grad is None else grad
        rows.append(grad.to_dense() if grad.is_sparse else grad)
    return isolated(rows)


def _pass(
    graph: Graph, plan: Plan, losses: Tensor, retain: bool, given: Mapping[Edge, Tensor | None]
) -> list[Answers | None]:
    """Reads what the rules need, runs the one backward pass, and asks each rule as soon as its gradient is there.

    A rule that stores small products lets go of activations and gradients while the pass is still on its way down. What
    goes the slow way waits until the pass is over. A rule that fails has declined. Gradients that are `given` are not
    computed again.
    """
    saved = [{name: graph.saved(site.node, name) for name in site.rule.saved} for site in plan.sites]
    found: list[Answers | None] = [None] * len(plan.sites)
    waiting: list[tuple[int, Site]] = []
    reached: set[int] = set()

    def answer(place: int, site: Site) -> None:
        try:
            found[place] = plan.sites[place].rule.contributions(site)
        except NotSupported:
            raise
        except _FAILS as problem:
            log.info("the rule for %s fails: %s", site.name, type(problem).__name__)

    def ask(place: int, grads: Sequence[Tensor | None]) -> None:
        planned = plan.sites[place]
        reached.add(place)
        site = _site(graph, planned, saved[place], grads)
        saved[place] = {}
        if not any(grad is not None for grad in site.grads):
            reached.discard(place)
        elif planned.rule is SLOW:
            waiting.append((place, site))
        else:
            answer(place, site)
            if (answers := found[place]) is not None:
                for at in plan.alone[place]:
                    answers[at] = answers[at].formed()

    ends: list[Edge] = []
    hooks, ready = [], []
    for place, planned in enumerate(plan.sites):
        here = [(planned.node, output) for output, layout in enumerate(planned.layouts) if layout is not None]
        if given and all(edge in given for edge in here):
            ready.append(place)
        elif planned.passed and not given:
            hooks.append(graph.nodes[planned.node].register_prehook(partial(ask, place)))
        else:
            ends += [(place, output) for _, output in here]
    edges = [graph.edge(plan.sites[place].node, output) for place, output in ends]
    if hooks and not edges:
        raise AssertionError("the last site on the way down has no site below it")
    grads: Sequence[Tensor | None] = ()
    if edges:
        try:
            with torch.autograd.set_multithreading_enabled(False):  # the rules run in this thread, with its settings
                grads = torch.autograd.grad(
                    losses, edges, torch.ones_like(losses), retain_graph=retain, allow_unused=True
                )
        finally:
            for hook in hooks:
                hook.remove()
    gradients = dict(zip(ends, grads, strict=True))
    del grads
    for place in dict.fromkeys(place for place, _ in ends):
        ask(place, [gradients.pop((place, output), None) for output in range(len(plan.sites[place].layouts))])
    for place in ready:
        node = plan.sites[place].node
        ask(place, [given.get((node, output)) for output in range(len(plan.sites[place].layouts))])
    for place, site in waiting:
        answer(place, site)
    for place in set(range(len(plan.sites))) - reached:
        found[place] = {}  # no loss of this batch comes here
    return found


def _site(graph: Graph, planned: PlannedSite, saved: Mapping[str, Any], grads: Sequence[Tensor | None]) -> Site:
    wanted = tuple(inlet.input for inlet in planned.inlets)
    kept = [grad if layout is not None else None for grad, layout in zip(grads, planned.layouts, strict=False)]
    return Site(
        name=graph.names[planned.node],
        saved=saved,
        grads=tuple(grad.to_dense() if grad is not None and grad.is_sparse else grad for grad in kept),
        layouts=planned.layouts,
        wanted=wanted,
        shapes=tuple(
            graph.shape(*edge) if edge is not None and index in wanted else None
            for index, edge in enumerate(graph.inputs[planned.node])
        ),
        node=graph.nodes[planned.node],
    )


def _home(graph: Graph, plan: Plan, found: Sequence[Mapping[int, Contribution] | None]) -> dict[int, Contribution]:
    """Leaf -> its contribution, all sites that feed it taken together."""
    by_source: dict[Edge, list[Contribution]] = {}
    for planned, answers in zip(plan.sites, found, strict=True):
        for inlet in planned.inlets if answers else ():
            assert answers is not None
            by_source.setdefault(inlet.source, []).append(reshaped(graph, inlet, answers[inlet.input]))
    computed = [source for source in by_source if source[0] not in graph.leaves]
    pieces = plan.disjoint - {(leaf, 0) for source in computed for leaf in leaves_below(graph, source)}
    for source in computed:
        part = together(by_source.pop(source))
        for leaf, values in pulled_back(graph, source, part, leaves_below(graph, source)).items():
            by_source.setdefault((leaf, 0), []).append(Stored(values))
    return {source[0]: together(parts, source in pieces) for source, parts in by_source.items()}
