"""TensorBoard event files as TensorBoard itself reads them: the history of the run, in any order of crashes."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.small_fit import blobs, run
from support.small_job import Crash, job, train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hush.training import HeldOut, Job, TensorBoard


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Step and value of every scalar in a folder of event files."""
    events = EventAccumulator(str(folder))
    events.Reload()
    return {name: [(one.step, one.value) for one in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_event_files_hold_the_history_and_nothing_else(tmp_path: Path) -> None:
    held_out = HeldOut(data=blobs(100, seed=1), public=True)
    result = run(callbacks=[TensorBoard()], out=tmp_path / "run", held_out=held_out)
    found = read(tmp_path / "run" / "tensorboard")
    assert set(found) == {"epsilon", "learning_rate", "accuracy"}, "nothing that was computed from training records"
    for name, points in found.items():
        assert [step for step, _ in points] == [0, 10, 20, 30]
        for (_, value), entry in zip(points, result.history, strict=True):
            assert math.isclose(value, entry[name], rel_tol=1e-6)


def with_files(crash_at: int | None = None) -> Job:
    made = job(crash_at)
    return replace(made, callbacks=[*made.callbacks, TensorBoard()])


def test_event_files_do_not_tell_how_long_an_epoch_took(tmp_path: Path) -> None:
    """That follows the sizes of the lots: all entries have one time, in whole minutes."""
    run(callbacks=[TensorBoard()], out=tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    (moment,) = {one.wall_time for name in events.Tags()["scalars"] for one in events.Scalars(name)}
    assert moment % 60 == 0


def test_a_resumed_run_goes_on_in_the_same_folder(tmp_path: Path) -> None:
    with pytest.raises(Crash):
        train(with_files(crash_at=3), tmp_path / "run")
    train(with_files(), tmp_path / "run", resume=True)
    found = read(tmp_path / "run" / "tensorboard")
    assert sorted({step for step, _ in found["epsilon"]}) == [0, 10, 20, 30, 40, 50]


def test_no_private_value_reaches_event_files(tmp_path: Path) -> None:
    run(callbacks=[TensorBoard()], out=tmp_path / "run", unsafe_diagnostics=True)
    assert set(read(tmp_path / "run" / "tensorboard")) == {"epsilon", "learning_rate"}


def test_it_is_refused_before_anything_is_charged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="give Run"):
        run(callbacks=[TensorBoard()])
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match="not installed: pip install tensorboard"):
        run(callbacks=[TensorBoard()], out=tmp_path / "other")
    assert not (tmp_path / "other").exists()
