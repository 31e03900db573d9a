"""The tuning experiments from beginning to end in their tiny form, and their arithmetic against the definition."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments" / "tuning"))
import charges
import mnist_selection

from hush.accounting import Gaussian, PoissonSampled, Selected, epsilon

RESULTS = Path(__file__).parents[2] / "results"


def test_the_noises_that_were_run_cost_what_the_results_say() -> None:
    plan = json.loads((RESULTS / "mnist_selection_table.json").read_text())["plan"]
    assert plan["examples"] == 60_000 and plan["steps"] == 2000 and plan["settings"] == 50
    said = json.loads((RESULTS / "mnist_selection.json").read_text())["accuracy"]
    run = PoissonSampled(0.01, Gaussian(plan["noise"]["2"]["geometric"]["noise"])) * 2000
    spent = epsilon(Gaussian(7.0) + Selected(run, "geometric", 50.0), delta=1e-5).upper
    assert spent == pytest.approx(said["2"]["geometric"]["epsilon"], rel=1e-3) and spent < 2.002
    for budget, pca in (("2", 7.0), ("8", 4.0)):
        all_runs = PoissonSampled(0.01, Gaussian(plan["noise"][budget]["sum"]["noise"])) * 100_000
        spent = epsilon(Gaussian(pca) + all_runs, delta=1e-5).upper
        assert spent == pytest.approx(said[budget]["sum"]["epsilon"], rel=1e-3) and spent <= float(budget)


def test_all_three_commands_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    noise = {way: {"noise": 1.0, "epsilon": 8.0} for way in mnist_selection.ways(2)}
    plan = {"examples": 2400, "steps": 3, "settings": 2, "delta": 1e-5, "noise": {"8": noise}}
    (tmp_path / "mnist_selection_plan.json").write_text(json.dumps(plan))
    for command in ("train", "replay"):
        mnist_selection.main([command, "--tiny", "--device", "cpu", "--out", str(tmp_path)])
    table = json.loads((tmp_path / "mnist_selection_table.json").read_text())["tables"]["8"]
    assert np.shape(table["geometric"]["reported"]) == (3, 2)  # two settings and the paper's own, two seeds
    summary = json.loads((tmp_path / "mnist_selection.json").read_text())["accuracy"]["8"]
    assert set(summary) == {"untuned", "geometric", "logarithmic", "sum"}
    best = np.array(table["sum"]["validation"])[:-1]
    assert summary["sum"]["mean"] <= np.array(table["sum"]["reported"])[:-1].max() + 1e-9 and best.max() <= 1


def test_clipped_sums_of_many_networks_are_those_of_single_backward_passes() -> None:
    torch.manual_seed(0)
    settings = {"rate": np.array([0.1, 0.2]), "clip": np.array([0.5, 50.0]), "end": np.array([1.0, 1.0])}
    networks = mnist_selection.Networks(settings, 1, torch.device("cpu"))
    x, y = torch.randn(2, 4, mnist_selection.DIMENSIONS), torch.randint(10, (2, 4))
    mask = torch.tensor([[True, True, True, False], [True] * 4])
    sums = mnist_selection.clipped_sums(networks.weights, x, y, mask, networks.clip)
    for network in range(2):
        expected = [torch.zeros_like(weight[network]) for weight in networks.weights]
        for row in range(4):
            leaves = [weight[network].clone().requires_grad_() for weight in networks.weights]
            hidden = torch.relu(x[network, row] @ leaves[0] + leaves[1][0])
            F.cross_entropy((hidden @ leaves[2] + leaves[3][0])[None], y[network, row][None]).backward()
            norm = sum(leaf.grad.square().sum() for leaf in leaves).sqrt()
            factor = min(1.0, float(networks.clip[network] / norm)) * float(mask[network, row])
            for total, leaf in zip(expected, leaves, strict=True):
                total += factor * leaf.grad
        for found, total in zip(sums, expected, strict=True):
            torch.testing.assert_close(found[network], total, rtol=1e-4, atol=1e-5)


def test_lots_are_poisson() -> None:
    torch.manual_seed(1)
    settings = {name: np.ones(400) for name in ("rate", "clip", "end")}
    networks = mnist_selection.Networks.__new__(mnist_selection.Networks)
    networks.count, networks.device = len(settings["rate"]), torch.device("cpu")
    index, mask = networks.lots(6000)
    sizes = mask.sum(1).double()
    assert abs(sizes.mean() - 600) < 6 * (540 / 400) ** 0.5 and 0.8 < sizes.var() / 540 < 1.25
    assert all(len(set(row[inside].tolist())) == int(inside.sum()) for row, inside in zip(index, mask, strict=True))
    counts = torch.bincount(index[mask], minlength=6000).double()
    assert abs(counts.mean() - 40) < 0.5 and 0.85 < counts.var() / 36 < 1.15  # every record alike


def test_the_papers_numbers_beside_the_newer_ones() -> None:
    for settings, runs in ((50, "3.0e+07"), (500, "4.0e+09"), (6700, "9.0e+11")):
        rows = charges.counting(settings)
        assert f"{rows['paper']['runs']:.1e}" == runs and rows["paper"]["lost"] <= 100
        assert rows["geometric"]["epsilon"] < 1 < rows["paper"]["epsilon"] and rows["geometric"]["runs"] < 3e5
    table = json.loads((RESULTS / "tuning_charges.json").read_text())
    for settings in ("50", "500", "6700"):
        for rule in ("geometric", "logarithmic", "poisson"):
            row = table["training"][settings][rule]
            assert row["hush"] <= min(row["renyi"], row["one layer"] or row["renyi"])
    rng = np.random.default_rng(0)  # the promise of the Laplace counts, tried: one good setting in 50
    trials = charges.trials_needed(50)
    scale, kept = 1 / charges.count_epsilon(trials), 0
    for _ in range(400):
        number = rng.geometric(1 / trials.mean)
        count = np.where(rng.random(number) < 1 / 50, 9500, 9300)
        kept += count[np.argmax(count + rng.laplace(scale=scale, size=number))] >= 9400
    assert kept >= 0.95 * 400 - 3 * (400 * 0.95 * 0.05) ** 0.5


def test_the_page_has_the_numbers_of_the_results_rounded_up() -> None:
    page = (RESULTS.parent / "docs" / "tuning.md").read_text()
    table = json.loads((RESULTS / "tuning_charges.json").read_text())
    for settings in ("50", "500", "6700"):
        rows = table["training"][settings]
        exact = [rows["every setting paid for"]["hush"]]
        exact += [rows[rule][way] for rule in ("geometric", "logarithmic", "poisson") for way in ("hush", "renyi")]
        start = f"| {int(settings):,} |"
        (line,) = [line for line in page.splitlines() if line.startswith(start) and line.count("|") == 9]
        said = [float(cell) for cell in line.strip("| ").split("|")[1:]]
        assert all(number <= shown <= 1.01 * number for number, shown in zip(exact, said, strict=True)), line
    tuned = json.loads((RESULTS / "mnist_selection.json").read_text())["accuracy"]
    for way, start in (
        ("geometric", "| random stopping (`geo"),
        ("logarithmic", "| `logarithmic`, 50"),
        ("sum", "| all 50"),
    ):
        (line,) = [line for line in page.splitlines() if line.startswith(start)]
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        for budget, (alone, whole, accuracy) in (("2", cells[1:4]), ("8", cells[4:7])):
            row = tuned[budget][way]
            assert row["epsilon_of_one_run"] <= float(alone) and row["epsilon"] <= float(whole) <= row["epsilon"] + 0.01
            mean, deviation = (float(part.strip(" %")) for part in accuracy.split("+-"))
            assert abs(mean - 100 * row["mean"]) <= 0.0501 and abs(deviation - 100 * row["deviation"]) <= 0.0501
