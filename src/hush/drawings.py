"""Pictures drawn at random: strokes with classes, like the letters of an alphabet nobody uses.

No record of anybody is in them, so whatever is learnt from them (the spread of features, settings) costs no privacy.
"""

import torch
from torch import Tensor

SIDE, STROKES, POINTS = 28, 3, 36


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
    line = torch.arange(SIDE, device=points.device) - (SIDE - 1) / 2
    pixels = torch.stack(torch.meshgrid(line, line, indexing="xy"), dim=-1).flatten(0, 1)
    return torch.cdist(pixels.expand(len(points), -1, -1), points).masked_fill(~used[:, None], 99.0).amin(dim=2)
