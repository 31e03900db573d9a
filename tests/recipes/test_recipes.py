"""Recipes: what they build fits together, and equals what the experiments trained."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hush.clipping.clips import FlatClip
from hush.noise.pca import ProjectionLayer, dp_pca
from hush.randomness.streams import Key
from hush.recipes import data
from hush.recipes.mnist import BEST, PAPER, Recipe, recipe

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))
from side_by_side import FLAT, Data, Program, Run

RESULTS = Path(__file__).parents[2] / "results"


def test_the_largest_epsilon_not_above_is_chosen() -> None:
    assert recipe("mnist", model="paper", epsilon=2.0) is PAPER[2.0]
    assert recipe("mnist", model="paper", epsilon=7.9) is PAPER[2.0]
    assert recipe("mnist", model="paper", epsilon=0.1) is PAPER[0.5]
    assert recipe("fashion-mnist", model="best", epsilon=9.0) in BEST["fashion-mnist"].values()
    for wrong in (("mnist", "worst"), ("fashion-mnist", "paper"), ("cifar10", "best")):
        with pytest.raises(ValueError, match="no recipe"):
            recipe(wrong[0], model=wrong[1], epsilon=2.0)


def test_recipes_build_networks_that_read_their_features() -> None:
    images = data.load("mnist").train_x[:50]
    for found in [*PAPER.values(), *(r for rows in BEST.values() for r in rows.values())]:
        x = found.features(images)
        layer = None
        if found.pca_noise is not None:
            layer = dp_pca(x, dimensions=found.pca_dimensions, noise_multiplier=found.pca_noise).layer()
        model = found.model(layer, generator=torch.Generator().manual_seed(0))
        assert model(x).shape == (50, 10)
        trained = [p for group in found.optimizer(model).param_groups for p in group["params"]]
        assert len(trained) == sum(p.requires_grad for p in model.parameters())
        factor = found.rate_factor(100)
        assert factor(0) == 1.0 and factor(100) == pytest.approx(found.fall)
    with pytest.raises(ValueError, match="projection"):
        PAPER[2.0].model()


def test_the_paper_recipe_is_the_network_of_the_experiments() -> None:
    """Same input, same weights, same logits as the batched program; same learning rates."""
    found: Recipe = PAPER[2.0]
    images = data.load("mnist").train_x[:40]
    x = found.features(images)
    projection = dp_pca(x, dimensions=60, noise_multiplier=7.0, key=Key.from_seed(1))
    rows = projection(x)
    table, y = rows[None].float(), torch.arange(40) % 10
    run = Run(steps=20, noise=1.0, clip=found.clip, clipping=FLAT, lot_size=10, rate=found.rate, rate_end=found.rate,
              rate_steps=0, decay_to=found.fall, gain=found.gain)  # fmt: skip
    program = Program([run], Data(table, y, table, y), seed=3)
    model = found.model(projection.layer())
    weights = list(model.parameters())
    with torch.no_grad():
        for parameter, weight in zip(weights, program.initial, strict=True):
            parameter.copy_(weight[0].T)
    logits = (table[0] @ program.initial[0][0]).relu() @ program.initial[1][0]
    torch.testing.assert_close(model(x), logits, rtol=1e-4, atol=1e-4)
    factor = found.rate_factor(20)
    expected = [found.rate * factor(t) for t in range(20)]
    assert program.schedule[:20, 0].tolist() == pytest.approx(expected)


def test_clipping_is_flat_or_per_layer_as_the_recipe_says() -> None:
    found = PAPER[2.0]
    names = [name for name, _ in found.model(ProjectionLayer(torch.zeros(784, 60))).named_parameters()]
    apart = replace(found, per_layer=True, clip=3.0).clipping().groups(names)
    assert [group.bound for group in apart] == [3.0, 3.0]
    assert isinstance(replace(found, per_layer=False).clipping(), FlatClip)


@pytest.mark.parametrize("experiment", ["mnist_paper", "mnist_best"])
def test_recipes_are_the_winners_of_the_experiments(experiment: str) -> None:
    """Every shipped setting that was tuned stands in the results with the accuracy it reached."""
    rows = json.loads((RESULTS / f"{experiment}.json").read_text())["rows"]
    shipped = {f"{name}, {e}": r for name, of in BEST.items() for e, r in of.items()}
    if experiment == "mnist_paper":
        shipped = {str(e): r for e, r in PAPER.items()}
    assert len(shipped) == len(rows)
    for name, found in shipped.items():
        won = rows[name]["setting"]
        for field in ("lot_size", "epochs", "fall", "averaging"):
            assert getattr(found, field) == won[field], (name, field)
        assert found.rate == pytest.approx(won["rate"], rel=1e-3)
        if experiment == "mnist_paper":
            assert (found.clip, found.pca_noise, list(found.gain)) == (won["clip"], won["pca_noise"], won["gain"])
            assert (found.per_layer, found.momentum) == (won["per_layer"], 0.0)
        else:
            assert (found.whitening, found.bent, list(found.parts)) == (won["power"], won["bent"], won["parts"])
            assert (found.clip, found.momentum) == (0.1, 0.9)
            assert 60_000 - found.set_aside == won["examples"]
