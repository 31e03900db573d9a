"""Pictures drawn at random: strokes and filled shapes, with classes, like the letters of an alphabet nobody uses.

No record of anybody is in them, so whatever is learnt from them (the spread of features, settings) costs no privacy.
"""

import math

import torch
from torch import Tensor

SIDE, STROKES, POINTS = 28, 3, 36
CORNERS, SAMPLES = 8, 48  # of an outline


class Glyphs:
    """An alphabet of random glyphs: each is one to three cubic curves, and every drawing of it is a little different.

    Everything lies on the generator's device.

    >>> alphabet = Glyphs(10, generator=torch.Generator().manual_seed(0))
    >>> alphabet.draw(torch.arange(10), generator=torch.Generator().manual_seed(1)).shape
    torch.Size([10, 28, 28])
    """

    def __init__(self, count: int, *, generator: torch.Generator) -> None:
        device = generator.device
        self.controls = 2 * torch.rand(count, STROKES, 4, 2, generator=generator, device=device) - 1
        self.joined = torch.rand(count, STROKES - 1, generator=generator, device=device) < 0.6
        strokes = torch.randint(1, STROKES + 1, (count, 1), generator=generator, device=device)
        self.used = torch.arange(STROKES, device=device) < strokes

    def draw(self, which: Tensor, *, generator: torch.Generator, wobble: float = 0.13) -> Tensor:
        """One drawing [28, 28] in [0, 1] of each glyph asked for; `wobble` moves the control points of the curves."""

        def uniform(*shape: int) -> Tensor:
            return 2 * torch.rand(len(which), *shape, generator=generator, device=generator.device) - 1

        controls = self.controls[which]
        controls = controls + wobble * torch.randn(controls.shape, generator=generator, device=generator.device)
        for stroke in range(1, STROKES):  # a stroke often begins where the one before ended
            ends = self.joined[which, stroke - 1, None]
            controls[:, stroke, 0] = torch.where(ends, controls[:, stroke - 1, 3], controls[:, stroke, 0])
        used = self.used[which]
        points = self._fitted(_curves(controls), used)
        points = points @ _turn(uniform(), uniform(2), uniform()) + 1.5 * uniform(2)[:, None]
        distance = _distance(points, used[:, :, None].expand(-1, -1, POINTS).flatten(1))
        width, sharpness = 1.35 + 0.55 * uniform(1), 3 + uniform(1)
        return torch.sigmoid((width - distance) * sharpness).unflatten(1, (SIDE, SIDE))

    @staticmethod
    def _fitted(points: Tensor, used: Tensor) -> Tensor:
        """All points of each drawing [B, strokes * points, 2], moved and scaled into a box of 19 pixels."""
        inside = used[:, :, None, None]
        high = points.masked_fill(~inside, -9.0).amax(dim=(1, 2))
        low = points.masked_fill(~inside, 9.0).amin(dim=(1, 2))
        size = (high - low).amax(dim=1).clamp(min=0.3)
        centred = points.flatten(1, 2) - ((high + low) / 2)[:, None]
        return centred * (19 / size)[:, None, None]


class Shapes:
    """An alphabet of filled shapes, like pieces of cloth: an outline, often with a second piece or a hole, and tones.

    A tone has a level, stripes and a shade that falls from one side to the other. Every drawing of a shape is a little
    different. Everything lies on the generator's device.

    >>> alphabet = Shapes(10, generator=torch.Generator().manual_seed(0))
    >>> alphabet.draw(torch.arange(10), generator=torch.Generator().manual_seed(1)).shape
    torch.Size([10, 28, 28])
    """

    def __init__(self, count: int, *, generator: torch.Generator) -> None:
        def uniform(*shape: int) -> Tensor:
            return torch.rand(count, *shape, generator=generator, device=generator.device)

        def normal(*shape: int) -> Tensor:
            return torch.randn(count, *shape, generator=generator, device=generator.device)

        radii = 0.35 + 0.65 * uniform(2, CORNERS)
        mirrored = (radii + radii.flip(2).roll(1, 2)) / 2  # the first corner is the topmost one
        self.radii = torch.where(uniform(1, 1) < 0.6, mirrored, radii)
        self.stretch = 0.55 + 0.45 * uniform(2, 2)
        self.second_at = 1.8 * uniform(2) - 0.9
        self.has_second, self.is_hole = uniform() < 0.6, uniform() < 0.3
        self.level = 0.45 + 0.55 * uniform(2)
        self.stripes, self.contrast = 0.9 * normal(2, 2), 0.8 * (uniform(2) - 0.35).clamp(min=0)
        self.shade = 0.25 * normal(2)

    def draw(self, which: Tensor, *, generator: torch.Generator, wobble: float = 0.12) -> Tensor:
        """One drawing [28, 28] in [0, 1] of each shape asked for; `wobble` moves the corners of the outlines."""

        def uniform(*shape: int) -> Tensor:
            return 2 * torch.rand(len(which), *shape, generator=generator, device=generator.device) - 1

        def normal(*shape: int) -> Tensor:
            return torch.randn(len(which), *shape, generator=generator, device=generator.device)

        radii = (self.radii[which] + 0.6 * wobble * normal(2, CORNERS)).clamp(min=0.1)
        pieces = _outlines(radii) * self.stretch[which][:, :, None]
        pieces[:, 1] = 0.6 * pieces[:, 1] + (self.second_at[which] + wobble * normal(2))[:, None]
        has_second = self.has_second[which]
        pieces[:, 1] = torch.where(has_second[:, None, None], pieces[:, 1], pieces[:, 0])
        pieces = self._fitted(pieces, 22 + 3 * uniform())
        turned = pieces.flatten(1, 2) @ _turn(0.5 * uniform(), uniform(2), 0.5 * uniform()) + 1.2 * uniform(2)[:, None]
        pixels = _pixels(turned.device)
        first, second = (_inside(pixels, piece) for piece in turned.split(SAMPLES, dim=1))
        second = second * has_second[:, None]
        waves = torch.sin(self.stripes[which] @ pixels.T + math.pi * uniform(2)[:, :, None])
        tones = (self.level[which] + 0.12 * normal(2)).clamp(0.15, 1.0)[:, :, None]
        tones = tones + self.contrast[which][:, :, None] * waves
        tones = tones + ((self.shade[which] + 0.1 * normal(2)) @ pixels.T / (SIDE / 2))[:, None]
        over = torch.where(self.is_hole[which][:, None], 0.0, tones[:, 1])
        drawn = torch.lerp(first * tones[:, 0], over, second)
        drawn = drawn + 0.04 * normal(SIDE * SIDE) * (drawn > 0.02)
        return drawn.clamp(0.0, 1.0).unflatten(1, (SIDE, SIDE))

    @staticmethod
    def _fitted(pieces: Tensor, box: Tensor) -> Tensor:
        """Outlines [B, 2, samples, 2], moved and scaled into boxes of so many pixels."""
        high, low = pieces.amax(dim=(1, 2)), pieces.amin(dim=(1, 2))
        size = (high - low).amax(dim=1).clamp(min=0.3)
        return (pieces - ((high + low) / 2)[:, None, None]) * (box / size)[:, None, None, None]


def _outlines(radii: Tensor) -> Tensor:
    """Closed curves around the origin [..., samples, 2] through corners at these distances [..., corners] from it."""
    place = torch.arange(SAMPLES, device=radii.device) * (CORNERS / SAMPLES)
    corner = place.long()
    share = (1 - torch.cos(math.pi * (place - corner))) / 2
    distance = torch.lerp(radii[..., corner], radii[..., (corner + 1) % CORNERS], share)
    angle = 2 * math.pi / CORNERS * place
    return torch.stack([distance * angle.sin(), -distance * angle.cos()], dim=-1)


def _inside(pixels: Tensor, outline: Tensor) -> Tensor:
    """1 for pixels inside of the outline [B, samples, 2], 0 outside, soft at its edge."""
    here = outline[:, None] - pixels[None, :, None]
    there = here.roll(-1, 2)
    cross = here[..., 0] * there[..., 1] - here[..., 1] * there[..., 0]
    turns = torch.atan2(cross, (here * there).sum(dim=3)).sum(dim=2).abs() / (2 * math.pi)
    distance = here.square().sum(dim=3).amin(dim=2).sqrt()
    return torch.sigmoid(3 * torch.where(turns > 0.5, distance, -distance))


def _curves(controls: Tensor) -> Tensor:
    """Points on cubic Bezier curves: [B, strokes, 4, 2] -> [B, strokes, points, 2]."""
    t = torch.linspace(0, 1, POINTS, device=controls.device)
    weights = torch.stack([(1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3], dim=1)
    return weights @ controls


def _turn(angle: Tensor, scale: Tensor, shear: Tensor) -> Tensor:
    """A matrix for each drawing: a turn by up to a quarter, 15 % of scale, 20 % of shear; inputs are in [-1, 1]."""
    angle, scale, shear = 0.25 * angle, 1 + 0.15 * scale, 0.2 * shear
    rows = [angle.cos() * scale[:, 0], angle.sin(), shear - angle.sin(), angle.cos() * scale[:, 1]]
    return torch.stack(rows, dim=1).unflatten(1, (2, 2))


def _distance(points: Tensor, used: Tensor) -> Tensor:
    """Distance of every pixel [B, 784] from the nearest point of the drawing that is used."""
    pixels = _pixels(points.device)
    return torch.cdist(pixels.expand(len(points), -1, -1), points).masked_fill(~used[:, None], 99.0).amin(dim=2)


def _pixels(device: torch.device) -> Tensor:
    """The places of all pixels [784, 2], the middle of the picture at the origin."""
    line = torch.arange(SIDE, device=device) - (SIDE - 1) / 2
    return torch.stack(torch.meshgrid(line, line, indexing="xy"), dim=-1).flatten(0, 1)
