"""hush train and hush report as a person types them: JSON, messages of one line, resuming, jobs of one's own."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.command_line import call
from support.watching import watch

from hush.accounting import Gaussian, PoissonSampled, compose, epsilon
from hush.commands import recipe_job as recipes_of_train
from hush.ledger import Ledger
from hush.recipes import data
from hush.recipes.mnist import recipe

JOB = """
import torch
from torch import nn
import hush

def job():
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(300) % 2
    x = torch.randn(300, 4, generator=generator) + 2 * y[:, None]
    model = nn.Linear(4, 2)
    return hush.Job(model=model, data=(x, y), losses_of=hush.per_example(nn.functional.cross_entropy),
                    optimizer=torch.optim.SGD(model.parameters(), lr=0.5), lot_size=30, epochs=2,
                    clip=hush.FlatClip(1.0), held_out=hush.HeldOut(data=(x[:50] + 0.01, y[:50])))

def number():
    return 7

def broken():
    return 1 / 0
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "my_training.py"
    path.write_text(JOB)
    return path


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipes on the first 600 records, so that a test takes seconds."""
    whole = recipes_of_train.recipe_job

    def few(name: str, **rest: Any) -> Any:
        return whole(name, **rest, examples=600)

    monkeypatch.setattr(recipes_of_train, "recipe_job", few)


@pytest.mark.usefixtures("small")
def test_hazard_27_the_paper_recipe_is_clipped_noised_and_charged(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch(monkeypatch)
    found = recipe("mnist", model="paper", epsilon=2.0)
    code, out, err = call(
        capfd, "train", "mnist", "--epsilon", 2, "--delta", 1e-5, "--lot-size", 60, "--epochs", 3, "--device", "cpu",
        "--out", tmp_path / "run", "--ledger", tmp_path / "mnist.hush", "--json",
    )  # fmt: skip
    assert code == 0, err
    summary = json.loads(out.strip().splitlines()[-1])
    assert summary["steps"] == 30 and summary["accountant"] == "pld" and summary["private"] is True
    assert summary["delta"] == 1e-5 and summary["epsilon_lower"] <= summary["epsilon"] <= 2.0
    assert 0 <= summary["test_accuracy"] <= 1 and summary["seconds"] > 0
    assert Path(summary["report"]).name == "report.html" and Path(summary["report"]).exists()
    seen.check(steps=30, noise=summary["noise_multiplier"], clip=found.clip)
    assert found.pca_noise is not None
    steps = PoissonSampled(0.1, Gaussian(summary["noise_multiplier"]))
    whole = compose([(Gaussian(found.pca_noise), 1), (steps, 30)])
    assert summary["epsilon"] == epsilon(whole, delta=1e-5).upper
    with Ledger(tmp_path / "mnist.hush") as ledger:
        (page,) = ledger.accounts()
        assert page.closed and page.event(page.spent) == whole and page.data is not None
    code, out, _ = call(capfd, "report", tmp_path / "run")
    assert code == 0 and "DP-PCA" in out and "Not covered" in out and "differentially private" in out


@pytest.mark.usefixtures("small")
def test_the_best_recipe_trains(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(
        capfd,
        "train",
        "mnist",
        "--model",
        "best",
        "--lot-size",
        200,
        "--epochs",
        5,
        "--epsilon",
        8,
        "--json",
        "--device",
        "cpu",
    )
    assert code == 0, err
    assert json.loads(out.splitlines()[-1])["test_accuracy"] > 0.5


def test_records_that_settings_were_chosen_on_are_not_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do they count: lots are drawn from the others, and the data is named for what it is."""
    images = data.load("mnist")
    few = replace(images, train_x=images.train_x[:50], train_y=images.train_y[:50], test_x=images.test_x[:7],
                  test_y=images.test_y[:7])  # fmt: skip
    monkeypatch.setattr(recipes_of_train.data, "load", lambda name: few)
    found = replace(recipe("fashion-mnist", model="best", epsilon=3.0), parts=("lines",), set_aside=20, lot_size=6)
    job = recipes_of_train.recipe_job("fashion-mnist", found=found, device="cpu")
    x, y = job.data.data
    assert len(x) == len(y) == len(job.data.fingerprint[0]) == 30 and job.steps == found.epochs * 30 // 6
    assert torch.equal(y, few.train_y[:30])
    assert job.data.name == "the Fashion-MNIST training set less the last 20 records"
    assert recipe("fashion-mnist", model="best", epsilon=3.0).set_aside == 10_000


def test_a_job_of_ones_own(capfd: pytest.CaptureFixture[str], script: Path, tmp_path: Path) -> None:
    named = f"{script}:job"
    arguments = ("train", named, "--epsilon", 3, "--delta", 1e-4, "--device", "cpu", "--out", tmp_path / "run")
    code, out, err = call(capfd, *arguments)
    assert code == 0, err
    assert out.startswith("accuracy ") and "epsilon = 3" in out and "report.html" in out
    assert err.startswith("training: 20 steps on about 30 of 300 records each, noise multiplier ")
    assert "step 20 of 20" in err and "examples/s" in err
    assert "Records of the test set" in out, "a set that nobody declared public is named as not covered"
    code, out, _ = call(capfd, *arguments[:6], "--device", "cpu")
    assert code == 0 and "Nothing was kept" in out
    code, out, err = call(capfd, *arguments, "--resume", "--json")
    assert code == 0 and json.loads(out)["steps"] == 20
    code, out, _ = call(capfd, "report", tmp_path / "run", "--json")
    assert code == 0 and json.loads(out)["epsilon"] <= 3.0


def test_options_reach_the_run(capfd: pytest.CaptureFixture[str], script: Path) -> None:
    code, out, err = call(
        capfd, "train", f"{script}:job", "--delta", 1e-4, "--lot-size", 60, "--epochs", 4, "--clip", 0.5, "--seed", 3,
        "--batch-size", 16, "--reserve", 2, "--sampling", "shuffled", "--unsafe-diagnostics", "--device", "cpu",
    )  # fmt: skip
    assert code == 0, err
    for words in ("NOT PRIVATE", "FlatClip(bound=0.5)", "20 of 20 planned", "2 more in reserve", "batches of 16",
                  "shuffled", "Unsafe diagnostics"):  # fmt: skip
        assert words in " ".join(out.split()), words


def test_a_large_delta_is_warned_about_in_one_line(capfd: pytest.CaptureFixture[str], script: Path) -> None:
    code, _, err = call(capfd, "train", f"{script}:job", "--delta", 0.01, "--device", "cpu")
    warned = [line for line in err.splitlines() if line.startswith("hush: warning:")]
    assert code == 0 and len(warned) == 1 and "1 / N" in warned[0]


def test_mistakes_are_one_line_with_exit_status_2(
    capfd: pytest.CaptureFixture[str], script: Path, tmp_path: Path
) -> None:
    capped = tmp_path / "capped.hush"
    Ledger(capped, budget=replace(_budget(), epsilon=0.5)).close()
    damaged = tmp_path / "damaged.hush"
    damaged.write_bytes(b"not a ledger at all")
    spoiled = tmp_path / "spoiled.py"
    spoiled.write_text("import torch\ntorch.no_such_thing\n")
    mistakes = {
        ("train", "cifar"): "unknown job",
        ("train", "nowhere.py:job"): "no file",
        ("train", "no_such_module_here:job"): "no module",
        ("train", f"{script}:missing"): "no function 'missing'",
        ("train", f"{script}:number"): "must return a hush.Job",
        ("train", f"{script}:broken"): "my_training.py:broken raised ZeroDivisionError: division by zero",
        ("train", f"{spoiled}:job"): "spoiled.py, line 2)",
        ("train", "mnist", "--epsilon", -1): "epsilon must be a positive number",
        ("train", "mnist", "--model", "worst"): "no recipe",
        ("train", "mnist", "--device", "nonsense"): "cannot be used",
        ("train", f"{script}:job", "--lot-size", 0): "--lot-size must lie in [1",
        ("train", "mnist", "--lot-size", 0): "--lot-size must lie in [1",
        ("train", "mnist", "--batch-size", 0): "--batch-size must lie in [1",
        ("train", f"{script}:job", "--sampling", "cyclic"): "sampling must be one of",
        ("train", f"{script}:job", "--clip", "tight"): "--clip must be a number from 1e-12 to 1e12, or like",
        ("train", f"{script}:job", "--noise-schedule", spoiled): "a file with a JSON list of numbers",
        ("train", f"{script}:job", "--resume"): "resume needs the folder",
        ("train", f"{script}:job", "--tensorboard"): "give Run(FOLDER)",
        ("train", f"{script}:job", "--ledger", capped): "what the cap leaves",
        ("train", f"{script}:job", "--ledger", damaged): "hush:",
        ("report", tmp_path / "nothing"): "no folder",
        ("report", tmp_path): "expected a checkpoint",
        ("train",): "see hush train --help",
        ("ledger", "close", capped): "see hush ledger close --help",
    }
    for arguments, words in mistakes.items():
        code, out, err = call(capfd, *arguments)
        assert code == 2 and not out, arguments
        lines = [line for line in err.splitlines() if line]
        assert len(lines) == 1 and lines[0].startswith("hush: ") and words in lines[0], (arguments, err)


def test_help_has_examples(capfd: pytest.CaptureFixture[str]) -> None:
    ledger = [f"ledger {name}" for name in ("open", "show", "check", "close", "link")]
    for command in ("train", "report", "epsilon", "noise", "steps", "compare", *ledger):
        code, out, _ = call(capfd, *command.split(), "--help")
        assert code == 0 and f"Example: hush {command} " in " ".join(out.split())


def _budget() -> Any:
    from hush.accounting import Budget

    return Budget(epsilon=1.0, delta=1e-5)


def test_torch_random_state_is_left_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    from hush.training.preflight import reproducible

    with reproducible(5, torch.device("cpu")):
        torch.rand(3)
    assert torch.equal(before, torch.get_rng_state())
