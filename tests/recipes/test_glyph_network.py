"""The network of drawings: what is kept is what was trained, and it was trained."""

import sys
from pathlib import Path

import pytest
import torch

from hush.recipes.features import glyph_network
from hush.recipes.features.drawings import Glyphs, Shapes
from hush.recipes.features.glyph_network import LAYERS, lines, strokes

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))
import glyph_network as training


def drawings(count: int, seed: int, kind: type[Glyphs] | type[Shapes] = Glyphs) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    alphabet = kind(20, generator=torch.Generator().manual_seed(77))
    return alphabet.draw(torch.arange(count) % 20, generator=generator)


def test_what_is_kept_reads_as_what_was_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch norms are taken into the weights: the kept network gives the maps of the trained one, in its own file."""
    body = training.train("cpu", classes=5, batch=8, steps=2)
    g = torch.Generator().manual_seed(3)
    for _, norm, _ in body:  # far from where batch norms begin
        norm.running_mean.normal_(generator=g), norm.bias.data.normal_(generator=g)
        norm.running_var.uniform_(0.2, 2.0, generator=g), norm.weight.data.uniform_(0.5, 1.5, generator=g)
    training.write(body, tmp_path / "kept" / "network.npz")
    monkeypatch.setattr(glyph_network, "FILE", tmp_path / "kept" / "network.npz")
    glyph_network.weights.cache_clear()
    images = drawings(6, 1)
    with torch.no_grad():
        expected, half_way = body(images[:, None]), body[:3](images[:, None])
    torch.testing.assert_close(strokes(images, batch_size=4), expected, rtol=0.02, atol=0.02)
    means = half_way.unflatten(2, (7, 2)).unflatten(4, (7, 2)).mean(dim=(3, 5))
    torch.testing.assert_close(lines(images, batch_size=4), means, rtol=0.02, atol=0.02)
    assert expected.shape == (6, LAYERS[-1][1], 7, 7) and expected.std() > 0.3
    glyph_network.weights.cache_clear()


@pytest.mark.parametrize("kind, least, most", [(Glyphs, 0.6, 0.45), (Shapes, 0.8, 0.6)])
def test_the_kept_network_knows_classes_it_has_not_seen(
    kind: type[Glyphs] | type[Shapes], least: float, most: float
) -> None:
    """Nearest of one drawing each of 20 other glyphs: far more often right by its maps than by pixels."""
    examples, others = drawings(20, 5, kind), drawings(400, 6, kind)

    def right(of: torch.Tensor, to: torch.Tensor) -> float:
        nearest = torch.cdist(of.flatten(1), to.flatten(1)).argmin(1)
        return (nearest == torch.arange(len(of)) % 20).double().mean().item()

    by_pixels, by_maps = right(others, examples), right(strokes(others), strokes(examples))
    assert by_maps > least and by_pixels < most  # a network that was not trained is no better than pixels
