"""Captured steps give the numbers of plain ones, whatever happens between them. Without a GPU graphs are played."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.captured_run import ON_GPU, N, Run, assert_same, fresh_noise, optimizers
from support.recorder import Studio, play_graphs_on_cpu

pytest.importorskip("triton")

from hush.captured import cuda_graphs as graphs
from hush.clipping.clips import FlatClip, QuantileClip
from hush.sampling.lots import PoissonLots


@pytest.fixture
def studio(monkeypatch: pytest.MonkeyPatch) -> Studio | None:
    return None if ON_GPU else play_graphs_on_cpu(monkeypatch)


@pytest.mark.parametrize("kind", optimizers())
def test_captured_steps_equal_plain_steps(kind: str, studio: Studio | None) -> None:
    captured = Run(captured=True, kind=kind).train()
    assert_same(captured, Run(captured=False, kind=kind).train())
    assert fresh_noise(captured)
    if studio is not None:
        expected = {"plain": [1, 7], "sgd": [2, 6]}
        assert studio.replays == expected.get(kind, [8]), "the region alone first, then the whole step as one launch"


@pytest.mark.parametrize(
    "changes",
    [
        {"size": 16},  # nearly every lot spills
        {"size": 22},  # some do
        {"lots": PoissonLots(examples=N, lot_size=1), "steps": 12},  # a third of the lots are empty
        {"noise_multiplier": lambda step: 1.0 + step % 3},
        {"clip": FlatClip(lambda step: 1.0 + step % 2)},
        {"clip": FlatClip(lambda step: 1.0 + step // 4)},
        {"clip": QuantileClip(initial=1.0, count_noise=5.0)},
        {"noise_multiplier": 0.0},
        {"noise": "float_safe", "kind": "plain", "steps": 3},
        {"dtype": torch.bfloat16},  # sums in float32, parameters not
    ],
    ids=["spilled", "sometimes", "empty", "noise", "clip", "two clips", "quantile", "no noise", "discrete", "half"],
)
def test_lots_of_every_kind_equal_plain_ones(changes: dict[str, Any], studio: Studio | None) -> None:
    captured, plain = Run(captured=True, **changes).train(), Run(captured=False, **changes).train()
    assert_same(captured, plain)
    assert fresh_noise(captured) or changes.get("noise_multiplier") == 0.0


def change_rate(run: Run, step: int) -> None:
    run.optimizer.param_groups[0]["lr"] = 0.1 / (1 + step // 4)


def change_rate_always(run: Run, step: int) -> None:
    run.optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)


def load_parameters(run: Run, step: int) -> None:
    if step == 5:
        run.model.load_state_dict({name: 2 * value for name, value in run.model.state_dict().items()})


def move_parameters(run: Run, step: int) -> None:
    if step == 5:
        for parameter in run.model.parameters():
            parameter.data = 2 * parameter.data


def freeze(run: Run, step: int) -> None:
    run.model[0].weight.requires_grad_(step not in (4, 5, 6))


def change_mode(run: Run, step: int) -> None:
    run.model[2].train(step == 5)


def look_on(run: Run, step: int) -> None:
    run.model.eval()(run.x)
    run.model.train()[2].eval()


def swap_optimizer(run: Run, step: int) -> None:
    if step == 6:
        run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.02, momentum=0.5)


def resume(run: Run, step: int) -> None:
    if step == 6:
        run.private._load(run.private.state_dict())


@pytest.mark.parametrize(
    "between",
    [
        change_rate,
        change_rate_always,
        load_parameters,
        move_parameters,
        freeze,
        change_mode,
        look_on,
        swap_optimizer,
        resume,
    ],
    ids=lambda function: function.__name__,
)
def test_what_changes_between_steps_is_seen(between: Callable[[Run, int], None], studio: Studio | None) -> None:
    captured = Run(captured=True, steps=12).train(between)
    assert_same(captured, Run(captured=False, steps=12).train(between))
    assert fresh_noise(captured)
    if studio is not None and between is look_on:
        assert studio.replays == [2, 10], "the same modes again are nothing new"


def test_a_learning_rate_in_a_host_tensor_is_not_frozen_into_the_graph(studio: Studio | None) -> None:
    def start(captured: bool) -> Run:
        run = Run(captured=captured, kind="plain", steps=12)
        run.optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
        return run

    def halve(run: Run, step: int) -> None:
        if step == 7:
            run.optimizer.param_groups[0]["lr"].mul_(0.5)

    assert_same(start(True).train(halve), start(False).train(halve))


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("kind", ["adamw", "fused"])
def test_a_learning_rate_on_the_device_changes_every_step_without_another_capture(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded, real = [], graphs.record

    def record(function: Callable[[], Any], *, beside: Any = None) -> Any:
        recorded.append(beside)
        return real(function, beside=beside)

    def halve(run: Run, step: int) -> None:
        schedules[run].step()

    monkeypatch.setattr(graphs, "record", record)
    runs = [Run(captured=captured, kind=kind, steps=12) for captured in (True, False)]
    schedules = {run: torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.5) for run in runs}
    captured, plain = [run.train(halve) for run in runs]
    assert_same(captured, plain)
    assert len(recorded) == 2, "the region, and the whole step"


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("kind", ["plain", "sgd", "adam"])
def test_a_captured_step_waits_for_nothing(kind: str) -> None:
    run = Run(captured=True, kind=kind, steps=12)
    rows = run.x, run.y
    try:
        for lot in run.private.lots():
            looked_at = lot.step & (lot.step - 1) == 0  # a look at a real batch waits for its result
            torch.cuda.set_sync_debug_mode("error" if lot.step > 4 and not looked_at else "default")
            for batch in lot.batches(N, pad=True):
                run.private.add(batch, *rows)
            run.private.step(run.optimizer)
    finally:
        torch.cuda.set_sync_debug_mode("default")
