"""Before anything is charged: the device, the randomness, the optimizer, and a first measurement of held-out data."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from hush.checks.optimizers import check_optimizers
from hush.checks.provenance import shares_rows
from hush.machine import Machine, usable
from hush.plan import Plan
from hush.sampling.loader import Loader
from hush.training.evaluation import HeldOut, try_measuring


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


def check_arguments(
    model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, held_out: HeldOut | None, *, first: bool
) -> None:
    """Refuse what is not meant, and an optimizer that would not move what is paid for."""
    if not isinstance(plan, Plan):
        raise TypeError(f"expected plan=hush.Plan.for_budget(...), got {type(plan).__name__}")
    if plan.budget is None:
        raise ValueError(
            "fit needs a plan with a budget: make it with hush.Plan.for_budget(hush.Budget(...), ...); a plan without "
            "one, as a trial of hush tune gets it, is for hush.Private"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"expected an optimizer made with the model's parameters, got {optimizer!r}")
    if held_out is not None and not isinstance(held_out, HeldOut):
        raise TypeError(f"expected held_out=hush.HeldOut(data=...), got {type(held_out).__name__}")
    check_optimizers([optimizer], {n: p for n, p in model.named_parameters() if p.requires_grad}, model, first=first)


def try_held_out(model: nn.Module, loader: Loader, held_out: HeldOut | None, device: torch.device) -> str | None:
    """One batch through the metric, so that a mistake costs nothing; and what a statement must say of the records.

    Records of the training data are refused as public ones: they are the ones that are protected.
    """
    if held_out is None:
        return None
    try_measuring(model, held_out, device)
    if not shares_rows(loader, Loader.of(held_out.data)):
        return None
    if held_out.decides or held_out.public:
        raise ValueError(
            f"{held_out.name} has records of the training data, which are protected: they can neither be declared "
            "public nor choose what is released. Hold out records that are not trained on"
        )
    return (
        f"{held_out.name[:1].upper()}{held_out.name[1:]} has records of the training data: what is measured on them is "
        "stated without noise, and no epsilon covers that."
    )
