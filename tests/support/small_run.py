"""A network, data and a loop small enough for oracles, for the tests of the DP-SGD step."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hush.clipping.clips import Clip, FlatClip
from hush.plan import Plan
from hush.private import Private
from hush.sampling.lots import Lots, PoissonLots

N, L = 40, 8
_DATA = torch.Generator().manual_seed(0)
X, Y = torch.randn(N, 5, generator=_DATA), torch.randint(3, (N,), generator=_DATA)
POISSON = PoissonLots(examples=N, lot_size=L)


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def plan(
    clip: Clip | None = None, noise: float = 0.0, steps: int = 6, lots: Lots = POISSON, kind: Any = "gaussian"
) -> Plan:
    return Plan(lots=lots, steps=steps, clip=clip or FlatClip(0.5), noise_multiplier=noise, noise=kind)


def losses_of(model: nn.Module, index: Tensor) -> Tensor:
    return F.cross_entropy(model(X[index]), Y[index], reduction="none")


def sgd(model: nn.Module, lr: float = 1.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def run(private: Private, model: nn.Module, optimizer: torch.optim.Optimizer, size: int = 3) -> Iterator[list[int]]:
    """The plain loop; yields the examples of each lot after its step."""
    for lot in private.lots():
        for batch in lot.batches(size):
            private.add(batch, batch.index)
        private.step(optimizer)
        yield lot.indices.tolist()


def clipped_mean(model: nn.Module, indices: list[int], bound: float, denominator: int) -> list[Tensor]:
    """The oracle: one backward pass for each example, norms and sums in float64."""
    total = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
    for i in indices:
        gradients = torch.autograd.grad(losses_of(model, torch.tensor([i]))[0], list(model.parameters()))
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
        for place, g in zip(total, gradients, strict=True):
            place += g.double() * min(1.0, bound / norm)
    return [place / denominator for place in total]


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.detach().clone() for p in model.parameters() if p.grad is not None]


def distance(a: list[Tensor], b: list[Tensor]) -> float:
    return math.sqrt(
        sum(float((x.detach().double() - y.detach().double()).square().sum()) for x, y in zip(a, b, strict=True))
    )
