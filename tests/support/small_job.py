"""A small job with everything that a checkpoint must hold, its conduct, and a way for it to die."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from hush.clipping.clips import FlatClip
from hush.training import Conduct, HeldOut, Job
from support.small_fit import BUDGET, blobs


class Crash(Exception):
    """What a run dies of in these tests."""


def job(crash_at: int | None = None, **changes: Any) -> Job:
    """A small network with everything that a checkpoint must hold: momentum, dropout, a schedule, an average."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    measured = iter(range(1000))

    def metric(outputs: Tensor, targets: Tensor) -> Tensor:
        if len(outputs) == 100 and next(measured) == crash_at:  # the few records that are tried first do not count
            raise Crash
        return (outputs.argmax(1) == targets).double()

    settings: dict[str, Any] = {
        "model": model, "train_set": blobs(), "loss": F.cross_entropy, "optimizer": optimizer, "lot_size": 40,
        "epochs": 5, "clip": FlatClip(1.0), "average": 0.9, "scheduler": LambdaLR(optimizer, lambda t: 0.99**t),
        "held_out": HeldOut(data=blobs(100, seed=1), public=True, metric=metric, choose="best"),
    }  # fmt: skip
    return Job(**settings | changes)


def conduct(folder: Path, **changes: Any) -> Conduct:
    settings: dict[str, Any] = {
        "budget": BUDGET,
        "out": folder,
        "progress": False,
        "reserve": 40,
        "checkpoint_every": 10,
    }
    return Conduct(**settings | changes)


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
