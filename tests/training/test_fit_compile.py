"""When fit lets the compiler in: long runs on a GPU, decided by the plan and the time of a batch, and never in the way.

The device is played: captures are noted, and the run itself goes on as on any device.
"""

from typing import Any

import pytest
import torch
from support.small_fit import blobs, network
from torch.nn import functional as F

from hush.clipping.clips import FlatClip
from hush.gradients.engine import Inputs
from hush.gradients.functional import per_example
from hush.gradients.sums.lot_sum import LotSum
from hush.noise.release import Due
from hush.plan import Plan
from hush.private import Private
from hush.sampling.batches import Batch
from hush.sampling.lots import PoissonLots
from hush.training.compiling import Trial
from hush.training.physical_batches import LotRunner

GPU = torch.device("cuda")


class Played:
    """Stands where a captured run would; its compiled batches can be made to fail."""

    def __init__(self, private: Private, seconds: float) -> None:
        self.asked: list[bool] = []
        self.failure: Exception | None = None
        self.batches = 0
        self.now = 0.0
        self._private, self._seconds = private, seconds

    def begin_anew(self, *, compile: bool) -> None:
        self.asked.append(compile)

    def add(self, lot: LotSum, inputs: Inputs, batch: Batch, due: Due) -> None:
        self.batches += 1
        self.now += self._seconds
        if self.asked[-1] and self.failure is not None:
            raise self.failure
        mask = batch.counting(torch.device("cpu"))
        lot.add(self._private.gradients.clipped_sum(inputs, due.clip, mask=mask, rows=batch.size), due.clip)

    def compute(self) -> None:
        pass

    def step(self, *_: Any) -> None:
        return None


class Watched:
    """A run of which we know which captures it was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, batch_seconds: float, steps: int = 1000) -> None:
        model, lots = network(), PoissonLots(examples=400, lot_size=40)
        plan = Plan(lots=lots, steps=steps, clip=FlatClip(1.0), noise_multiplier=1.0)
        self.private = Private(model, plan, per_example(F.cross_entropy), data=blobs(), seed=0)
        self.played = Played(self.private, batch_seconds)
        self.private.captured = self.played  # type: ignore[assignment]
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        monkeypatch.setattr("hush.training.compiling.time.perf_counter", lambda: self.played.now)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)

    def train(self, steps: int, *, size: int = 80, device: torch.device = GPU, compile: Any = "auto") -> LotRunner:
        runner = LotRunner(self.private, size, device, padded=True, compile=compile)
        self.played.asked = [compile is True]
        lots = self.private.lots()
        for _ in range(steps):
            runner(next(lots))
            self.private.step(self.optimizer)
        return runner


def test_a_long_run_is_compiled_after_a_few_timed_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Watched(monkeypatch, batch_seconds=0.2)  # 994 batches are left after the trial: 199 seconds
    run.train(10)
    assert run.played.asked == [False, True]


def test_a_short_run_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Watched(monkeypatch, batch_seconds=0.17)
    run.train(10)
    assert run.played.asked == [False]


def test_batches_of_a_lot_are_counted_as_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Watched(monkeypatch, batch_seconds=0.05)
    run.train(10, size=10)  # four batches for a lot of 40, whatever the lots really hold
    assert run.played.asked == [False, True]


@pytest.mark.parametrize("captured", [False, True])
def test_nothing_is_tried_where_nothing_is_captured(monkeypatch: pytest.MonkeyPatch, captured: bool) -> None:
    run = Watched(monkeypatch, batch_seconds=100.0)
    run.private.captured = run.private.captured if captured else None
    run.train(10, compile=False if captured else "auto")
    assert run.played.asked == [False]


def test_what_cannot_be_compiled_goes_on_captured_and_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Watched(monkeypatch, batch_seconds=1.0)
    run.played.failure = NotImplementedError("an operator that the compiler does not know")
    with pytest.warns(RuntimeWarning, match="goes on without: an operator"):
        runner = run.train(10)
    assert run.played.asked == [False, True, False] and runner.size == 80
    assert run.played.batches == 11, "the lot that failed began again"
    plain = Watched(monkeypatch, batch_seconds=1.0)
    plain.train(10, compile=False)
    for one, other in zip(run.private.model.parameters(), plain.private.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_compiling_that_was_asked_for_says_why_it_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Watched(monkeypatch, batch_seconds=1.0)
    run.played.failure = NotImplementedError("an operator that the compiler does not know")
    with pytest.raises(NotImplementedError):
        run.train(1, compile=True)


def test_a_trial_leaves_the_captured_batch_out() -> None:
    trial = Trial(torch.device("cpu"))
    naps = iter([5.0, *[0.1] * 5])
    with pytest.MonkeyPatch.context() as patch:
        now = [0.0]
        patch.setattr("hush.training.compiling.time.perf_counter", lambda: now[0])
        while not trial.over:
            trial(lambda: now.__setitem__(0, now[0] + next(naps)))
    assert not trial.pays(batches_left=1700) and trial.pays(batches_left=1900)
