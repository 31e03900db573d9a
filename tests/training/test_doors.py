"""What `fit` refuses before it is charged, what it leaves behind, and what it tells."""

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_fit import BUDGET, blobs, network, run
from support.small_job import Crash, job, train
from torch import nn

from hush.clipping.clips import FlatClip
from hush.errors import NotSupported
from hush.ledger import Ledger, LedgerError, checkpoints
from hush.ledger.owned import FolderInUse
from hush.plan import Plan
from hush.private import Private
from hush.sampling.lots import PoissonLots
from hush.training import About, Averaging, HeldOut, PrivacyWarning, Run, Scheduler, TensorBoard

NAME = "\x1b[8m</b>[/red]\u202e\nspent: epsilon 0"


def test_a_second_run_in_the_same_folder_is_refused_before_it_is_charged(tmp_path: Path) -> None:
    book, refused = tmp_path / "data.hush", []
    Ledger(book, create=True).close()

    def metric_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if len(x) == 100 and not refused:
            with pytest.raises(FolderInUse, match="another run is at work") as caught:
                run(out=tmp_path / "run", ledger=book)
            refused.append(caught)
        return (model(x).argmax(1) == y).float()

    run(out=tmp_path / "run", ledger=book, held_out=HeldOut(data=blobs(100, seed=1), public=True, metric_of=metric_of))
    assert refused
    with Ledger(book) as ledger:
        assert len(ledger.accounts()) == 1
    assert not list((tmp_path / "run").rglob(".hush*")), "nothing of the lock stays"


BAD: list[tuple[str, dict[str, Any]]] = [
    ("lot_size must be a whole number", {"lot_size": 2.5}),
    ("lot_size must be a whole number", {"lot_size": True}),
    ("at most the number of examples", {"lot_size": 401}),
    ("epochs must be a number", {"epochs": float("nan")}),
    ("epochs must be a number", {"epochs": -1}),
    ("epochs must be a number", {"epochs": "3"}),
    ("batch_size must be", {"batch_size": -4}),
    ("noise_multiplier must be a number", {"noise_multiplier": float("inf")}),
    ("noise_multiplier must be a number", {"noise_multiplier": 0.001}),
    ("sampling must be one of", {"sampling": "cyclic"}),
    ("reserve must be a whole number", {"reserve": -1}),
    ("accountant must be one of", {"accountant": "strong-paper"}),
    ("checkpoint_every must be", {"checkpoint_every": 0}),
    ("noise must be one of", {"noise": "laplace"}),
    ("seed must be a whole number", {"seed": 1.5}),
    ("name must be text", {"name": None}),
    ("folder must be a path", {"out": ""}),
    ("expected a folder that can be written", {"out": "/dev/null/x"}),
    ("several patterns", {"about": About(public_buffers="bank")}),
    ("workers must be", {"workers": -1}),
    ("cannot be measured: ValueError: .* got 3 parts", {"held_out": HeldOut(data=(*blobs(9, seed=1), torch.zeros(9)))}),
    ("cannot be measured: RuntimeError: mat1", {"held_out": HeldOut(data=(torch.zeros(9, 7), torch.zeros(9)))}),
    ("one value for each of 8 records", {"held_out": HeldOut(data=blobs(9), metric_of=lambda model, x, y: x.sum())}),
    ("cannot be measured: ValueError: the test set is empty", {"held_out": HeldOut(data=blobs(0))}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "changes"), BAD, ids=lambda value: next(iter(value)) if isinstance(value, dict) else ""
)
def test_what_cannot_work_costs_nothing_and_leaves_nothing(
    words: str, changes: dict[str, Any], tmp_path: Path
) -> None:  # fmt: skip
    with Ledger(tmp_path / "x.hush", budget=BUDGET) as ledger:
        with pytest.raises((TypeError, ValueError), match=words) as caught:
            run(ledger=ledger, **{"out": tmp_path / "run"} | changes)
        assert "\n" not in str(caught.value)
        assert not ledger.accounts() and not (tmp_path / "run").exists()


def test_a_label_that_the_model_does_not_know_is_found_before_the_charge(tmp_path: Path) -> None:
    x, y = blobs()
    y[317] = 2  # one record of a third class, for a model with two
    with pytest.raises((IndexError, ValueError, RuntimeError), match=r"bounds|range"):
        run(data=(x, y), out=tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_held_out_values_are_handed_in_as_whole_numbers_or_refused() -> None:
    for changes in (
        {"every": 1.5},
        {"every": 0},
        {"patience": True},
        {"choose": "first"},
        {"label": ""},
        {"metric_of": 3},
    ):
        with pytest.raises((TypeError, ValueError)):
            HeldOut(data=blobs(9), **changes)  # type: ignore[arg-type]


def test_a_lost_checkpoint_is_said_and_never_begun_anew(tmp_path: Path) -> None:
    with pytest.raises(Crash):
        train(job(crash_at=2), tmp_path / "run")
    for file in (tmp_path / "run" / "checkpoint").glob("*/facts.json"):
        file.unlink()
    with Ledger(tmp_path / "run" / "ledger.hush") as ledger:
        before = ledger.head()
    with pytest.raises(ValueError, match=r"expected a checkpoint in .* came none beside ledger.hush, checkpoint"):
        train(job(), tmp_path / "run", resume=True)
    with Ledger(tmp_path / "run" / "ledger.hush") as ledger:
        assert ledger.head() == before
    with pytest.warns(PrivacyWarning, match="no run in .* to resume"):
        train(job(), tmp_path / "other", resume=True)


def test_a_mistyped_ledger_is_said_and_never_made(tmp_path: Path) -> None:
    with pytest.raises(Crash):
        train(job(crash_at=2), tmp_path / "run", ledger=tmp_path / "data.hush", create_ledger=True)
    with pytest.raises(LedgerError, match=r"has charged, .*data\.hush; came .*date\.hush, where there is none"):
        train(job(), tmp_path / "run", ledger=tmp_path / "date.hush", resume=True)
    assert not (tmp_path / "date.hush").exists()


def test_a_report_that_cannot_be_written_is_a_warning_beside_the_result(tmp_path: Path) -> None:
    (tmp_path / "run" / "report.txt").mkdir(parents=True)
    (tmp_path / "run" / "report.txt" / "something").touch()
    with pytest.warns(PrivacyWarning, match=r"the report was not written: .*report\.txt"):
        result = run(out=tmp_path / "run")
    assert (
        result.report is None
        and result.epsilon.upper <= BUDGET.epsilon
        and "differentially private" in str(result.statement)
    )
    assert (tmp_path / "run" / "model.pt").exists()


def test_a_folder_with_any_name_gets_its_report(tmp_path: Path) -> None:
    for name in (os.fsdecode(b"\xff run"), "\x1b[31mred\x07", "\u202eelif", "a" * 200, "[bold]x[/nothing]"):
        report = run(out=tmp_path / name).report
        assert report is not None and report.html.exists()
        text = report.text.read_text()
        assert text.replace("\n", "").isprintable(), name


def test_names_reach_no_report_and_no_terminal_raw(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    held_out = HeldOut(data=blobs(100, seed=1), name=NAME, label=NAME)
    result = run(out=tmp_path / "run", name=NAME, about=About(settings_from=NAME), held_out=held_out, progress=True)
    assert result.report is not None
    shown = [str(result.statement), result.report.text.read_text(), capfd.readouterr().err]
    for text in (*shown, result.report.json.read_text(), result.report.html.read_text()):
        assert all(line.isprintable() for line in text.split("\n") if line), [c for c in text if not c.isprintable()][
            :5
        ]
        assert not any(line.startswith("spent: epsilon 0") for line in text.splitlines())
    assert "\\x1b[8m" in shown[0] and "&lt;/b&gt;" in result.report.html.read_text()
    assert "</b>[/red]" not in result.report.html.read_text()


def test_a_bar_takes_a_label_for_text_and_not_for_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    import io
    import sys

    from hush.training.progress import Progress

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    monkeypatch.setenv("COLUMNS", "200")
    with Progress(steps=9, steps_per_epoch=3, lot_size=5, budget=BUDGET) as progress:
        progress.learn(epsilon=1.0, note="loss[/red]\x1b[8m 0.5")
        progress.reach(9)
    assert "loss[/red]\\x1b[8m 0.5" in stream.getvalue()


def test_times_are_rounded_and_sizes_are_as_planned(tmp_path: Path) -> None:
    result = run(out=tmp_path / "run", batch_size=16)
    facts = json.loads((tmp_path / "run" / "report.json").read_text())["facts"]
    assert facts["seconds"] == result.seconds == int(result.seconds) and facts["batch_size"] == 16
    saved = checkpoints.load(tmp_path / "run" / "checkpoint").facts
    assert isinstance(saved["seconds"], int) and saved["batch_size"] == 16


def test_everything_in_a_runs_folder_is_its_owners(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run(out=tmp_path / "run", callbacks=[TensorBoard()])
    for path in [tmp_path / "run", *(tmp_path / "run").rglob("*")]:
        if "events.out" not in path.name:  # their folder is closed
            assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path


def test_settings_are_named_among_what_is_not_covered_whoever_says_how_they_were_chosen() -> None:
    for words in ("", "a grid search on this very training set"):
        (line,) = [
            line for line in run(about=About(settings_from=words)).statement.not_covered if "choice of settings" in line
        ]
        assert words in line and "nothing was charged" in line


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(NotSupported, match="a world of 2"):
        run(out=tmp_path / "run")
    plan = Plan(lots=PoissonLots(examples=100, lot_size=10), steps=3, clip=FlatClip(1.0), noise_multiplier=1.0)
    with pytest.raises(NotSupported, match="expected one process"):
        Private(nn.Linear(2, 1), plan, losses_of, ledger=tmp_path / "x.hush")
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("WORLD_SIZE", "1")
    Private(nn.Linear(2, 1), plan, losses_of)


def losses_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().sum(1)


def test_numpys_whole_numbers_are_taken() -> None:
    import numpy as np

    taken = Run(seed=np.int32(4), checkpoint_every=np.int64(3))  # type: ignore[arg-type]
    assert type(taken.seed) is int and type(taken.checkpoint_every) is int
    assert run(lot_size=np.int64(40), model=network()).steps == 30


def test_callbacks_refuse_what_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="decay must be a number"):
        Averaging(1.0)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(ValueError, match="every must be one of"):
        Scheduler(torch.optim.lr_scheduler.StepLR(optimizer, 1), every="lot")  # type: ignore[arg-type]


def test_files_of_somebody_else_are_not_written_over(tmp_path: Path) -> None:
    for name in ("model.pt", "report.txt", "report.json", "report.html"):
        folder = tmp_path / name.replace(".", "-")
        folder.mkdir()
        (folder / name).write_text("a week of work")
        with pytest.raises(ValueError, match=f"{name} and no checkpoint"):
            run(out=folder)
        assert [one.name for one in folder.iterdir()] == [name] and (folder / name).read_text() == "a week of work"


def test_a_run_stays_in_its_folder_when_the_working_directory_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)

    class Mover(Averaging):
        def after_step(self, step: int, *, epoch_ended: bool) -> None:
            os.chdir(tmp_path / "elsewhere")

    run(out="mine", checkpoint_every=2, callbacks=[Mover(0.5)])
    assert not list((tmp_path / "elsewhere").iterdir())
    assert {"checkpoint", "model.pt", "report.html"} <= {one.name for one in (tmp_path / "mine").iterdir()}
    assert not list((tmp_path / "mine").rglob(".hush*"))


@pytest.mark.parametrize("name", [".", " blank", "cafe\u0301", "no\xa0break", "\u3000", "tab\there"])
def test_any_name_that_a_folder_can_have_names_an_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    run(out=name, epochs=1)
    with Ledger(tmp_path / name / "ledger.hush") as ledger:
        assert ledger.accounts()[0].closed


def test_a_checkpoint_that_cannot_be_written_is_found_before_the_charge(tmp_path: Path) -> None:
    book = tmp_path / "data.hush"
    Ledger(book, create=True).close()
    for folder in ("file", "link"):
        (tmp_path / folder).mkdir()
    (tmp_path / "file" / "checkpoint").write_text("mine")
    (tmp_path / "link" / "checkpoint").symlink_to(tmp_path / "nowhere")
    for folder in ("file", "link"):
        with pytest.raises(ValueError, match="folder that can be written"):
            run(out=tmp_path / folder, ledger=book)
        assert [one.name for one in (tmp_path / folder).iterdir()] == ["checkpoint"]
    with Ledger(book) as ledger:
        assert ledger.accounts() == []


def test_inexact_noise_is_on_the_ledger_with_its_distance(tmp_path: Path) -> None:
    for out in (tmp_path / "run", None):
        book = tmp_path / f"{out is None}.hush"
        result = run(out=out, noise="float_safe", ledger=book, create_ledger=True, epochs=1)
        with Ledger(book) as ledger:
            (account,) = ledger.accounts()
        assert account.distance == result.statement.facts["distance"] > 0
