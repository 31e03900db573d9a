"""Two clouds of points, a small network, and a call of `fit` with what a test does not care about filled in."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hush.accounting import Budget
from hush.clipping.clips import FlatClip
from hush.gradients.functional import per_example
from hush.machine import Machine
from hush.plan import Plan
from hush.sampling.loader import Loader
from hush.training import Result, Run, fit

BUDGET = Budget(epsilon=3.0, delta=1e-4)


def blobs(count: int = 400, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Two clouds of points that a line can tell apart."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % 2
    x = torch.randn(count, 5, generator=generator) + 2.0 * y[:, None]
    return x, y


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


PLAN = ("budget", "lot_size", "epochs", "steps", "clip", "sampling", "noise", "noise_multiplier", "noise_schedule",
        "preprocessing", "reserve", "accountant")  # fmt: skip
RUN = (
    "about",
    "ledger",
    "create_ledger",
    "resume",
    "checkpoint_every",
    "seed",
    "progress",
    "callbacks",
    "unsafe_diagnostics",
)
MACHINE = ("device", "batch_size", "compile", "engine")


def run(model: nn.Module | None = None, data: Any = None, **changes: Any) -> Result:
    """A fit on little data, with everything that a test does not care about filled in."""
    model = network() if model is None else model
    settings: dict[str, Any] = {
        "loss": F.cross_entropy, "optimizer": sgd(model), "budget": BUDGET,
        "lot_size": 40, "epochs": 3, "clip": FlatClip(1.0), "progress": False,
    }  # fmt: skip
    settings |= changes
    data = blobs() if data is None else data
    if {"name", "workers"} & settings.keys():
        data = Loader(data, **{name: settings.pop(name) for name in ("name", "workers") if name in settings})
    losses_of = settings.pop("losses_of", None) or per_example(settings["loss"])

    def taken(names: tuple[str, ...]) -> dict[str, Any]:
        return {name: settings.pop(name) for name in names if name in settings}

    plan_of, run_of, machine_of = taken(PLAN), taken(RUN), taken(MACHINE)
    plan = settings.pop("plan", None) or Plan.for_budget(
        plan_of.pop("budget"), examples=Loader.of(data).examples, **plan_of
    )
    how, where = Run(settings.pop("out", None), **run_of), Machine(**machine_of)
    optimizer, held_out = settings.pop("optimizer"), settings.pop("held_out", None)
    assert set(settings) <= {"loss"}, settings
    return fit(model, data, losses_of, optimizer, plan, held_out=held_out, run=how, machine=where)
