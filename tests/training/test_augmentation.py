"""Random views: each picture by itself, by an explicit generator, as the paper describes them."""

import pytest
import torch
from torch import Tensor

from hush.training.augmentation import (
    brightness_and_contrast,
    centre_crop,
    colour_jitter,
    paper_view,
    random_crop,
    random_flip,
    resized_crop,
)

VIEWS = {
    "crop": lambda x, g: random_crop(x, 24, generator=g),
    "flip": lambda x, g: random_flip(x, generator=g),
    "brightness": lambda x, g: brightness_and_contrast(x, generator=g),
    "paper": lambda x, g: paper_view(x, generator=g),
    "resized": lambda x, g: resized_crop(x, generator=g),
    "jitter": lambda x, g: colour_jitter(x, generator=g),
}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pictures(count: int) -> Tensor:
    return torch.rand(count, 3, 32, 32, generator=seeded(7))


@pytest.mark.parametrize("name", VIEWS)
def test_no_picture_is_looked_at_to_change_another(name: str) -> None:
    """The same draws on other neighbours give the same view; torch's own generator is left alone."""
    images = pictures(6)
    changed = torch.cat([images[:3], 5 * images[3:] - 2])
    before = torch.get_rng_state()
    some, others = (VIEWS[name](x, seeded()) for x in (images, changed))
    assert torch.equal(some[:3], others[:3])
    assert torch.equal(before, torch.get_rng_state())
    assert not torch.equal(some, VIEWS[name](images, seeded(1)))


def test_random_patches_lie_in_the_picture_at_every_place() -> None:
    place = torch.arange(1.0, 1 + 6 * 6).view(1, 1, 6, 6).expand(2000, 1, 6, 6)
    corners = random_crop(place, 4, generator=seeded())[:, 0, 0, 0]
    assert sorted(set(corners.tolist())) == [1.0, 2.0, 3.0, 7.0, 8.0, 9.0, 13.0, 14.0, 15.0]
    patch = random_crop(place[:1], 4, generator=seeded())[0, 0]
    assert torch.equal(patch - patch[0, 0], place[0, 0, :4, :4] - 1)
    assert torch.equal(centre_crop(place[:1], 4)[0, 0], place[0, 0, 1:5, 1:5])
    for cut in (random_crop, centre_crop):
        with pytest.raises(ValueError, match="does not fit"):
            cut(place, 7)


def test_half_of_the_pictures_are_mirrored() -> None:
    images = pictures(400)
    flipped = random_flip(images, generator=seeded())
    mirrored = [torch.equal(a, b.flip(2)) for a, b in zip(flipped, images, strict=True)]
    kept = [torch.equal(a, b) for a, b in zip(flipped, images, strict=True)]
    assert sum(mirrored) + sum(kept) == 400 and 150 < sum(mirrored) < 250


def test_brightness_moves_the_mean_and_contrast_stretches_about_it() -> None:
    images = pictures(3000)
    changed = brightness_and_contrast(images, generator=seeded())
    moved = changed.mean((1, 2, 3)) - images.mean((1, 2, 3))
    assert moved.abs().max() <= 63 / 255 + 1e-5 and moved.abs().max() > 0.98 * 63 / 255
    stretched = changed.std((2, 3)) / images.std((2, 3))
    torch.testing.assert_close(stretched[:, 0], stretched[:, 2], rtol=1e-3, atol=1e-3)  # one factor for a picture
    assert 0.2 - 1e-3 <= stretched.min() < 0.22 and 1.78 < stretched.max() <= 1.8 + 1e-3


def test_a_patch_of_all_the_area_is_the_picture_or_its_mirror_image() -> None:
    images = pictures(20)
    whole = resized_crop(images, smallest=1.0, generator=seeded())
    assert whole.shape == images.shape
    assert resized_crop(images, size=16, generator=seeded()).shape == (20, 3, 16, 16)
    flat = torch.full((4, 3, 32, 32), 0.3)
    torch.testing.assert_close(resized_crop(flat, smallest=0.2, generator=seeded()), flat)


def test_jitter_of_strength_zero_changes_nothing_and_grey_takes_the_colours() -> None:
    images = pictures(5)
    torch.testing.assert_close(
        colour_jitter(images, strength=0.0, grey=0.0, generator=seeded()), images, atol=1e-3, rtol=0
    )
    grey = colour_jitter(images, strength=0.0, grey=1.0, generator=seeded())
    torch.testing.assert_close(grey[:, 0], grey[:, 2], atol=5e-3, rtol=0)
    luma = (images * torch.tensor([0.299, 0.587, 0.114])[:, None, None]).sum(1)
    torch.testing.assert_close(grey[:, 1], luma, atol=5e-3, rtol=0)
