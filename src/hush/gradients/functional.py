"""Losses as `losses_of` gives them: one number for each row."""

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def per_example(loss: Any) -> Callable[..., Tensor]:
    """A `losses_of(model, inputs, targets)` from a loss of torch, which is asked for reduction="none".

    Losses with several numbers for a row (pixels, tokens) are averaged over them.

    >>> losses_of = per_example(nn.functional.mse_loss)
    >>> losses_of(nn.Identity(), torch.zeros(2, 3), torch.ones(2, 3))
    tensor([1., 1.])
    """
    unreduced = _unreduced(loss)

    def losses_of(model: nn.Module, *inputs: Any) -> Tensor:
        if len(inputs) != 2:
            raise ValueError(
                f"per_example(loss) needs batches of (inputs, targets), got {len(inputs)} parts; write "
                "losses_of(model, *inputs) yourself"
            )
        losses = unreduced(model(inputs[0]), inputs[1])
        return losses.flatten(1).mean(1) if isinstance(losses, Tensor) and losses.ndim > 1 else losses

    return losses_of


def sequence_cross_entropy(logits: Tensor, targets: Tensor, mask: Tensor | None = None) -> Tensor:
    """One loss for each sequence: the mean cross entropy of its own tokens that `mask` counts, all by default.

    `logits` is [B, T, classes], `targets` and `mask` are [B, T]. A sequence without tokens has loss 0. The mean is over
    the tokens of one sequence, never over those of the batch, which would make its examples depend on each other.

    >>> sequence_cross_entropy(torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64)).exp().round(decimals=3)
    tensor([4., 4.])
    """
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    if mask is None:
        return losses.mean(1)
    counts = mask.to(torch.bool)
    return losses.masked_fill(~counts, 0.0).sum(1) / counts.sum(1).clamp(min=1)


def _unreduced(loss: Any) -> Callable[..., Tensor]:
    if isinstance(loss, nn.Module) and hasattr(loss, "reduction"):
        own = copy.copy(loss)  # the caller's module is left as it is
        own.reduction = "none"  # type: ignore[assignment]
        return own
    try:
        names: Mapping[str, Any] = inspect.signature(loss).parameters
    except (TypeError, ValueError):
        names = {}
    if "reduction" in names and not (isinstance(loss, partial) and "reduction" in loss.keywords):
        return partial(loss, reduction="none")
    return loss
