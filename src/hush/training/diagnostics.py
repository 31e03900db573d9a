"""Unsafe diagnostics: numbers computed from training data without noise. They are private, and shown only when asked.

A run that shows them says so in its report: whoever sees these numbers learns something that epsilon does not cover.
"""

from typing import Any

import torch
from torch import Tensor

from hush.clipping.clips import Clip
from hush.gradients.engine import Gradients, Inputs
from hush.sampling.loader import Loader, on_device

_EXAMPLES = 512  # from the beginning of the training set


def unsafe_diagnostics(gradients: Gradients, loader: Loader, clip: Clip, device: torch.device) -> dict[str, Any]:
    """Mean training loss, quantiles of gradient norms, and how many examples the clip cuts, on a few examples."""
    few, parameters = min(_EXAMPLES, loader.examples), gradients.parameters()
    losses: list[Tensor] = []
    squares: list[dict[str, Tensor]] = []
    for rows in loader.parts(min(few, 128), most=few):
        inputs = Inputs.of(on_device(rows, device))
        losses.append(gradients.losses(inputs).detach())
        squares.append(gradients.squared_norms(inputs))
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
