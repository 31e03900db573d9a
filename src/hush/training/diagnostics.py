"""Unsafe diagnostics: numbers computed from training data without noise. They are private, and shown only when asked.

A run that shows them says so in its report: whoever sees these numbers learns something that epsilon does not cover.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hush.clipping.clips import Clip
from hush.gradients.clipped import squared_norms
from hush.sampling.loader import Loader
from hush.sampling.lots import Lot
from hush.training.evaluation import on_device

_EXAMPLES = 512  # from the beginning of the training set


def unsafe_diagnostics(
    losses_of: Callable[..., Tensor],
    loader: Loader,
    parameters: Mapping[str, nn.Parameter],
    clip: Clip,
    device: torch.device,
) -> dict[str, Any]:
    """Mean training loss, quantiles of gradient norms, and how many examples the clip cuts, on a few examples."""
    few = min(_EXAMPLES, loader.examples)
    losses: list[Tensor] = []
    squares: list[dict[str, Tensor]] = []
    for batch in loader.batches(Lot(0, np.arange(few)), min(few, 128)):
        batch = on_device(batch, device)
        found = losses_of(*batch) if isinstance(batch, tuple | list) else losses_of(batch)
        losses.append(found.detach())
        squares.append(squared_norms(found, parameters))
    by_name = {name: torch.cat([part[name] for part in squares]).double() for name in parameters}
    norms = sum(by_name.values(), torch.zeros(few, dtype=torch.float64, device=device)).sqrt()
    cut = torch.zeros(few, dtype=torch.bool, device=device)
    for group in clip.groups(parameters):
        total = sum((by_name[name] for name in group.names), torch.zeros_like(norms))
        cut |= total > group.bound**2
    low, middle, high = torch.quantile(norms, torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64, device=device))
    return {
        "unsafe_training_loss": torch.cat(losses).mean().item(),
        "unsafe_gradient_norms": {"10%": low.item(), "50%": middle.item(), "90%": high.item()},
        "unsafe_clipped_share": cut.double().mean().item(),
    }
