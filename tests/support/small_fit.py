"""Two clouds of points, a small network, and a call of `fit` with what a test does not care about filled in."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hush.accounting import Budget
from hush.clipping.clips import FlatClip
from hush.training import Result, fit

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


def run(model: nn.Module | None = None, data: Any = None, **changes: Any) -> Result:
    """A fit on little data, with everything that a test does not care about filled in."""
    model = network() if model is None else model
    settings: dict[str, Any] = {
        "loss": F.cross_entropy, "optimizer": sgd(model), "budget": BUDGET,
        "lot_size": 40, "epochs": 3, "clip": FlatClip(1.0), "progress": False,
    }  # fmt: skip
    return fit(model, blobs() if data is None else data, **settings | changes)
