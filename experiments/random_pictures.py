"""Colour pictures from random processes: leaves that cover one another, and networks with random weights.

No real picture is in them; what a network learns from them is nobody's data (Baradad et al. 2021).
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def leaves(count: int, side: int, *, shapes: int = 32, generator: torch.Generator) -> Tensor:
    """Ellipses and rectangles of all sizes and colours, plain or striped, thrown on top of one another."""
    device = generator.device

    def uniform(*shape: int) -> Tensor:
        return torch.rand(count, *shape, 1, 1, generator=generator, device=device)

    def colour() -> Tensor:
        grey = uniform(1)
        return grey + (uniform(3) - grey) * uniform(1)  # few colours are as bright as they could be

    line = torch.linspace(-1, 1, side, device=device)
    y, x = line[:, None].expand(side, side), line[None, :].expand(side, side)
    canvas = colour().expand(count, 3, side, side).clone()
    for index in range(shapes):
        size = 0.9 / (1 + 0.35 * index) ** (0.4 + 0.8 * uniform(1))  # large ones first: small ones are seen
        angle, slender = math.pi * uniform(1), 0.3 + 0.7 * uniform(1)
        right, down = x - (2.4 * uniform(1) - 1.2), y - (2.4 * uniform(1) - 1.2)
        along = (right * angle.cos() + down * angle.sin()) / size
        across = (down * angle.cos() - right * angle.sin()) / (size * slender)
        reach = torch.where(
            uniform(1) < 0.5, along.square() + across.square(), torch.maximum(along.abs(), across.abs())
        )
        stripes = torch.sin((3 + 12 * uniform(1)) * along + (8 * uniform(1)) * across + 6.3 * uniform(1))
        plain = (uniform(1) < 0.5).float()
        shade = stripes * (1 - plain) + 0.3 * along * plain
        canvas = torch.where(reach < 1, colour() + (colour() - 0.5) * shade, canvas)
    return canvas.clamp(0, 1)


def grown(count: int, side: int, *, generator: torch.Generator) -> Tensor:
    """What a network with random weights, new at every call, makes of noise that is put in at every scale."""
    device = generator.device

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    maps = noise(count, 48, 4, 4)
    while maps.shape[-1] < side:
        maps = F.interpolate(maps, scale_factor=2, mode="bilinear")
        weight = noise(48, 48, 3, 3) / math.sqrt(48 * 9)
        maps = F.leaky_relu(F.conv2d(F.pad(maps, (1, 1, 1, 1), mode="reflect"), weight), 0.2)
        maps = maps / maps.square().mean(dim=(1, 2, 3), keepdim=True).sqrt()
        maps = maps + 0.15 * noise(1, 48, 1, 1).abs() * noise(count, 48, *maps.shape[2:])
    colours = torch.einsum("nchw,dc->ndhw", maps, noise(3, 48))
    greys = colours.mean(dim=1, keepdim=True)
    colours = greys + (colours - greys) * torch.rand(count, 1, 1, 1, generator=generator, device=device)
    mean, spread = colours.mean(dim=(2, 3), keepdim=True), colours.std(dim=(1, 2, 3), keepdim=True)
    base = 0.25 + 0.5 * torch.rand(count, 3, 1, 1, generator=generator, device=device)
    return (base + 0.25 * (colours - mean) / spread)[..., :side, :side].clamp(0, 1)


def mixture(count: int, side: int, *, generator: torch.Generator) -> Tensor:
    """Half of either kind, and some that are a leaf picture over a grown one."""
    some, others = leaves(count, side, generator=generator), grown(count, side, generator=generator)
    kind = torch.rand(count, 1, 1, 1, generator=generator, device=generator.device)
    share = torch.where(kind < 0.4, 1.0, torch.where(kind < 0.8, 0.0, 0.5))
    return share * some + (1 - share) * others
