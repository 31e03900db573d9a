"""Contributions -> clipped sums: norms, factors, one weighted sum for each parameter, and what rounding can add."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from math import isfinite

import torch
from torch import Tensor

from hush.clipping.bounded_sum import BoundedSum, Group
from hush.clipping.clips import Clip
from hush.clipping.rounding import pieces_needed
from hush.gradients.sums.norms import upper_squared_norms
from hush.gradients.sums.per_example import Contribution, Weights
from hush.gradients.sums.small import Bundle, bundled


def summed(
    found: Mapping[str, Contribution],
    params: Mapping[str, Tensor],
    clip: Clip,
    *,
    batch: int,
    rows: int | None = None,
    mask: Tensor | None = None,
) -> BoundedSum:
    """Each example clipped in each group and added up; parameters that nothing was found for get zeros.

    `mask` is zero for rows that do not count. The bounds are those of `clip.sum_bounds`, whatever the batch; a batch
    that rounds more is summed in pieces, as if it had `rows` examples (the physical batch size) if those are more.
    """
    if mask is not None and mask.dtype != torch.bool:
        mask = mask != 0  # a mask tells who counts, never how much: a factor above 1 would break the bound
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
            pieces = pieces_needed(partial(_additions, parts), max(rows or 0, batch), kind)
            for bundle in bundles:
                tensors |= _sums(bundle, weights, pieces)
            below = clip.below(squared, group.bound)
            if below is not None:
                count = _count(below if mask is None else below * mask)
    ordered = {name: tensors[name] if name in tensors else _zeros(params[name]) for name in params}
    if count is None and not found:
        below = clip.below(torch.zeros(0), 1.0)
        count = None if below is None else _count(below)
    return BoundedSum(ordered, clip.sum_bounds(params), count)


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
