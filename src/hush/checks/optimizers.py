"""What an optimizer must be: it uses the released gradients, each once, and nothing else."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hush.errors import NotSupported


def check_optimizers(
    optimizers: Sequence[torch.optim.Optimizer], trained: Mapping[str, Tensor], model: nn.Module, *, first: bool = False
) -> None:
    """Refuse optimizers that would not use the released gradients, each once, and no others.

    At the `first` step of a run also those that have taken steps before: their averages hold other gradients.
    """
    if not optimizers:
        return
    names = {id(p): name for name, p in trained.items()}
    held: set[int] = set()
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"expected an optimizer of torch, got {type(optimizer).__name__}")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise TypeError("LBFGS evaluates the loss again inside its step, without noise or charge; use another one")
        if first and any(map(_was_used, optimizer.state.values())):
            raise NotSupported(
                f"expected a new optimizer, got a {type(optimizer).__name__} with state from earlier steps: averages "
                "of other gradients, perhaps of these records without noise, would enter the released model. Make a "
                "new one with the model's parameters"
            )
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) in names:
                    if id(parameter) in held:
                        raise ValueError(
                            f"parameter {names[id(parameter)]!r} is held twice by the optimizers of a step"
                        )
                    held.add(id(parameter))
                elif parameter.grad is not None or (parameter.requires_grad and not _holds(model, parameter)):
                    raise RuntimeError(
                        f"a parameter of shape {tuple(parameter.shape)} in group {number} of "
                        f"{type(optimizer).__name__} is not a trainable parameter of the model in this lot, and its "
                        "gradient is not private. Take "
                        "it out of the optimizer, or freeze and unfreeze parameters only between lots"
                    )
    missing = [name for key, name in names.items() if key not in held]
    if missing:
        raise ValueError(
            f"no optimizer of this step holds the trainable parameters {', '.join(missing[:5])}"
            f"{', ...' if len(missing) > 5 else ''}: they would be paid for and never move. Make the optimizer with "
            "them, freeze them with requires_grad_(False), or call private.step() and use the gradients yourself"
        )


def _was_used(state: Mapping[str, Any]) -> bool:
    """Whether a parameter's state has seen a gradient."""
    if "step" in state:
        return float(state["step"]) > 0
    return any(bool(value.count_nonzero()) for value in state.values() if isinstance(value, Tensor))


def _holds(model: nn.Module, parameter: Tensor) -> bool:
    return any(one is parameter for one in model.parameters())
