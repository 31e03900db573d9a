"""The experiments run from beginning to end in their quick form, and their accounting is that of the notes."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))
import all_figures
import mnist_paper
from budgets import AS_PUBLISHED, CACHE, VALID, Cost
from common import Options, log_error, pca, pixels
from fig4_mnist_parameters import SWEEPS
from results_page import page
from side_by_side import PER_LAYER
from statements import figure4_lines

from hush.accounting import Gaussian, PoissonSampled, moments, pld, renyi
from hush.noise.pca import dp_pca
from hush.randomness.streams import Key


def run(monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    monkeypatch.setattr(sys, "argv", ["all_figures.py", "--device", "cpu", "--quick", "--repetitions", "2", *options])
    all_figures.main()


def test_every_part_runs_and_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, "--out", str(tmp_path))
    results = {part: json.loads((tmp_path / f"{part}.json").read_text()) for part in all_figures.PARTS}
    for part, result in results.items():
        assert result["command"] == f"python experiments/{part}.py --quick" and result["seed"] == 2016
    for part in ("mnist_paper", "mnist_best"):
        for row in results[part]["rows"].values():
            assert len(row["values"]) == 2 and math.isclose(row["mean"], sum(row["values"]) / 2)
    printed = results["fig1_accountants"]["epsilon"]["moments"]
    assert [round(value, 4) for value in printed] == [1.2586, 2.5759]  # the notes' independent values
    assert all(p["accuracy"][VALID] >= 0 for p in results["fig4_mnist_parameters"]["points"])
    run(monkeypatch, "--out", str(tmp_path), "--draw-only")
    for part in all_figures.PARTS:
        assert (tmp_path / f"{part}.png").stat().st_size > 5000
    point = json.loads((tmp_path / "fig4_mnist_parameters.json").read_text())
    cost, by = point["points"][0]["cost"], point["epsilon by each accountant"][0]
    what = Gaussian(cost["pca_noise"]) + PoissonSampled(100 / 60_000, Gaussian(cost["noise"] / math.sqrt(2))) * 4
    assert math.isclose(by[VALID]["renyi"], renyi.epsilon(what, delta=1e-5).upper)  # two layers, jointly
    (tmp_path / "fig4_mnist_parameters.json").unlink()  # the quick form has too few points for its statements
    (tmp_path / "fig3_mnist_eps_delta.json").unlink()
    text = page(tmp_path)
    assert text.count("| `python experiments/") == len(all_figures.PARTS) - 2 and "1.259" in text


def test_parts_trained_together_find_what_they_find_alone(tmp_path: Path) -> None:
    """As on a GPU: the programs of several parts by their length, and every part gets its own readings."""
    options = Options("cpu", tmp_path, quick=True, repetitions=1)
    found = dict(all_figures.together(["fig1_accountants", "fig2_mnist_noise_levels", "mnist_baseline"], options))
    assert sorted(found) == ["fig2_mnist_noise_levels", "mnist_baseline"]
    for part, result in found.items():
        alone = all_figures.part_module(part).measure(options)
        assert {name: result[name] for name in alone} == alone


@pytest.mark.parametrize(
    ("sigma", "pca_sigma", "epsilon", "epochs"), [(8.0, 16.0, 0.5, 14.5), (4.0, 7.0, 2.0, 107.5), (2.0, 4.0, 8.0, 353)]
)
def test_lengths_as_published(sigma: float, pca_sigma: float, epsilon: float, epochs: float) -> None:
    """The epochs that the published code allows itself, computed independently in the notes."""
    run = Cost(noise=sigma, pca_noise=pca_sigma)
    steps = round(epochs * 100)
    within = moments.epsilon(run.event(steps, counting=AS_PUBLISHED), delta=1e-5).upper
    beyond = moments.epsilon(run.event(steps + 50, counting=AS_PUBLISHED), delta=1e-5).upper
    assert within <= epsilon < beyond


def test_valid_counting_charges_layers_jointly() -> None:
    """m layers with noise sigma each are one Gaussian with sigma / sqrt(m): twice the squared signal, not two lots."""
    run = Cost(noise=4.0, pca_noise=7.0)
    assert run.event(100) == PoissonSampled(0.01, Gaussian(4.0 / math.sqrt(2))) * 100 + Gaussian(7.0)
    assert Cost(noise=4.0, per_layer=False).event(100) == PoissonSampled(0.01, Gaussian(4.0)) * 100
    joint, published = run.event(10_000), run.event(10_000, counting=AS_PUBLISHED)
    assert moments.epsilon(joint, delta=1e-5).upper > moments.epsilon(published, delta=1e-5).upper


def test_kept_answers_are_within_their_budgets() -> None:
    """What was computed once and is read from the file still satisfies the accountants."""
    kept = json.loads(CACHE.read_text())
    noises = [question for question in kept if question.startswith("noise ")]
    assert len(noises) > 20
    for question in noises[::3]:
        _, lot, steps, pca_noise, epsilon, examples = question.split(" ")
        run = Cost(noise=kept[question], per_layer=False, lot_size=int(lot), examples=int(examples),
                   pca_noise=None if pca_noise == "None" else float(pca_noise))  # fmt: skip
        event = run.event(int(steps))
        assert 0.995 * float(epsilon) < pld.epsilon(event, delta=1e-5).upper <= float(epsilon)
        assert renyi.epsilon(event, delta=1e-5).upper > 0.9 * float(epsilon)


def test_settings_of_the_paper_network_fill_their_budget() -> None:
    """Flat or per layer, what is trained is the noise that the budget was solved for; every accountant agrees."""
    settings = [s for epsilon in mnist_paper.EPSILONS for s in mnist_paper.candidates(epsilon, 4, seed=1)]
    assert {s.per_layer for s in settings} == {True, False}
    for setting in settings:
        run = setting.run(table=0, quick=False)
        assert run.steps == mnist_paper.STEPS and (run.clipping == PER_LAYER) == setting.per_layer
        cost = Cost(noise=run.noise, per_layer=setting.per_layer, lot_size=run.lot_size, pca_noise=setting.pca_noise)
        spent = pld.epsilon(cost.event(run.steps), delta=1e-5).upper
        assert 0.999 * setting.epsilon < spent <= setting.epsilon


def test_projections_share_their_first_directions() -> None:
    x = pixels("mnist", Options(quick=True))[0]
    alone = dp_pca(x, dimensions=7, noise_multiplier=3.0, key=Key.from_seed(5)).matrix
    assert torch.equal(pca(x, dimensions=7, noise=3.0, seed=5), alone.float())
    assert not torch.equal(pca(x, dimensions=7, noise=3.0, seed=6), alone.float())


def test_errors_are_compared_by_their_ratio() -> None:
    """Halving the error of an easy stand-in outweighs a tenth less of a hard one, though that is more accuracy."""
    assert log_error([0.98, 0.80]) < log_error([0.96, 0.82])


def fake_figure4(**changed: float) -> dict:
    """Results in which every statement of the paper's text holds, but for what is changed ("panel x" -> accuracy)."""
    points = []
    for panel, (_, values) in SWEEPS.items():
        for x in values:
            accuracy = 0.95
            if panel == "learning rate":
                accuracy = 0.95 if 0.01 <= x <= 0.07 else 0.90
            if panel == "lot size":
                accuracy = 0.95 if x == 300 else 0.935
            if panel in ("gradient clipping norm", "noise level"):
                accuracy = 0.95 if x == 4 else 0.93
            points.append({"panel": panel, "x": x, "projection": "pca", "accuracy": accuracy})
    few = "few epochs (noise 2), hidden units"
    points += [{"panel": few, "x": x, "projection": "pca", "accuracy": 0.9 + x / 1e5} for x in (200, 2000)]
    for projection, accuracy in (("none", 0.93), ("random", 0.925)):
        points.append({"panel": "projection dimensions", "x": 1, "projection": projection, "accuracy": accuracy})
    for p in points:
        name = f"{p['panel']} {p['x']:g}" if p["projection"] == "pca" else p["projection"]
        p["accuracy"] = {VALID: changed.get(name, p["accuracy"])}
        p["median gradient norm (private)"] = {1: 4.2, 100: 3.9, 1000: 4.0}
    return {"points": points}


def test_statements_are_judged_by_the_numbers() -> None:
    assert all("| holds |" in text for text in figure4_lines(fake_figure4()))
    wrong = {
        "stable in the PCA dimension": {"projection dimensions 30": 0.92},
        "best PCA dimension is 60": {"projection dimensions 100": 0.96},
        "no PCA costs": {"none": 0.94},
        "random projection": {"random": 0.951},
        "PCA noise": {"PCA noise level 16": 0.93},
        "more hidden units": {"hidden units 2000": 0.94},
        "with few epochs": {"few epochs (noise 2), hidden units 2000": 0.85},
        "sqrt(N)": {"lot size 1600": 0.96},
        "[0.01, 0.07]": {"learning rate 0.02": 0.92},
        "rate of 0.05": {"learning rate 0.03": 0.96},
        "rate is too large": {"learning rate 0.4": 0.945},
        "too small a clipping norm": {"gradient clipping norm 0.5": 0.96},
        "median": {"gradient clipping norm 8": 0.97},
    }
    for words, changed in wrong.items():
        (judged,) = [text for text in figure4_lines(fake_figure4(**changed)) if words in text.split("|")[1]]
        assert "| does not hold |" in judged, judged
