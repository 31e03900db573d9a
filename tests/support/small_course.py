"""A linear model, plans for each kind of lots and the plain loop, for the tests of where a run stands."""

from typing import Any

import torch
from torch import Tensor, nn

from hush.clipping.clips import FlatClip
from hush.plan import Plan
from hush.private import Private
from hush.sampling.lots import AllocatedLots, PoissonLots, ShuffledLots

N, L = 30, 6
torch.manual_seed(0)
X = torch.randn(N, 4)
POISSON = PoissonLots(examples=N, lot_size=L)
KINDS = [POISSON, AllocatedLots(examples=N, lot_size=L), ShuffledLots(examples=N, lot_size=L)]


def plan(**changes: Any) -> Plan:
    return Plan(**({"lots": POISSON, "steps": 8, "clip": FlatClip(1.0), "noise_multiplier": 1.0} | changes))


def network() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(4, 1)


def losses_of(model: nn.Module, index: Tensor) -> Tensor:
    return model(X[index]).square().squeeze(1)


def train(private: Private, optimizer: torch.optim.Optimizer, steps: int = 10**9) -> None:
    for lot in private.lots():
        for batch in lot.batches(4):
            private.add(batch, batch.index)
        private.step(optimizer)
        if private.steps_done >= steps:
            break


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()
