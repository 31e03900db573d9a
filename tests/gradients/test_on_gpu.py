"""Autocast, activation checkpointing and captured steps against the float64 oracle; on the GPU where there is one."""

import pytest
import torch
import torch.nn.functional as F
from oracles.gradients import clipped_sum as oracle_sum
from oracles.gradients import per_example_gradients, squared_norms
from support.finished import clipped_sum
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hush.clipping.clips import FlatClip
from hush.machine import Machine
from hush.plan import Plan
from hush.private import Private
from hush.sampling.lots import PoissonLots

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, LENGTH, WIDTH = 6, 144, 160
"""So long that in bfloat16 a GPU keeps the gradients of `read`, and forms those of `mix` again."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.read, self.write = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mix = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.read(self.norm(x)).unflatten(-1, (3, 4, -1)).movedim((2, 3), (0, 2))
        x = x + self.write(F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mix(x)


class Model(nn.Module):
    """Two transformer blocks over words, whose activations are computed again in the backward pass if asked."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.again = again
        self.words, self.out = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 20)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return self.out(x)


def losses_of(model: nn.Module, batch: tuple[Tensor, ...], half: bool) -> Tensor:
    words, targets = batch
    with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=half):
        out = model(words)
    out = out if out.dtype == torch.float64 else out.float()
    return F.cross_entropy(out.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape).mean(1)


def setting(again: bool) -> tuple[Model, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = Model(again).to(DEVICE)
    batch = torch.randint(0, 50, (BATCH, LENGTH)).to(DEVICE), torch.randint(0, 20, (BATCH, LENGTH)).to(DEVICE)
    return model, batch


def relative(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    gap = sum(float((found[name].double() - wanted[name]).square().sum()) for name in wanted)
    return (gap / sum(float(value.square().sum()) for value in wanted.values())) ** 0.5


@pytest.mark.parametrize("again", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
def test_sums_are_as_near_to_float64_as_the_gradient_of_pytorch(again: bool, half: bool) -> None:
    model, batch = setting(again)
    params = dict(model.named_parameters())
    exact = per_example_gradients(model, batch, lambda model, batch: losses_of(model, batch, half=False))
    total = {name: values.sum(0) for name, values in exact.items()}
    plain = torch.autograd.grad(losses_of(model, batch, half).sum(), list(params.values()))
    allowed = max(1e-5, 2 * relative(dict(zip(params, plain, strict=True)), total))
    assert allowed < (0.03 if half else 2e-5)
    unclipped = clipped_sum(losses_of(model, batch, half), params, FlatClip(1e3))
    assert relative(unclipped.tensors, total) <= allowed
    bound = float(torch.stack(list(squared_norms(exact).values())).sum(0).sqrt().median())
    clipped = clipped_sum(losses_of(model, batch, half), params, FlatClip(bound))
    assert relative(clipped.tensors, oracle_sum(exact, bound)) <= allowed + 0.005, "rounding may lower a factor"


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
def test_checkpointing_changes_nothing(half: bool) -> None:
    sums = []
    for again in (False, True):
        model, batch = setting(again)
        sums.append(clipped_sum(losses_of(model, batch, half), dict(model.named_parameters()), FlatClip(0.1)).tensors)
    wanted = {name: value.double() for name, value in sums[0].items()}
    # Attention on a GPU adds up in no fixed order, so gradients differ in the last places from pass to pass.
    assert relative(sums[1], wanted) <= (1e-6 if DEVICE == "cpu" else 1e-2 if half else 1e-5)


@pytest.mark.filterwarnings("ignore:TensorFloat32", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: on a CPU a captured step is the eager one")
@pytest.mark.parametrize("compile", [False, True], ids=["captured", "compiled"])
@pytest.mark.parametrize("again", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
def test_replays_are_as_near_to_float64_as_the_gradient_of_pytorch(again: bool, half: bool, compile: bool) -> None:
    model, batch = setting(again)
    params = dict(model.named_parameters())
    exact = per_example_gradients(model, batch, lambda model, batch: losses_of(model, batch, half=False))
    total = {name: values.sum(0) for name, values in exact.items()}
    gradients = torch.autograd.grad(losses_of(model, batch, half).sum(), list(params.values()))
    allowed = max(1e-5, 2 * relative(dict(zip(params, gradients, strict=True)), total))
    plan = Plan(lots=PoissonLots(examples=BATCH, lot_size=BATCH), steps=4, clip=FlatClip(1e3), noise_multiplier=0.0)
    machine = Machine(compile=compile)
    private = Private(model, plan, lambda model, *batch: losses_of(model, batch, half), machine=machine)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    padded = [torch.cat([tensor, tensor[:2]]) for tensor in batch]  # two padding rows with contents
    for lot in private.lots():
        for ticket in lot.batches(BATCH + 2, pad=True):
            private.add(ticket, *padded)
        private.step(optimizer)
        found = {name: param.grad * BATCH for name, param in params.items() if param.grad is not None}
        assert relative(found, total) <= allowed
