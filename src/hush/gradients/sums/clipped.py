"""Contributions -> clipped sums: norms, factors, one weighted sum for each parameter, and what rounding can add."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from hush.clipping.bounded_sum import BoundedSum, Group
from hush.clipping.clips import Clip
from hush.clipping.rounding import slack
from hush.gradients.sums.blocks import BLOCK, blocked_additions
from hush.gradients.sums.norms import upper_squared_norms
from hush.gradients.sums.per_example import Contribution, Weights
from hush.gradients.sums.small import bundled


@dataclass(frozen=True)
class Summed:
    """The sums of one batch, and for each group of the clip how far rounding moves one example, relative to C."""

    tensors: dict[str, Tensor]
    slacks: tuple[float, ...]
    count: BoundedSum | None

    def bounded(self, groups: tuple[Group, ...], constant: float | None = None) -> BoundedSum:
        """With the bounds of these groups, slack included: this batch's, or a constant that is at least as large."""
        extra = self.slacks if constant is None else [constant] * len(groups)
        bounds = [Group(g.names, g.bound * (1 + more)) for g, more in zip(groups, extra, strict=True)]
        return BoundedSum(self.tensors, tuple(bounds), self.count)


def summed(
    found: Mapping[str, Contribution],
    params: Mapping[str, Tensor],
    clip: Clip,
    *,
    batch: int,
    rows: int | None = None,
    mask: Tensor | None = None,
) -> Summed:
    """Each example clipped in each group and added up; parameters that nothing was found for get zeros.

    `mask` is zero for rows that do not count. Rounding is bounded for `rows` examples, a public number.
    """
    if mask is not None and mask.dtype != torch.bool:
        mask = mask != 0  # a mask tells who counts, never how much: a factor above 1 would break the bound
    tensors: dict[str, Tensor] = {}
    slacks: list[float] = []
    count: BoundedSum | None = None
    for group in clip.groups(params):
        here = {name: found[name] for name in group.names if name in found}
        bundles = bundled(here, {name: tuple(params[name].shape) for name in here})
        parts = [(bundle.contribution, bundle.shape) for bundle in bundles]
        if parts:
            squared = upper_squared_norms(parts)
            weights = _weights(clip.factors(squared, group.bound), squared, mask)
            for bundle in bundles:
                tensors |= bundle.sums(weights)
            below = clip.below(squared, group.bound)
            if below is not None:
                count = _count(below if mask is None else below * mask)
        together = max(rows or 0, batch)
        additions = max([part.additions(together) for part, _ in parts], default=blocked_additions(together, BLOCK))
        exact = bool(here) and all(tensors[name].dtype == torch.float64 for name in here)
        slacks.append(slack(additions, torch.float64 if exact else torch.float32))
    ordered = {name: tensors[name] if name in tensors else _zeros(params[name]) for name in params}
    if count is None and not found:
        below = clip.below(torch.zeros(0), 1.0)
        count = None if below is None else _count(below)
    return Summed(ordered, tuple(slacks), count)


def quiet(device: torch.device) -> AbstractContextManager[object]:
    """No graph of our own, and no autocast: norms and sums stay in fp32 even where the forward pass was under it."""
    if not torch.is_autocast_enabled(device.type):
        return torch.no_grad()
    both = ExitStack()
    both.enter_context(torch.no_grad())
    both.enter_context(torch.autocast(device.type, enabled=False))
    return both


def _weights(factors: Tensor, squared: Tensor, mask: Tensor | None) -> Weights:
    if mask is not None:
        factors = factors * mask.to(factors.dtype)
    # On the CPU a look at the values costs nothing, and saves a pass over all activations. A traced step has no values.
    # A sum of numbers >= 0 is finite only if all of them are.
    if squared.device.type == "cpu" and torch._C._len_torch_dispatch_stack() == 0 and isfinite(squared.sum().item()):
        return Weights(factors)
    return Weights(factors, ~squared.isfinite())


def _count(values: Tensor) -> BoundedSum:
    return BoundedSum({"count": values.sum()}, (Group(("count",), 0.5),))


def _zeros(param: Tensor) -> Tensor:
    kind = torch.float64 if param.dtype == torch.float64 else torch.float32
    return torch.zeros(param.shape, dtype=kind, device=param.device)
