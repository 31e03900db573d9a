"""Before anything is charged: the device, the randomness, the optimizer, and a first measurement of held-out data."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from hush.checks.guards import check_optimizers
from hush.errors import NotSupported
from hush.machine import Machine, usable
from hush.plan import Plan
from hush.training.evaluation import HeldOut, measure


def device_of(model: nn.Module, machine: Machine) -> torch.device:
    """The device that was asked for, if it can be used, else the one that the model is on."""
    if machine.device is not None:
        return usable(machine.device)
    return next((p.device for p in model.parameters()), torch.device("cpu"))


@contextmanager
def reproducible(seed: int | None, device: torch.device) -> Iterator[None]:
    """Seeded runs seed torch's own generators too, and put them back afterwards."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def check_arguments(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, held_out: HeldOut | None) -> None:
    """Refuse what is not meant, and an optimizer that would not move what is paid for."""
    if not isinstance(plan, Plan):
        raise TypeError(f"expected plan=hush.Plan.for_budget(...), got {type(plan).__name__}")
    if plan.budget is None:
        raise ValueError("fit needs a plan with a budget: make it with hush.Plan.for_budget(hush.Budget(...), ...)")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"expected an optimizer made with the model's parameters, got {optimizer!r}")
    if held_out is not None and not isinstance(held_out, HeldOut):
        raise TypeError(f"expected held_out=hush.HeldOut(data=...), got {type(held_out).__name__}")
    check_optimizers([optimizer], {n: p for n, p in model.named_parameters() if p.requires_grad}, model)


def check_fresh(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that has taken steps: its averages hold what they were computed from, without noise."""
    if optimizer.state:
        raise NotSupported(
            f"expected a new optimizer, got a {type(optimizer).__name__} with state from earlier steps: momentum and "
            "averages of other gradients, perhaps of these records without noise, would enter the released model. Make "
            "a new one with the model's parameters"
        )


def try_held_out(model: nn.Module, held_out: HeldOut | None, device: torch.device) -> None:
    """One batch of held-out data through the metric, so that a mistake in it costs nothing."""
    if held_out is not None:
        measure(model, held_out, device, most=8)
