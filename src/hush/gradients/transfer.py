"""A plan for one batch size read as a plan for another: Poisson lots come in many sizes, and a probe costs steps.

Two graphs are of one family if their nodes, edges and leaves are the same. Every number in them (shapes, sizes of
splits) is then taken as a function of the batch size B: constant, or a multiple of B. Two sizes that were probed and
gave the same layouts settle which; a third size is accepted if all its numbers follow from both, and only then.
"""

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hush.gradients.graph import Graph

if TYPE_CHECKING:
    from hush.gradients.plan import Plan

_FAMILIES, _MEMBERS = 64, 4


@dataclass(frozen=True)
class _Member:
    batch: int
    traits: tuple[object, ...]
    plan: "Plan"


_families: OrderedDict[object, list[_Member]] = OrderedDict()


def remember(graph: Graph, plan: "Plan") -> None:
    """Keep a plan that was made by probing as evidence for other batch sizes."""
    if graph.batch < 2 or not plan.lasting or plan.guards or plan.doubtful:
        return
    members = _families.setdefault(graph.family, [])
    _families.move_to_end(graph.family)
    if all(member.batch != graph.batch for member in members):
        members.append(_Member(graph.batch, graph.traits, plan))
        del members[:-_MEMBERS]
    while len(_families) > _FAMILIES:
        _families.popitem(last=False)


def transferred(graph: Graph) -> "Plan | None":
    """The plan of two other batch sizes, if this graph is what theirs become at its own batch size."""
    if graph.batch < 2:
        return None
    fitting = [
        _resized(member.plan, graph.batch)
        for member in _families.get(graph.family, [])
        if follows(member.traits, graph.traits, member.batch, graph.batch) and _in_place(member.plan, graph)
    ]
    for index, plan in enumerate(fitting):
        if any(plan == other for other in fitting[index + 1 :]):
            return plan
    return None


def follows(one: object, other: object, batch: int, other_batch: int) -> bool:
    """Whether every whole number is the same, or the same multiple of the batch size; all else must be equal."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(
            follows(a, b, batch, other_batch) for a, b in zip(one, other, strict=True)
        )
    if type(one) is int and type(other) is int and one != other:
        return one % batch == 0 and other % other_batch == 0 and one // batch == other // other_batch
    return one == other


def _in_place(plan: "Plan", graph: Graph) -> bool:
    """Whether each output has the size that its layout gives it at this batch size."""
    return all(
        layout is None
        or graph.shape(site.node, output)[layout.dim : layout.dim + 1] == (layout.outer * graph.batch * layout.inner,)
        for site in plan.sites
        for output, layout in enumerate(site.layouts)
    )


def _resized(plan: "Plan", batch: int) -> "Plan":
    sites = tuple(
        replace(site, layouts=tuple(layout and replace(layout, batch=batch) for layout in site.layouts))
        for site in plan.sites
    )
    return replace(plan, sites=sites)
