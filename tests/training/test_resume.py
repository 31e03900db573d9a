"""Runs that are interrupted: exceptions, kills, and what the resumed run does with what is left of its account."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.recorder import play_graphs_on_cpu
from support.small_fit import BUDGET, blobs
from support.small_job import Crash, job, same, train
from support.watching import watch
from torch import Tensor, nn
from torch.nn import functional as F

from hush.accounting import Budget, Gaussian
from hush.clipping.clips import FlatClip
from hush.ledger import DataNotLinked, Ledger, LedgerError, checkpoints
from hush.plan import PrivatePreprocessing
from hush.training import About, Callback, HeldOut, Job, PrivacyWarning


def test_hazard_22_a_seeded_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole = train(job(), tmp_path / "whole", seed=4)
    with pytest.raises(Crash):
        train(job(crash_at=3), tmp_path / "cut", seed=4, checkpoint_every=7)
    resumed = train(job(), tmp_path / "cut", seed=4, checkpoint_every=7, resume=True)
    assert resumed.ended == whole.ended == "finished" and resumed.steps == 50
    assert same(resumed.model, whole.model)
    label = "accuracy"
    assert [entry[label] for entry in resumed.history] == [entry[label] for entry in whole.history]
    assert resumed.statement.facts["resumed"] == 1 and "once from checkpoints" in str(resumed.statement)


def test_hazard_22_a_captured_run_with_dropout_resumes_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Capturing runs the model a few times; that must not move the random numbers of the steps."""
    pytest.importorskip("triton")
    studio = play_graphs_on_cpu(monkeypatch)
    whole = train(job(), tmp_path / "whole", seed=4)
    assert sum(studio.replays) > 40
    with pytest.raises(Crash):
        train(job(crash_at=3), tmp_path / "cut", seed=4, checkpoint_every=7)
    resumed = train(job(), tmp_path / "cut", seed=4, checkpoint_every=7, resume=True)
    assert resumed.steps == 50 and same(resumed.model, whole.model)


def test_hazard_22_a_secure_run_never_uses_its_noise_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch(monkeypatch)
    with pytest.raises(Crash):
        train(job(crash_at=3), tmp_path / "run", checkpoint_every=7)
    before = len(seen.multipliers)
    result = train(job(), tmp_path / "run", checkpoint_every=7, resume=True)
    assert result.ended == "finished" and before == 30 and len(seen.multipliers) == 30 + 50 - 28
    noise = result.statement.plan.noise_multiplier
    assert isinstance(noise, float)
    seen.check(steps=len(seen.multipliers), noise=noise, clip=1.0)
    with Ledger(tmp_path / "run" / "ledger.hush") as ledger:
        (page,) = ledger.accounts()
        assert page.closed and page.spent >= len(seen.multipliers), "lost steps stay spent"
    assert result.epsilon.upper <= BUDGET.epsilon


def test_without_a_reserve_the_resumed_run_ends_short_and_says_so(tmp_path: Path) -> None:
    with pytest.raises(Crash):
        train(job(crash_at=3), tmp_path / "run", reserve=0)
    with pytest.warns(PrivacyWarning, match="lost stay spent"):
        result = train(job(), tmp_path / "run", reserve=0, resume=True)
    assert result.ended == "account" and 20 <= result.steps < 50
    assert "ended short" in str(result.statement) and result.epsilon.upper <= BUDGET.epsilon
    with Ledger(tmp_path / "run" / "ledger.hush") as ledger:
        assert [page.spent for page in ledger.accounts()] == [50]


def test_a_finished_run_can_be_asked_again_and_an_unfinished_one_is_not_overwritten(tmp_path: Path) -> None:
    first = train(job(), tmp_path / "run")
    again = train(job(), tmp_path / "run", resume=True)
    assert same(first.model, again.model) and again.steps == 50 and again.epsilon == first.epsilon
    with pytest.raises(Crash):
        train(job(crash_at=2), tmp_path / "cut")
    with pytest.raises(ValueError, match="has not ended"):
        train(job(), tmp_path / "cut")
    with pytest.raises(ValueError, match="resume needs the folder"):
        train(job(), None, resume=True)
    with pytest.warns(PrivacyWarning, match=r"no run in .* to resume"):
        fresh = train(job(), tmp_path / "new", resume=True)
    assert fresh.ended == "finished" and fresh.statement.facts["resumed"] == 0


@pytest.mark.parametrize(
    ("changes", "how", "words"),
    [
        ({"lot_size": 50}, {}, "lots"),
        ({"clip": FlatClip(2.0)}, {}, "clip"),
        ({}, {"budget": Budget(epsilon=9.0, delta=1e-4)}, "budget"),
        ({}, {"seed": 3}, "seed"),
        ({"callbacks": []}, {}, "callbacks"),
        ({"held_out": HeldOut(data=blobs(100, seed=1))}, {}, "held-out data"),
        ({}, {"about": About(settings_from="on public data")}, "about"),
        ({}, {"reserve": 39}, "reserve"),
    ],
)
def test_a_run_resumes_only_as_what_it_began(tmp_path: Path, changes: Any, how: Any, words: str) -> None:
    with pytest.raises(Crash):
        train(job(crash_at=1), tmp_path / "run")
    with pytest.raises(ValueError, match=words):
        train(job(**changes), tmp_path / "run", resume=True, **how)


def test_hazard_32_a_run_does_not_resume_on_other_data(tmp_path: Path) -> None:
    with pytest.raises(Crash):
        train(job(crash_at=2), tmp_path / "run")
    with pytest.raises(DataNotLinked):
        train(job(data=blobs(seed=8)), tmp_path / "run", resume=True)


def test_a_ledger_that_was_taken_away_or_rolled_back_is_noticed(tmp_path: Path) -> None:
    book = tmp_path / "data.hush"
    Ledger(book, create=True).close()
    with pytest.raises(Crash):
        train(job(crash_at=2), tmp_path / "run", ledger=book)
    with pytest.raises(LedgerError, match="resume with the same ledger"):
        train(job(), tmp_path / "run", resume=True)
    book.unlink()
    with pytest.raises(LedgerError):
        train(job(), tmp_path / "run", resume=True, ledger=book)


def test_an_upfront_access_is_never_done_twice_for_one_price(tmp_path: Path) -> None:
    calls: list[int] = []

    def look(crash: bool) -> Callable[[], Gaussian]:
        def run() -> Gaussian:
            calls.append(1)
            if crash:
                raise Crash
            return Gaussian(5.0)

        return run

    def with_look(crash: bool, **changes: Any) -> Job:
        look_at = PrivatePreprocessing(name="a look", event=Gaussian(5.0), run=look(crash))
        return job(preprocessing=look_at, **changes)

    with pytest.raises(Crash):
        train(with_look(True), tmp_path / "run")
    with pytest.raises(ValueError, match="interrupted during its preprocessing"):
        train(with_look(False), tmp_path / "run", resume=True)
    with pytest.raises(Crash):
        train(with_look(False, crash_at=2), tmp_path / "other")
    result = train(with_look(False), tmp_path / "other", resume=True)
    assert len(calls) == 2 and result.ended == "finished"


def test_ctrl_c_loses_nothing_but_the_open_lot(tmp_path: Path) -> None:
    class AfterTwentySteps(Callback):
        due = False

        def after_step(self, step: int, *, epoch_ended: bool) -> None:
            self.due = step == 20

    interrupt = AfterTwentySteps()

    def losses_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if interrupt.due:  # somewhere in lot 20
            interrupt.due = False
            raise KeyboardInterrupt
        return F.cross_entropy(model(x), y, reduction="none")

    cut = job(losses_of=losses_of)
    with pytest.raises(KeyboardInterrupt):
        train(cut, tmp_path / "run", reserve=0, checkpoint_every=1000, callbacks=[*cut.callbacks, interrupt])
    saved = checkpoints.load(tmp_path / "run" / "checkpoint")
    done = saved.facts["run"]["step"]
    assert done == 21 == saved.facts["run"]["charged"], "twenty lots, and the one that was open"
    whole = job(losses_of=losses_of)
    result = train(whole, tmp_path / "run", reserve=0, resume=True, callbacks=[*whole.callbacks, interrupt])
    assert result.ended == "finished" and result.steps == 50


def _child(folder: Path, released: Path) -> None:
    """A whole run in a process of its own, which leaves a byte for every release."""
    import hush.noise.release
    from hush.noise.gaussian import add_noise

    file = os.open(released, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def noting(*args: Any, **rest: Any) -> Any:
        os.write(file, b"x")
        time.sleep(0.01)
        return add_noise(*args, **rest)

    hush.noise.release.add_noise = noting
    book = Ledger(folder.parent / "data.hush", create=True)
    train(job(), folder, ledger=book, resume=True, checkpoint_every=5)


def test_hazard_21_killed_at_any_moment_the_ledger_states_no_less_than_was_released(tmp_path: Path) -> None:
    folder, released, budget = tmp_path / "run", tmp_path / "released", BUDGET
    for wait in (0.25, 0.1, 0.05, None):
        process = os.fork()
        if process == 0:
            code = 1
            try:
                import warnings

                warnings.simplefilter("ignore")
                torch.set_num_threads(1)
                _child(folder, released)
                code = 0
            finally:
                os._exit(code)
        if wait is not None:
            size = released.stat().st_size if released.exists() else 0
            deadline = time.monotonic() + 60
            while not released.exists() or released.stat().st_size <= size:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            time.sleep(wait)
            os.kill(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
        assert os.WIFSIGNALED(status) == (wait is not None)
        with Ledger(tmp_path / "data.hush") as ledger:
            (page,) = ledger.accounts()
            assert page.spent >= released.stat().st_size
            assert ledger.spent(delta=budget.delta).upper <= budget.epsilon
    assert os.waitstatus_to_exitcode(status) == 0
    saved = checkpoints.load(folder / "checkpoint")
    assert saved.facts["ended"] in ("finished", "account") and saved.facts["resumed"] >= 1
    assert page.closed and page.spent <= page.total
    assert isinstance(saved.facts["history"][-1]["accuracy"], float)
