"""The network of drawn glyphs: what is kept is what was trained, and it was trained."""

import sys
from pathlib import Path

import pytest
import torch

from hush import glyph_network
from hush.drawings import Glyphs
from hush.glyph_network import LAYERS, strokes

sys.path.insert(0, str(Path(__file__).parents[1] / "experiments"))
import glyph_network as training


def drawings(count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    alphabet = Glyphs(20, generator=torch.Generator().manual_seed(77))
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
        expected = body(images[:, None])
    torch.testing.assert_close(strokes(images, batch_size=4), expected, rtol=0.02, atol=0.02)
    assert expected.shape == (6, LAYERS[-1][1], 7, 7) and expected.std() > 0.3
    glyph_network.weights.cache_clear()


def test_the_kept_network_knows_glyphs_it_has_not_seen() -> None:
    """Nearest of one drawing each of 20 other glyphs: far more often right by its maps than by pixels."""
    examples, others = drawings(20, 5), drawings(400, 6)

    def right(of: torch.Tensor, to: torch.Tensor) -> float:
        nearest = torch.cdist(of.flatten(1), to.flatten(1)).argmin(1)
        return (nearest == torch.arange(len(of)) % 20).double().mean().item()

    by_pixels, by_maps = right(others, examples), right(strokes(others), strokes(examples))
    assert by_maps > 0.7 and by_pixels < 0.5  # a network that was not trained is no better than pixels
