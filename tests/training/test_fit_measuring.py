"""What fit measures, by what it may choose, and what it gives back: held-out sets, averages, schedules, diagnostics."""

import math
import re
from pathlib import Path

import pytest
import torch
from support.small_fit import BUDGET, blobs, network, run
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from hush.clipping.clips import FlatClip
from hush.gradients.functional import per_example
from hush.training import Averaging, HeldOut, Scheduler, paper_schedule


def test_schedulers() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = paper_schedule(optimizer, steps_per_epoch=2)
    result = run(model, optimizer=optimizer, callbacks=[Scheduler(schedule)], lot_size=200, epochs=12)
    rates = [entry["learning_rate"] for entry in result.history]
    assert rates[0] == pytest.approx(0.1) and rates[5] == pytest.approx(0.076)
    assert rates[10] == rates[12] == pytest.approx(0.052)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    by_epoch = run(model, optimizer=optimizer, callbacks=[Scheduler(StepLR(optimizer, 1, 0.5), every="epoch")])
    assert [entry["learning_rate"] for entry in by_epoch.history] == pytest.approx([0.1, 0.05, 0.025, 0.0125])
    with pytest.raises(ValueError, match="ReduceLROnPlateau reads a metric"):
        run(model, optimizer=optimizer, callbacks=[Scheduler(ReduceLROnPlateau(optimizer))])
    with pytest.raises(ValueError, match="ReduceLROnPlateau reads a metric"):
        run(
            model,
            optimizer=optimizer,
            callbacks=[Scheduler(ReduceLROnPlateau(optimizer))],
            held_out=HeldOut(data=blobs()),
        )
    with pytest.raises(ValueError, match="another optimizer"):
        run(callbacks=[Scheduler(StepLR(optimizer, 1))])
    with pytest.raises(TypeError, match="expected a scheduler"):
        Scheduler("cosine")
    with pytest.raises(TypeError, match=r"a scheduler of torch goes into hush.Scheduler"):
        run(callbacks=[StepLR(optimizer, 1)])
    public = HeldOut(data=blobs(100, seed=3), public=True)
    plateau = ReduceLROnPlateau(optimizer, mode="max", patience=0, factor=0.1)
    result = run(model, optimizer=optimizer, callbacks=[Scheduler(plateau)], held_out=public)
    assert result.history[-1]["learning_rate"] <= result.history[0]["learning_rate"]


def test_held_out_choices_are_named_in_the_statement() -> None:
    values = iter([0.1, 0.9, 0.3, 0.2, 0.25])

    def metric_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return torch.full((len(y),), next(values) if len(y) == 50 else 0.0, dtype=torch.float64)

    model = network()
    held_out = HeldOut(data=blobs(50, seed=2), metric_of=metric_of, choose="best", patience=2, name="my patients")
    result = run(model, held_out=held_out, epochs=10)
    assert result.ended == "held-out" and result.steps == 30
    assert result.measured == pytest.approx(0.9)
    assert result.epsilon.upper > 0.99 * BUDGET.epsilon, "the whole plan is paid for"
    assert any("my patients" in line and "choose" in line for line in result.statement.not_covered)
    public = run(held_out=HeldOut(data=blobs(50, seed=2), public=True))
    assert not any("test set" in line for line in public.statement.not_covered)


def test_averaging_gives_back_the_average() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="none")

    held_out = HeldOut(
        data=blobs(200, seed=1),
        public=True,
        metric_of=per_example(F.cross_entropy),
        label="loss",
        larger_is_better=False,
    )
    smooth, plain = run(callbacks=[Averaging(0.9)], held_out=held_out, seed=1), run(held_out=held_out, seed=1)
    for result in (smooth, plain):
        with torch.no_grad():
            value = loss(result.model(held_out.data[0]), held_out.data[1]).mean().item()
        assert value == pytest.approx(result.measured, rel=1e-5)
    assert smooth.measured != pytest.approx(plain.measured, rel=1e-4)


def test_unsafe_diagnostics_only_under_their_name() -> None:
    result = run(unsafe_diagnostics=True, clip=FlatClip(0.05))
    assert 0 <= result.history[-1]["unsafe_clipped_share"] <= 1 and result.history[0]["unsafe_clipped_share"] > 0.9
    assert math.isfinite(result.history[-1]["unsafe_training_loss"])
    assert any("Unsafe diagnostics" in line for line in result.statement.not_covered)
    assert not any("Unsafe" in line for line in run().statement.not_covered)


def test_a_metric_that_is_not_finite_does_not_end_the_run(tmp_path: Path) -> None:
    nothing = HeldOut(
        data=blobs(50, seed=1), public=True, metric_of=lambda model, x, y: torch.full((len(y),), math.nan), label="odd"
    )
    result = run(held_out=nothing, out=tmp_path / "run")
    assert result.ended == "finished" and result.measured is None
    with pytest.raises(ValueError, match="meaning of its own"):
        HeldOut(data=blobs(50), label="epsilon")


def test_a_result_prints_in_one_line() -> None:
    assert re.fullmatch(
        r"Result\(finished after 30 steps, epsilon 3 \(at least 2.99\d*\) at delta 0.0001, measured None\)", str(run())
    )
    assert "NOT PRIVATE" in repr(run(seed=1))
