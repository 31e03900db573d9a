"""Drawings and the whitening by them: no data in either, one example at a time, and the spread it promises."""

import math

import pytest
import torch
from torch.nn import functional as F

from hush.recipes.features.drawings import SAMPLES, Glyphs, Shapes, _inside, _pixels
from hush.recipes.features.scattering import scatter
from hush.recipes.features.whitening import CHANNELS, GROUPS, MAPS, NORM, drawn_whitening, features, whitened


def drawn(count: int, seed: int) -> torch.Tensor:
    """Glyphs and shapes in turns."""
    generator, which = torch.Generator().manual_seed(seed), torch.arange(-(-count // 2))
    kinds = [kind(len(which), generator=generator).draw(which, generator=generator) for kind in (Glyphs, Shapes)]
    return torch.stack(kinds, dim=1).flatten(0, 1)[:count]


@pytest.mark.parametrize("kind", [Glyphs, Shapes])
def test_drawings_are_pictures_of_their_class(kind: type[Glyphs] | type[Shapes]) -> None:
    """In [0, 1], with ink and paper, and nearer to another drawing of the same glyph than to one of the next."""
    alphabet = kind(40, generator=torch.Generator().manual_seed(0))
    generator, which = torch.Generator().manual_seed(1), torch.arange(40)
    first, again = (alphabet.draw(which, generator=generator, wobble=0.05) for _ in range(2))
    assert first.shape == (40, 28, 28) and first.min() >= 0 and first.max() <= 1
    ink = first.mean(dim=(1, 2))
    assert ((ink > 0.01) & (ink < (0.5 if kind is Glyphs else 0.8))).all() and not torch.equal(first, again)
    a, b = (F.avg_pool2d(p[:, None], 4).flatten(1) for p in (first, again))
    distances = torch.cdist(a, b)
    assert distances.diagonal().mean() < 0.7 * distances.mean()


def test_the_inside_of_an_outline_is_its_disc() -> None:
    """Whichever way round it is drawn; by the distance of each pixel from the middle."""
    angle = torch.arange(SAMPLES) * (2 * math.pi / SAMPLES)
    circle = 9 * torch.stack([angle.cos(), angle.sin()], dim=1)
    pixels = _pixels(torch.device("cpu"))
    far = pixels.norm(dim=1)
    for outline in (circle, circle.flip(0)):
        inside = _inside(pixels, outline[None])[0]
        assert (inside[far < 8] > 0.8).all() and (inside[far > 10] < 0.2).all()
        assert inside.sum().item() == pytest.approx(math.pi * 81, rel=0.02)


def test_the_mean_is_gone_and_the_spread_is_as_promised() -> None:
    """On other drawings than it was made from: mean near 0, mean square near 1, and rounder than before."""
    maps = F.group_norm(scatter(drawn(200, 5)), GROUPS)
    before = maps.flatten(1)
    for power, rounder in ((0.0, 1.0), (0.25, 3.0)):
        after = drawn_whitening("scattering", power)(maps).flatten(1).double()
        assert 0.9 < after.square().mean() < 1.1
        assert after.mean(dim=0).square().mean() < 0.03
        assert share_of_first(after) < share_of_first(before) / rounder


def share_of_first(rows: torch.Tensor) -> float:
    """How much of the mean square of all rows lies in one direction."""
    values = torch.linalg.eigvalsh(rows.double() @ rows.double().T)
    return (values[-1] / values.sum()).item()


def test_one_example_does_not_touch_another() -> None:
    images = drawn(8, 9)
    whole = features(images, tuple(CHANNELS), power=0.25)
    assert whole.shape == (8, sum(CHANNELS.values()), 7, 7)
    for i in range(8):
        alone = features(images[i : i + 1], tuple(CHANNELS), power=0.25)
        torch.testing.assert_close(whole[i], alone[0], rtol=1e-3, atol=1e-4)


def test_kinds_share_the_norm_and_tails_are_bent_in() -> None:
    maps = {name: of(drawn(5, 3)) for name, of in MAPS.items()}
    everything = whitened(maps, power=0.2, batch_size=2)
    for part in everything.split(list(CHANNELS.values()), dim=1):  # in the order of their names
        torch.testing.assert_close(part.flatten(1).norm(dim=1), torch.full((5,), NORM / 3**0.5))
    plain, bent = (whitened({"scattering": maps["scattering"]}, power=0.2, bent=b) for b in (False, True))
    torch.testing.assert_close(everything[:, 96 : 96 + 81] * 3**0.5, bent, rtol=1e-4, atol=1e-4)
    assert bent.abs().max() < 0.8 * plain.abs().max()


def test_the_same_whatever_was_drawn_before() -> None:
    first = drawn_whitening("scattering", 0.25)
    drawn_whitening.cache_clear()
    torch.manual_seed(321)
    assert torch.equal(first.channels, drawn_whitening("scattering", 0.25).channels)
