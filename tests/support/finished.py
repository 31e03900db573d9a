"""Clipped sums and norms from finished losses, for tests of rules: what the engine does after its analysis.

Nothing tells here whether examples are independent; where they lie is looked up in the one batch.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from hush.clipping.bounded_sum import BoundedSum
from hush.clipping.clips import Clip
from hush.gradients.analysis.function import check_losses
from hush.gradients.analysis.learn import by_owners
from hush.gradients.analysis.plan import Plan, make
from hush.gradients.graph import Graph, read
from hush.gradients.sites import contributions, settled
from hush.gradients.sums.clipped import quiet, summed
from hush.gradients.sums.per_example import Contribution

_plans: dict[object, tuple[Plan, list[bool]]] = {}


def plan_of(graph: Graph, losses: Tensor) -> tuple[Plan, list[bool]]:
    """Made from the first batch of equal graphs, so that a traced one finds it."""
    if graph.key not in _plans:
        side, where = by_owners(graph, losses)
        _plans[graph.key] = settled(graph, make(graph, side, where, frozenset()), losses, side), side
    return _plans[graph.key]


def found_in(losses: Tensor, params: Mapping[str, Tensor]) -> dict[str, Contribution]:
    check_losses(losses, len(losses) if losses.dim() else 0)
    graph = read(losses, params)
    plan, side = plan_of(graph, losses)
    return contributions(graph, plan, losses, side)


def clipped_sum(
    losses: Tensor,
    params: Mapping[str, Tensor],
    clip: Clip,
    *,
    mask: Tensor | None = None,
    rows: int | None = None,
    allow_unused: bool = False,
) -> BoundedSum:
    with quiet(losses.device):
        found = found_in(losses, params) if losses.numel() else {}
        return summed(found, params, clip, batch=losses.numel(), rows=rows, mask=mask)


def squared_norms(losses: Tensor, params: Mapping[str, Tensor], *, allow_unused: bool = False) -> dict[str, Tensor]:
    with quiet(losses.device):
        found = found_in(losses, params)
        none = torch.zeros(len(losses), device=losses.device)
        return {name: found[name].squared_norms() if name in found else none for name in params}
