"""Random views of pictures [B, C, H, W] in [0, 1]: on the device, by an explicit generator, each picture by itself.

Several views of an example may be averaged before its gradient is clipped: the example still counts once, and costs
what it costs without views (De et al. 2022). No picture is looked at to change another.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F


def copies(batch: Tensor, count: int) -> Tensor:
    """Each row `count` times in a row: the order that `backward(losses, copies=count)` expects.

    >>> copies(torch.tensor([1, 2]), 3)
    tensor([1, 1, 1, 2, 2, 2])
    """
    return batch.repeat_interleave(count, dim=0)


def centre_crop(images: Tensor, size: int) -> Tensor:
    """The middle patch of size x size.

    >>> centre_crop(torch.zeros(2, 3, 32, 32), 24).shape
    torch.Size([2, 3, 24, 24])
    """
    top, left = ((side - size) // 2 for side in images.shape[-2:])
    if min(top, left) < 0:
        raise ValueError(f"a patch of {size} x {size} does not fit into pictures of {list(images.shape[-2:])}")
    return images[..., top : top + size, left : left + size]


def random_crop(images: Tensor, size: int, *, generator: torch.Generator | None = None) -> Tensor:
    """Of each picture a patch of size x size at a random place."""
    return _random_patch(images, size, size, generator)


def random_flip(images: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    """Each picture mirrored left to right with probability 1/2."""
    mirrored = torch.rand(len(images), 1, 1, 1, generator=generator, device=images.device) < 0.5
    return torch.where(mirrored, images.flip(3), images)


def flip_and_shift(images: Tensor, *, shift: int = 4, generator: torch.Generator | None = None) -> Tensor:
    """Each picture mirrored with probability 1/2 and moved by up to `shift` pixels, borders reflected."""
    framed = F.pad(images, (shift, shift, shift, shift), mode="reflect") if shift else images
    return random_flip(_random_patch(framed, images.shape[2], images.shape[3], generator), generator=generator)


def brightness_and_contrast(
    images: Tensor,
    *,
    brightness: float = 63 / 255,
    contrast: tuple[float, float] = (0.2, 1.8),
    generator: torch.Generator | None = None,
) -> Tensor:
    """Each picture brighter by a number from [-brightness, brightness], then its contrast times one from `contrast`.

    The defaults are those of the tutorial that section 5.3 of the paper names. Contrast stretches every channel about
    its own mean over the picture.
    """
    low, high = contrast
    shape, device = (len(images), 1, 1, 1), images.device
    brighter = images + (2 * torch.rand(shape, generator=generator, device=device) - 1) * brightness
    mean = brighter.mean(dim=(2, 3), keepdim=True)
    return mean + (brighter - mean) * (low + (high - low) * torch.rand(shape, generator=generator, device=device))


def paper_view(images: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    """Section 5.3: a random 24 x 24 patch, mirrored or not, brightness and contrast distorted."""
    patches = random_flip(random_crop(images, 24, generator=generator), generator=generator)
    return brightness_and_contrast(patches, generator=generator)


def resized_crop(
    images: Tensor, *, smallest: float = 0.25, size: int | None = None, generator: torch.Generator | None = None
) -> Tensor:
    """Of each picture a patch of a random share of its area, from `smallest` to 1, mirrored or not, resized."""
    count, channels, side, _ = images.shape
    device, size = images.device, size or side

    def uniform() -> Tensor:
        return torch.rand(count, generator=generator, device=device)

    share = (smallest + (1 - smallest) * uniform()).sqrt()
    stretch = torch.exp((2 * uniform() - 1) * math.log(4 / 3) / 2)
    wide, high = (share * stretch).clamp(max=1), (share / stretch).clamp(max=1)
    mirror = 1 - 2 * (uniform() < 0.5).to(images.dtype)
    place = torch.zeros(count, 2, 3, dtype=images.dtype, device=device)
    place[:, 0, 0], place[:, 1, 1] = wide * mirror, high
    place[:, 0, 2], place[:, 1, 2] = (2 * uniform() - 1) * (1 - wide), (2 * uniform() - 1) * (1 - high)
    grid = F.affine_grid(place, [count, channels, size, size], align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=False)


def colour_jitter(
    images: Tensor, *, strength: float = 0.4, grey: float = 0.2, generator: torch.Generator | None = None
) -> Tensor:
    """Each picture's brightness, contrast, saturation and hue changed; with probability `grey` it loses its colours."""
    count, device, dtype = len(images), images.device, images.dtype

    def factor(spread: float) -> Tensor:
        return 1 + (2 * torch.rand(count, 1, 1, generator=generator, device=device) - 1) * spread

    to_yiq, from_yiq = _yiq(device, dtype)
    hue = (factor(strength / 4) - 1) * 2 * math.pi
    saturation = factor(strength) * (torch.rand(count, 1, 1, generator=generator, device=device) >= grey)
    turn = torch.zeros(count, 3, 3, dtype=dtype, device=device)
    turn[:, 0, 0] = 1
    turn[:, 1:2, 1:2], turn[:, 1:2, 2:3] = saturation * hue.cos(), -saturation * hue.sin()
    turn[:, 2:3, 1:2], turn[:, 2:3, 2:3] = saturation * hue.sin(), saturation * hue.cos()
    change = from_yiq @ turn @ to_yiq
    coloured = (change @ images.flatten(2)) * factor(strength)
    mean = coloured.mean(dim=(1, 2), keepdim=True)
    return (mean + (coloured - mean) * factor(strength)).view_as(images).clamp(0, 1)


@lru_cache(maxsize=8)
def _yiq(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """From red, green, blue to brightness and two axes of colour, and back; kept, since a copy waits for the device."""
    there = torch.tensor([[0.299, 0.587, 0.114], [0.596, -0.274, -0.322], [0.211, -0.523, 0.312]], dtype=dtype)
    return there.to(device), torch.linalg.inv(there).to(device)


def _random_patch(images: Tensor, high: int, wide: int, generator: torch.Generator | None) -> Tensor:
    count, _, height, width = images.shape
    device = images.device
    if high > height or wide > width:
        raise ValueError(f"a patch of {high} x {wide} does not fit into pictures of {height} x {width}")
    down = torch.randint(height - high + 1, (count, 1), generator=generator, device=device)
    right = torch.randint(width - wide + 1, (count, 1), generator=generator, device=device)
    rows, columns = down + torch.arange(high, device=device), right + torch.arange(wide, device=device)
    example = torch.arange(count, device=device)[:, None, None]
    return images.permute(0, 2, 3, 1)[example, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()
