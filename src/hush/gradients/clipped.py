"""losses -> BoundedSum: the clipped sum of per-example gradients from one backward pass without parameter gradients."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hush.clipping.bounded_sum import BoundedSum
from hush.clipping.clips import Clip
from hush.gradients.graph import Edge, Graph, read
from hush.gradients.plan import GENERIC, Plan, PlannedSite, plan_for
from hush.gradients.sums.clipped import quiet, summed
from hush.gradients.sums.per_example import Contribution, Site, Stored
from hush.gradients.sums.shared import leaves_below, pulled_back, reshaped, together


def clipped_sum(
    losses: Tensor,
    params: Mapping[str, Tensor],
    clip: Clip,
    *,
    mask: Tensor | None = None,
    rows: int | None = None,
    allow_unused: bool = False,
) -> BoundedSum:
    """The sum over examples of their clipped gradients, with the bound on what one example can move it by.

    Guarantee: each example adds at most the clip's bound to each group, in L2 norm and after rounding; an example with
    a non-finite gradient adds exactly zero and touches no other. The bound of the result is that of `clip.sum_bounds`,
    whatever the batch; a batch that rounds more is summed in pieces, as if it had `rows` examples if those are more.

    `losses` holds one loss per example. `mask` is 0 (False) for padding rows, which then add exactly zero; all other
    values count as True. Every trainable
    parameter that the losses depend on must be in `params`; one in `params` that they do not depend on is refused
    unless `allow_unused`. As after a plain backward pass, the graph behind the losses is used up.

    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> losses = model(torch.tensor([[30.0, 40.0], [0.3, 0.4]]))[:, 0]
    >>> from hush.clipping.clips import FlatClip
    >>> clipped_sum(losses, dict(model.named_parameters()), FlatClip(1.0)).tensors["weight"].round(decimals=3)
    tensor([[0.9000, 1.2000]])
    """
    with quiet(losses.device):
        batch = losses.shape[0] if losses.dim() == 1 else 0
        found = _contributions(losses, params, allow_unused)
        return summed(found, params, clip, batch=batch, rows=rows, mask=mask)


def squared_norms(losses: Tensor, params: Mapping[str, Tensor], *, allow_unused: bool = False) -> dict[str, Tensor]:
    """For each parameter the squared norms of the examples' gradients, [batch] each; private, for checks only.

    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> losses = model(torch.tensor([[3.0, 4.0], [0.0, 1.0]]))[:, 0]
    >>> squared_norms(losses, dict(model.named_parameters()))
    {'weight': tensor([25.,  1.])}
    """
    with quiet(losses.device):
        found = _contributions(losses, params, allow_unused)
        none = torch.zeros(losses.shape[0], device=losses.device)
        return {name: found[name].squared_norms() if name in found else none for name in params}


def _check(losses: Tensor, params: Mapping[str, Tensor]) -> None:
    if losses.dim() != 1:
        remedy = 'compute it with reduction="none"' if losses.dim() == 0 else "sum it to one number per example"
        raise ValueError(
            f"expected a vector of losses, one for each example, got a tensor of shape {tuple(losses.shape)}: "
            f"{remedy}; "
            "a loss that is a mean or a sum over the batch hides which example is responsible for which part"
        )
    frozen = [name for name, param in params.items() if not param.requires_grad]
    if frozen:
        raise ValueError(
            f"expected parameters that require a gradient, but these do not: {', '.join(frozen)}. Leave frozen "
            "parameters out, or call requires_grad_(True) before the forward pass"
        )


def _contributions(losses: Tensor, params: Mapping[str, Tensor], allow_unused: bool) -> dict[str, Contribution]:
    """For each parameter that is reached, what the examples add to it."""
    _check(losses, params)
    if losses.shape[0] == 0:
        return {}
    graph = read(losses, params)
    unreached = [name for name in params if name not in graph.leaves.values()]
    if unreached and not allow_unused:
        raise ValueError(
            f"the losses do not depend on these parameters: {', '.join(unreached)}. Freeze them with "
            "requires_grad_(False) and leave them out, or say allow_unused=True if only some forward passes use them"
        )
    plan = plan_for(graph, losses, lambda plan: _settle(graph, plan, losses))
    found = _sites(graph, plan, losses, retain=any(site.rule is GENERIC for site in plan.sites))
    answers = [answer if answer is not None else {} for answer in found]
    return {graph.leaves[leaf]: part for leaf, part in _home(graph, plan, answers).items()}


_UNSEEN = (
    ". A function of one's own, or a compiled part, has parameters inside: whether it mixes examples cannot be seen "
    "from the losses. Check it once with hush.check(model, losses_of, *batch), or hand the forward pass over as it is "
    "(private.capture, with compile=True where that pays)"
)


def _settle(graph: Graph, plan: Plan, losses: Tensor) -> Plan:
    """Tries the rules once; a site that its rule declines goes to the generic rule from then on, with a warning."""
    answers = _sites(graph, plan, losses, retain=True)
    sites = tuple(
        site if answer is not None else replace(site, rule=GENERIC)
        for site, answer in zip(plan.sites, answers, strict=True)
    )
    slow = sorted({graph.names[site.node] for site in sites if site.rule is GENERIC})
    unseen = any(graph.is_python(site.node) for site in sites)
    if slow:
        warnings.warn(
            f"no rule for parameters that meet data at {', '.join(slow)}: these nodes are taken backwards once for "
            "each example, which is exact but slow" + unseen * _UNSEEN,
            stacklevel=2,
        )
    return replace(plan, sites=sites)


def _sites(graph: Graph, plan: Plan, losses: Tensor, retain: bool) -> list[dict[int, Contribution] | None]:
    """Reads what the rules need, runs the one backward pass, and asks each rule as soon as its gradient is there.

    A rule that stores small products lets go of activations and gradients while the pass is still on its way down.
    """
    saved = [{name: graph.saved(site.node, name) for name in site.rule.saved} for site in plan.sites]
    found: list[dict[int, Contribution] | None] = [None] * len(plan.sites)

    def ask(place: int, grads: Sequence[Tensor | None]) -> None:
        site = _site(graph, plan.sites[place], saved[place], grads)
        saved[place] = {}
        found[place] = answer = plan.sites[place].rule.contributions(site)
        if answer is not None:
            for at in plan.alone[place]:
                answer[at] = answer[at].formed()

    ends: list[tuple[int, int]] = []
    hooks = []
    for place, site in enumerate(plan.sites):
        if site.passed:
            hooks.append(graph.nodes[site.node].register_prehook(partial(ask, place)))
        else:
            ends += [(place, output) for output in _outputs(site.layouts)]
    edges = [graph.edge(plan.sites[place].node, output) for place, output in ends]
    if not edges:
        return found  # no loss of this batch moves any parameter
    try:
        # The generic rule runs a node's backward again.
        with torch.autograd.set_multithreading_enabled(False):  # the rules run in this thread, with its settings
            answers = torch.autograd.grad(
                losses, edges, torch.ones_like(losses), retain_graph=retain, allow_unused=True
            )
    finally:
        for hook in hooks:
            hook.remove()
    gradients = dict(zip(ends, answers, strict=True))
    del answers
    for place in dict.fromkeys(place for place, _ in ends):
        ask(place, [gradients.pop((place, output), None) for output in range(len(plan.sites[place].layouts))])
    return found


def _site(graph: Graph, planned: PlannedSite, saved: Mapping[str, Any], grads: Sequence[Tensor | None]) -> Site:
    wanted = tuple(inlet.input for inlet in planned.inlets)
    return Site(
        name=graph.names[planned.node],
        saved=saved,
        grads=tuple(grad if layout is not None else None for grad, layout in zip(grads, planned.layouts, strict=False)),
        layouts=planned.layouts,
        wanted=wanted,
        shapes=tuple(
            graph.shape(*edge) if edge is not None and index in wanted else None
            for index, edge in enumerate(graph.inputs[planned.node])
        ),
        node=graph.nodes[planned.node],
    )


def _outputs(layouts: tuple[object, ...]) -> list[int]:
    return [output for output, layout in enumerate(layouts) if layout is not None]


def _home(graph: Graph, plan: Plan, found: list[dict[int, Contribution]]) -> dict[int, Contribution]:
    """Leaf -> its contribution, all sites that feed it taken together."""
    by_source: dict[Edge, list[Contribution]] = {}
    for planned, contributions in zip(plan.sites, found, strict=True):
        for inlet in planned.inlets:
            part = reshaped(graph, inlet, contributions[inlet.input])
            by_source.setdefault(inlet.source, []).append(part)
    computed = [source for source in by_source if source[0] not in graph.leaves]
    pieces = plan.disjoint - {(leaf, 0) for source in computed for leaf in leaves_below(graph, source)}
    for source in computed:
        part = together(by_source.pop(source))
        for leaf, values in pulled_back(graph, source, part, leaves_below(graph, source)).items():
            by_source.setdefault((leaf, 0), []).append(Stored(values))
    return {source[0]: together(parts, source in pieces) for source, parts in by_source.items()}
