"""The fast way against the definition, parameter by parameter: what disagrees is taken one example after another."""

from collections.abc import Mapping

import torch
from torch import Tensor

from hush.gradients.sums.per_example import Contribution, Weights

_CLOSE, _CLOSE_IN_HALF = 1e-3, 3e-2
"""Of a parameter's largest entry."""
_SMALL = 1e-4
"""Of the largest entry of all parameters: where a gradient vanishes beside the others, rounding is all there is."""


def disagreeing(
    losses: Tensor, params: Mapping[str, Tensor], found: Mapping[str, Contribution], half: bool, examples: int
) -> dict[str, str]:
    """Parameters whose sums or norms are not those of single backward passes, and what was seen; the graph stays.

    The first `examples` are looked at.
    """
    tolerance = _CLOSE_IN_HALF if half else _CLOSE
    wrong: dict[str, str] = {}
    norms = {name: part.squared_norms() for name, part in found.items()}
    for example in range(examples):
        chosen = torch.zeros_like(losses)
        chosen[example] = 1
        grads = torch.autograd.grad(losses, list(params.values()), chosen, retain_graph=True, allow_unused=True)
        dense = [g.to_dense() if g is not None and g.is_sparse else g for g in grads]
        truth = dict(zip(params, dense, strict=True))
        largest = max([float(g.abs().max()) for g in truth.values() if g is not None and g.numel()], default=0.0)
        if not largest < float("inf"):
            continue
        factors = chosen.to(torch.float64 if losses.dtype == torch.float64 else torch.float32)
        for name, exact in truth.items():
            part = found.get(name)
            if name in wrong or (part is None and exact is None) or (exact is not None and not exact.numel()):
                continue
            exact = torch.zeros_like(params[name]) if exact is None else exact
            exact = exact.double()
            ours = exact * 0 if part is None else part.weighted_sum(Weights(factors, chosen == 0)).double()
            scale = tolerance * (float(exact.abs().max()) + _SMALL * largest) + 1e-30
            if ours.shape != exact.shape or not bool(((ours - exact).abs().max() <= scale).item()):
                wrong[name] = "its gradient"
            elif part is not None:
                norm, of_truth = float(norms[name][example].double().sqrt()), float(exact.norm())
                if not abs(norm - of_truth) <= tolerance * of_truth + _SMALL * tolerance * largest + 1e-12:
                    wrong[name] = "its norm"
    return wrong
