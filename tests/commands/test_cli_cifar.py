"""hush train cifar10 on a handful of random pictures: features, lots, the report's words, a wrong tier."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.command_line import call

import hush.recipes
from hush.recipes import cifar10, data


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty pictures, red or blue, of which ten are set aside."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(60) % 2
    x = torch.randint(60, (60, 3, 32, 32), generator=generator, dtype=torch.uint8)
    x[:, 0] += (120 * y[:, None, None]).to(torch.uint8)
    images = data.Images(x, y, x[:20].flip(3), y[:20], 10)
    monkeypatch.setattr(data, "load", lambda name: images if name == "cifar10" else None)
    monkeypatch.setattr(
        hush.recipes, "cifar10", lambda tier, epsilon: replace(cifar10(tier, epsilon=epsilon), set_aside=10)
    )


@pytest.mark.usefixtures("few")
def test_the_scratch_recipe_trains_on_what_is_not_set_aside(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = call(
        capfd, "train", "cifar10", "--tier", "scratch", "--epsilon", 2, "--delta", 1e-3, "--lot-size", 10,
        "--epochs", 2, "--device", "cpu", "--out", tmp_path / "run", "--json",
    )  # fmt: skip
    assert code == 0, err
    summary = json.loads(out.splitlines()[-1])
    assert summary["steps"] == 10 and summary["epsilon"] <= 2.0  # 50 records, not 60
    code, out, _ = call(capfd, "report", tmp_path / "run")
    assert code == 0 and "CIFAR-10 training set less the last 10 records" in " ".join(out.split())


@pytest.mark.usefixtures("few")
def test_a_wrong_tier_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capfd, "train", "cifar10", "--tier", "all", "--device", "cpu")
    assert code != 0 and "expected public, synthetic, scratch" in err and "Traceback" not in err + out
