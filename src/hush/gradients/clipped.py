"""losses -> BoundedSum: the clipped sum of per-example gradients from one backward pass without parameter gradients."""

import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from hush.clipping.bounded_sum import BoundedSum, Group
from hush.clipping.clips import Clip
from hush.clipping.rounding import pieces_needed
from hush.gradients.graph import Edge, Graph, read
from hush.gradients.plan import GENERIC, Plan, PlannedSite, plan_for
from hush.gradients.sums.norms import upper_squared_norms
from hush.gradients.sums.per_example import Contribution, Site, Stored, Weights
from hush.gradients.sums.shared import leaves_below, pulled_back, reshaped, together
from hush.gradients.sums.small import Bundle, bundled


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
    if mask is not None and mask.dtype != torch.bool:
        mask = mask != 0  # a mask tells who counts, never how much: a factor above 1 would break the bound
    with _quiet(losses):
        batch = losses.shape[0] if losses.dim() == 1 else 0
        found = _contributions(losses, params, allow_unused)
        tensors: dict[str, Tensor] = {}
        count: BoundedSum | None = None
        for group in clip.groups(params):
            here = {name: found[name] for name in group.names if name in found}
            bundles = bundled(here, {name: tuple(params[name].shape) for name in here})
            parts = [(bundle.contribution, bundle.shape) for bundle in bundles]
            if parts:
                squared = upper_squared_norms(parts)
                weights = _weights(clip.factors(squared, group.bound), squared, mask)
                exact = all(params[name].dtype == torch.float64 for name in here)
                kind = torch.float64 if exact else torch.float32
                additions = partial(_additions, parts)
                pieces = pieces_needed(additions, max(rows or 0, batch), kind)
                for bundle in bundles:
                    tensors |= _sums(bundle, weights, pieces)
                below = clip.below(squared, group.bound)
                if below is not None:
                    count = _count(below if mask is None else below * mask)
        ordered = {name: tensors[name] if name in tensors else _zeros(params[name]) for name in params}
        if count is None:  # a count is released for every lot, also where no example reached a parameter
            below = clip.below(torch.zeros(0, device=losses.device), 1.0)
            count = None if below is None else _count(below)
        return BoundedSum(ordered, clip.sum_bounds(params), count)


def squared_norms(losses: Tensor, params: Mapping[str, Tensor], *, allow_unused: bool = False) -> dict[str, Tensor]:
    """For each parameter the squared norms of the examples' gradients, [batch] each; private, for checks only.

    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> losses = model(torch.tensor([[3.0, 4.0], [0.0, 1.0]]))[:, 0]
    >>> squared_norms(losses, dict(model.named_parameters()))
    {'weight': tensor([25.,  1.])}
    """
    with _quiet(losses):
        found = _contributions(losses, params, allow_unused)
        none = torch.zeros(losses.shape[0], device=losses.device)
        return {name: found[name].squared_norms() if name in found else none for name in params}


def _quiet(losses: Tensor) -> AbstractContextManager[object]:
    """No graph of our own, and no autocast: norms and sums stay in fp32 even where the forward pass was under it."""
    if not torch.is_autocast_enabled(losses.device.type):
        return torch.no_grad()
    both = ExitStack()
    both.enter_context(torch.no_grad())
    both.enter_context(torch.autocast(losses.device.type, enabled=False))
    return both


def _weights(factors: Tensor, squared: Tensor, mask: Tensor | None) -> Weights:
    if mask is not None:
        factors = factors * mask.to(factors.dtype)
    # On the CPU a look at the values costs nothing, and saves a pass over all activations. A traced step has no values.
    # A sum of numbers >= 0 is finite only if all of them are.
    if squared.device.type == "cpu" and torch._C._len_torch_dispatch_stack() == 0 and isfinite(squared.sum().item()):
        return Weights(factors)
    return Weights(factors, ~squared.isfinite())


def _additions(parts: Sequence[tuple[Contribution, object]], examples: int) -> float:
    return max(part.additions(examples) for part, _ in parts)


def _sums(bundle: Bundle, weights: Weights, pieces: int) -> dict[str, Tensor]:
    """The weighted sums of a bundle; in pieces, each of which holds other examples, added up in fp64."""
    if pieces == 1:
        return bundle.sums(weights)
    total: dict[str, Tensor] = {}
    for part in weights.cut(pieces):
        for name, tensor in bundle.sums(part).items():
            total[name] = total[name].add_(tensor) if name in total else tensor.double()
    return total


def _count(values: Tensor) -> BoundedSum:
    return BoundedSum({"count": values.sum()}, (Group(("count",), 0.5),))


def _zeros(param: Tensor) -> Tensor:
    kind = torch.float64 if param.dtype == torch.float64 else torch.float32
    return torch.zeros(param.shape, dtype=kind, device=param.device)


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
