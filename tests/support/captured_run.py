"""A small training that can be run captured or by the plain loop, for tests that compare the two."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hush.clipping.clips import FlatClip
from hush.gradients.functional import per_example
from hush.machine import Machine
from hush.plan import Plan
from hush.private import Private
from hush.sampling.lots import PoissonLots

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_GPU = DEVICE == "cuda"
N = 40


class Plain(Machine):
    """A machine that captures nothing."""

    def captures(self, *_: Any) -> bool:
        return False


class Doubling(nn.Module):
    """Does another thing in training mode than else."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x if self.training else x


class Run:
    """A small training, seeded; captured or by the plain loop."""

    def __init__(self, *, captured: bool, kind: str = "sgd", steps: int = 8, size: int = 40, **changes: Any) -> None:
        torch.manual_seed(0)
        dtype = changes.pop("dtype", torch.float32)
        self.model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), Doubling().eval(), nn.Linear(5, 3))
        self.model.to(DEVICE, dtype)
        self.x, self.y = torch.randn(N, 6).to(DEVICE, dtype), torch.randint(0, 3, (N,)).to(DEVICE)
        self.optimizer = optimizers()[kind](self.model.parameters())
        settings = {
            "lots": PoissonLots(examples=N, lot_size=20),
            "clip": FlatClip(1.0),
            "noise_multiplier": 1.0,
        } | changes
        seed = settings.pop("seed", 3)
        machine = Machine() if captured else Plain()
        plan = Plan(steps=steps, **settings)
        self.private = Private(self.model, plan, per_example(F.cross_entropy), seed=seed, machine=machine)
        self.size = size
        self.gradients: list[Tensor] = []

    def batches(self, lot: Any) -> None:
        for batch in lot.batches(self.size, pad=True):
            rows = batch.index.to(DEVICE)
            self.private.add(batch, self.x[rows], self.y[rows])

    def step(self) -> None:
        self.private.step(self.optimizer)
        self.gradients.append(torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None]))

    def train(self, between: Callable[["Run", int], None] = lambda run, step: None) -> "Run":
        for lot in self.private.lots():
            self.batches(lot)
            self.step()
            between(self, lot.step)
        return self


def optimizers() -> dict[str, Callable[[Any], torch.optim.Optimizer]]:
    found: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "plain": lambda p: torch.optim.SGD(p, lr=0.1),
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        "adam on the host": lambda p: torch.optim.Adam(p, lr=0.01),
        "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    }
    if ON_GPU:
        found["adam"] = lambda p: torch.optim.Adam(p, lr=0.01, capturable=True)
        found["adamw"] = lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01, device=DEVICE), capturable=True)
        found["fused"] = lambda p: torch.optim.SGD(p, lr=torch.tensor(0.1, device=DEVICE), momentum=0.9, fused=True)
    return found


def assert_same(one: Run, other: Run) -> None:
    """Bit for bit, gradients and parameters."""
    assert len(one.gradients) == len(other.gradients)
    for step, (a, b) in enumerate(zip(one.gradients, other.gradients, strict=True)):
        assert torch.equal(a, b), f"step {step}"
    for p, q in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(p, q)


def fresh_noise(run: Run) -> bool:
    return all(not torch.equal(a, b) for n, a in enumerate(run.gradients) for b in run.gradients[:n])
