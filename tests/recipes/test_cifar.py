"""CIFAR-10: the networks learnt without it, what is read from them, the recipes, and the command line."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hush.recipes
from hush.noise.pca import ProjectionLayer
from hush.recipes.cifar import SCALE, SET_ASIDE, TIERS, Cifar10
from hush.recipes.features.pretrained import (
    FOLDER,
    Directions,
    colour_scattering,
    convolved,
    fixed_views,
    paper_network,
    pooled,
    residual_network,
    standardised,
)
from hush.recipes.features.scattering import scatter
from hush.recipes.residual import ResidualNetwork

RESULTS = Path(__file__).parents[2] / "results"


def pictures(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (count, 3, 32, 32), generator=generator, dtype=torch.uint8)


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_the_networks_that_come_with_the_package_have_the_size_that_was_said() -> None:
    backbone = residual_network("backbone")
    by_hand = 3 * 9 * 64 + 64 + 6 * (64 * 64 * 9 + 64)
    by_hand += (64 * 128 * 9 + 128) + (64 * 128 + 128) + 5 * (128 * 128 * 9 + 128)
    by_hand += (128 * 384 * 9 + 384) + (128 * 384 + 384) + 3 * (384 * 384 * 9 + 384)
    assert count(backbone) == by_hand < 6e6
    assert not any(isinstance(module, nn.BatchNorm2d) for module in backbone.modules())
    assert all(path.stat().st_size < 12e6 for path in FOLDER.iterdir())


def test_the_paper_network_keeps_what_cifar_100_taught_all_but_the_last_layer() -> None:
    network = paper_network()
    with np.load(FOLDER / "paper.npz") as kept:
        for name, value in network.state_dict().items():
            if name.startswith("11."):
                assert not value.any()
            else:
                assert torch.equal(value, torch.from_numpy(kept[name].astype(np.float32)))


def test_maps_are_those_of_a_loop_over_the_blocks() -> None:
    torch.manual_seed(0)
    network = ResidualNetwork(widths=(4, 6), blocks=(2, 1))
    x = torch.randn(2, 3, 8, 8)
    kept = dict(network.named_parameters())

    def conv(x: torch.Tensor, name: str, stride: int = 1) -> torch.Tensor:
        weight = kept[f"{name}.weight"]
        return F.conv2d(x, weight, kept[f"{name}.bias"], stride=stride, padding=weight.shape[-1] // 2)

    out = conv(x, "first").relu()
    for block in ("stages.0.0", "stages.0.1"):
        out = (out + conv(conv(out, f"{block}.conv1").relu(), f"{block}.conv2")).relu()
    first = out
    inner = conv(conv(out, "stages.1.0.conv1", 2).relu(), "stages.1.0.conv2")
    out = (conv(out, "stages.1.0.shortcut", 2) + inner).relu()
    maps = network.maps(x)
    torch.testing.assert_close(maps[0], first)
    torch.testing.assert_close(maps[1], out)
    assert torch.equal(network(x), maps[1])
    with pytest.raises(ValueError, match="as many widths"):
        ResidualNetwork(widths=(4, 6), blocks=(1,))


def test_pooled_features_are_means_and_maxima_of_norm_one_averaged_over_views() -> None:
    images, network = pictures(5), ResidualNetwork(widths=(4, 6, 8), blocks=(1, 1, 1))
    found = pooled(images, network, views=2, batch_size=2)
    for row, image in zip(found, images, strict=True):
        views = []
        for view in (image, image.flip(2)):
            maps = network.maps((view.float()[None] / 255 - 0.5) * 4)
            parts = [maps[2].mean((2, 3)), maps[2].amax((2, 3)), maps[1].mean((2, 3))]
            views.append(torch.cat([one / one.norm() for one in parts], dim=1)[0])
        torch.testing.assert_close(row, (views[0] + views[1]) / 2, rtol=1e-4, atol=1e-5)


def test_a_picture_is_read_by_itself() -> None:
    """Other pictures in the batch, also wild ones, leave its features as they are."""
    ours, others = pictures(3), pictures(4, seed=1)
    network, paper = ResidualNetwork(widths=(4, 6, 8), blocks=(1, 1, 1)), paper_network()
    for read in (
        lambda x: pooled(x, network, views=4),
        lambda x: convolved(x, paper, views=2).float(),
        lambda x: colour_scattering(x).float(),
    ):
        torch.testing.assert_close(read(ours), read(torch.cat([ours, others]))[:3], rtol=1e-3, atol=1e-3)


def test_views_are_mirrored_and_moved() -> None:
    images = pictures(2).float()
    views = fixed_views(images, 4, shift=2)
    assert torch.equal(views[:, 0], images) and torch.equal(views[:, 1], images.flip(3))
    assert torch.equal(views[:, 2, :, 2:, 2:], images[:, :, :-2, :-2])
    assert torch.equal(views[:, 3], views[:, 2].flip(3))


def test_convolutions_read_the_middle_patch_standardised() -> None:
    images, paper = pictures(2), paper_network()
    patch = images.float()[:, :, 4:28, 4:28] / 255
    values = patch.flatten(1)
    by_hand = (patch - values.mean(1)[:, None, None, None]) / values.std(1, correction=0)[:, None, None, None]
    torch.testing.assert_close(standardised(patch), by_hand)
    expected = paper[:7](by_hand)
    torch.testing.assert_close(convolved(images, paper)[:, 0].float(), expected, rtol=2e-3, atol=2e-3)
    rest = paper[7:](convolved(images, paper)[:, 0].float())
    assert rest.shape == (2, 10)


def test_colour_scattering_is_scattering_of_each_colour_normed_in_groups() -> None:
    images = pictures(2)
    parts = torch.cat([scatter(images[:, colour].float() / 255) for colour in range(3)], dim=1)
    groups = parts.view(2, 27, 9, 64).flatten(2).double()
    normed = (groups - groups.mean(2, keepdim=True)) / (groups.var(2, correction=0, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(colour_scattering(images).double(), normed.view(2, 243, 8, 8), rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("tier", TIERS)
def test_recipes_are_the_winners_of_the_experiment(tier: str) -> None:
    files = [json.loads((RESULTS / f"{name}.json").read_text()) for name in ("cifar_best", "cifar_heads")]
    rows = [row for file in files for row in file["rows"]]
    for epsilon, found in TIERS[tier].items():
        won = [r for r in rows if r.get("what") == found.won_as and r.get("tier") == tier and r["epsilon"] == epsilon]
        won.sort(key=lambda row: -row["accuracy set aside"])
        setting = won[0]["setting"]
        assert (found.lot_size, found.rate, found.momentum, found.averaging, found.fall) == tuple(
            setting[name] for name in ("lot_size", "rate", "momentum", "averaging", "fall")
        )
        assert setting["clip"] == f"FlatClip(bound={found.clip})"
        assert max(1, round(found.epochs * 45_000 / found.lot_size)) == setting["steps"]
        assert found.set_aside == SET_ASIDE
        assert found.power is None or won[0]["form"] == f"whitened to the power {found.power:g}"


def test_a_recipe_is_for_the_largest_epsilon_not_above() -> None:
    known = sorted(TIERS["public"])
    assert hush.recipes.cifar10("public", epsilon=known[-1] + 1) is TIERS["public"][known[-1]]
    assert hush.recipes.cifar10("public", epsilon=0.1) is TIERS["public"][known[0]]
    with pytest.raises(ValueError, match="expected public, synthetic, scratch"):
        hush.recipes.cifar10("everything", epsilon=1.0)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Networks of a few channels in place of those that come with the package."""
    torch.manual_seed(0)
    network = ResidualNetwork(widths=(4, 6, 8), blocks=(1, 1, 1))
    monkeypatch.setattr("hush.recipes.cifar.residual_network", lambda name, folder: network)
    known = Directions(torch.zeros(22), torch.eye(22)[:, :5], torch.arange(5, 0, -1.0))
    monkeypatch.setattr(Directions, "read", classmethod(lambda cls, folder: known))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("tier", TIERS)
def test_the_head_reads_the_features_and_starts_at_zero(tier: str) -> None:
    recipe = next(iter(TIERS[tier].values()))
    x, model = recipe.features(pictures(2)), recipe.model(generator=torch.Generator().manual_seed(0))
    assert model(x).shape == (2, 10)
    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    assert not last.weight.any()
    assert recipe.optimizer(model).param_groups[0]["lr"] == recipe.rate
    assert math.isclose(recipe.rate_factor(10)(10), recipe.fall)
    with pytest.raises(ValueError, match="projection"):
        recipe.model(ProjectionLayer(torch.zeros(2, 2)))


def test_the_loss_of_a_record_is_the_mean_over_its_views() -> None:
    torch.manual_seed(0)
    recipe = TIERS["scratch"][1.0]
    model, x, y = recipe.model(), torch.randn(3, 2, 243, 8, 8), torch.tensor([1, 5, 9])
    nn.init.normal_(model.head[-1].weight)
    apart = F.cross_entropy(model.head(x.flatten(0, 1)), y.repeat_interleave(2), reduction="none").view(3, 2)
    torch.testing.assert_close(recipe.loss(model(x), y, reduction="none"), apart.mean(1))


def test_whitening_is_by_the_spread_of_public_pictures() -> None:
    known = Directions(torch.tensor([1.0, 2.0, 3.0]), torch.eye(3)[:, [2, 0]], torch.tensor([4.0, 1.0]))
    rows = known.rows(torch.tensor([[2.0, 7.0, 11.0]]))
    assert rows.tolist() == [[8.0, 1.0]]  # the third coordinate less 3, the first less 1
    for power, expected in ((0.0, [8.0, 1.0]), (0.5, [4.0, 1.0]), (1.0, [2.0, 1.0])):
        found = known.whitened(rows, power, norm=1.0)[0]
        spread = torch.tensor([4.0, 1.0]) * torch.tensor([4.0, 1.0]) ** -power
        torch.testing.assert_close(found, torch.tensor(expected) / spread.norm())


def test_features_carry_the_scale_of_their_kind() -> None:
    assert set(SCALE) == {"backbone", "drawn", "scattering"}
    maps = colour_scattering(pictures(2)).flatten(1).float()
    recipe = Cifar10(
        settings_from="", won_as="", maps=("scattering",), lot_size=1, epochs=1, clip=1.0, rate=1.0, set_aside=0
    )
    torch.testing.assert_close(recipe.features(pictures(2)), maps * SCALE["scattering"])
