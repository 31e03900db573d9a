"""The step of SGD that the release kernel takes itself: torch's numbers, and only where torch would do the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.captured_run import DEVICE, ON_GPU, Run, assert_same
from support.recorder import Studio, play_graphs_on_cpu
from torch import Tensor

pytest.importorskip("triton")

from hush.kernels.noise.descent import descent_of, numbers_of
from hush.kernels.noise.gaussian import DescendingRelease

SUBKEY = bytes(range(32))
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"lr": 0.1},
    "decay": {"lr": 0.1, "weight_decay": 0.03},
    "momentum": {"lr": 0.1, "momentum": 0.9, "dampening": 0.4},
    "nesterov": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.03},
}


@pytest.fixture
def studio(monkeypatch: pytest.MonkeyPatch) -> Studio | None:
    return None if ON_GPU else play_graphs_on_cpu(monkeypatch)


def parameters_of(sizes: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, generator=generator).to(DEVICE).requires_grad_() for size in sizes]


@pytest.mark.parametrize("kind", SETTINGS)
def test_the_kernel_takes_the_step_of_the_optimizer(kind: str) -> None:
    """Two groups with settings of their own, tensors that share programs and one that fills several."""
    sizes = [3, 600, 1, 1500, 40]
    ours, theirs = parameters_of(sizes), parameters_of(sizes)

    def optimizer(parameters: list[Tensor]) -> torch.optim.Optimizer:
        more = {"lr": 0.02} | ({"weight_decay": 0.5} if "weight_decay" in SETTINGS[kind] else {})
        return torch.optim.SGD([{"params": parameters[:2]}, {"params": parameters[2:]} | more], **SETTINGS[kind])

    one, other = optimizer(ours), optimizer(theirs)
    for parameter in (*ours, *theirs):
        parameter.grad = torch.ones_like(parameter)
    one.step()  # makes the momentum buffers
    other.step()
    descent = descent_of(one, ours)
    assert descent is not None
    totals = [torch.full_like(p, 2.0, requires_grad=False) for p in ours]
    paces = descent.paces([0.5, 1.0, 2.0, 0.0, 1.0], numbers_of(one))
    parts = list(zip(totals, paces, totals, strict=True))
    release = DescendingRelease(parts, descent, ours, scale=0.25, subkey=SUBKEY, step=5)
    for step in (5, 6):
        for total in totals:
            total.fill_(2.0)
        if step == 6:
            for group in (*one.param_groups, *other.param_groups):
                group["lr"] *= 0.5
            release.at(step, descent.paces([1.0] * 5, numbers_of(one)))
        release.launch()
        assert all(bool((total != 2.0).all()) for total in totals)
        for parameter, released in zip(theirs, totals, strict=True):
            parameter.grad = released.clone()
        other.step()
    for mine, right in zip(ours, theirs, strict=True):
        # The interpreter rounds the product of a fused multiplication and addition, which a GPU does not.
        torch.testing.assert_close(mine, right, rtol=0 if ON_GPU else 1e-6, atol=0 if ON_GPU else 1e-6)
    if descent.velocities:
        kept = [other.state[p]["momentum_buffer"] for p in theirs]
        torch.testing.assert_close(descent.velocities, kept, rtol=0 if ON_GPU else 1e-6, atol=0 if ON_GPU else 1e-6)


def test_a_rate_that_changes_every_step_needs_no_other_recording(studio: Studio | None) -> None:
    def falling(run: Run, step: int) -> None:
        for name, factor in (("lr", 0.9), ("momentum", 0.99), ("weight_decay", 1.1)):
            run.optimizer.param_groups[0][name] *= factor

    captured = Run(captured=True, steps=12).train(falling)
    assert_same(captured, Run(captured=False, steps=12).train(falling))
    if studio is not None:
        assert studio.replays == [2, 10]


def test_decay_that_begins_is_seen(studio: Studio | None) -> None:
    def begin(run: Run, step: int) -> None:
        run.optimizer.param_groups[0]["weight_decay"] = 0.1 if 5 <= step < 9 else 0.0

    captured = Run(captured=True, kind="plain", steps=14).train(begin)
    assert_same(captured, Run(captured=False, kind="plain", steps=14).train(begin))


def test_frozen_parameters_in_the_optimizer_are_passed_over(studio: Studio | None) -> None:
    def start(captured: bool) -> Run:
        run = Run(captured=captured, kind="sgd", steps=8)
        run.optimizer.add_param_group({"params": [torch.ones(2, device=DEVICE)], "momentum": 0.9, "nesterov": True})
        return run

    captured = start(True).train()
    assert_same(captured, start(False).train())
    assert captured.optimizer.param_groups[1]["params"][0].tolist() == [1.0, 1.0]
    if studio is not None:
        assert studio.replays == [2, 6]


def upwards(run: Run) -> None:
    run.optimizer.param_groups[0]["maximize"] = True


def by_columns(run: Run) -> None:
    """A weight that does not lie row by row."""
    weight = run.model[0].weight
    weight.data = weight.data.t().contiguous().t()


@pytest.mark.parametrize("change", [upwards, by_columns], ids=lambda function: function.__name__)
def test_what_the_kernel_cannot_do_the_optimizer_does(change: Callable[[Run], None], studio: Studio | None) -> None:
    runs = [Run(captured=captured, kind="plain", steps=10) for captured in (True, False)]
    for run in runs:
        change(run)
    captured, plain = (run.train() for run in runs)
    assert_same(captured, plain)


def test_only_plain_steps_are_read() -> None:
    weight, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)

    def read(*groups: dict[str, Any], **settings: Any) -> bool:
        optimizer = torch.optim.SGD(groups or [weight], **{"lr": 1} | settings)
        return bool(numbers_of(optimizer)) and descent_of(optimizer, [weight]) is not None

    assert read() and read(weight_decay=0.1)
    assert not read(lr=torch.tensor(0.1))
    assert not read(maximize=True) and not read(fused=True) and not read(differentiable=True)
    assert read({"params": [weight]}, {"params": [other], "lr": 0.5})
    assert not read({"params": [weight]}, {"params": [other], "weight_decay": 0.5}), "one kernel for all"
    assert not read({"params": [other]}), "not its parameter"
    assert not read(momentum=0.9), "no velocity yet"
