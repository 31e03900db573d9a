"""A small job with everything that a checkpoint must hold, a way to run it, and a way for it to die."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from hush.clipping.clips import FlatClip
from hush.gradients.functional import per_example
from hush.machine import Machine
from hush.training import Averaging, HeldOut, Job, Result, Run, Scheduler, fit
from support.small_fit import BUDGET, blobs


class Crash(Exception):
    """What a run dies of in these tests."""


def job(crash_at: int | None = None, **changes: Any) -> Job:
    """A small network with everything that a checkpoint must hold: momentum, dropout, a schedule, an average."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    measured = iter(range(1000))

    def metric_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if len(x) == 100 and next(measured) == crash_at:  # the few records that are tried first do not count
            raise Crash
        return (model(x).argmax(1) == y).double()

    settings: dict[str, Any] = {
        "model": model, "data": blobs(), "losses_of": per_example(F.cross_entropy), "optimizer": optimizer,
        "lot_size": 40, "epochs": 5, "clip": FlatClip(1.0),
        "callbacks": [Averaging(0.9), Scheduler(LambdaLR(optimizer, lambda t: 0.99**t))],
        "held_out": HeldOut(data=blobs(100, seed=1), public=True, metric_of=metric_of, choose="best"),
    }  # fmt: skip
    return Job(**settings | changes)


def train(job: Job, folder: Path | None, **changes: Any) -> Result:
    """Run the job in a folder, with a reserve and checkpoints every ten steps."""
    settings: dict[str, Any] = {"progress": False, "checkpoint_every": 10, "callbacks": job.callbacks, "reserve": 40}
    settings |= changes
    machine = Machine(device=settings.pop("device", None))
    plan = job.plan(settings.pop("budget", BUDGET), reserve=settings.pop("reserve"))
    held_out, run = job.held_out, Run(folder, **settings)
    return fit(job.model, job.data, job.losses_of, job.optimizer, plan, held_out=held_out, run=run, machine=machine)


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
