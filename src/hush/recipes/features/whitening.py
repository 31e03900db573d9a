"""Features made round: scaled so that directions in which all pictures vary a lot do not drown the others.

The noise of private training falls on every direction alike, in proportion to the norm of the features, so norm spent
on directions that say little is lost. The spread of the features is measured on pictures drawn at random
(`hush.recipes.features.drawings`), not on data, and costs no privacy. It is taken apart into the spread
over channels and that over places, which a few hundred drawings fix.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hush.recipes.features.drawings import Glyphs, Shapes
from hush.recipes.features.glyph_network import lines, strokes
from hush.recipes.features.scattering import scatter

GROUPS = 27
DRAWINGS, SEED, RIDGE = 500, 2016, 0.1
NORM = 63.0  # of an example's features: that of 81 channels of 7 x 7 with mean square 1
MAPS: dict[str, Callable[..., Tensor]] = {"lines": lines, "scattering": scatter, "strokes": strokes}
CHANNELS = {"lines": 96, "scattering": 81, "strokes": 192}


@dataclass(frozen=True)
class Whitening:
    """x [B, channels, H, W] -> channels @ (x - mean) @ places, one example at a time."""

    mean: Tensor  # [channels, places]
    channels: Tensor  # [channels, channels]
    places: Tensor  # [places, places]

    def __call__(self, x: Tensor) -> Tensor:
        mean, channels, places = (part.to(x.device, x.dtype) for part in (self.mean, self.channels, self.places))
        return (channels @ (x.flatten(2) - mean) @ places).view_as(x)


def whitened(maps: dict[str, Tensor], *, power: float, bent: bool = True, batch_size: int = 2000) -> Tensor:
    """Maps of the same pictures, whitened by drawings, if `bent` their tails bent in (tanh), all channels together.

    `maps` holds under names of MAPS what those functions make of the pictures. Each kind has the same norm, and all
    together NORM, for every picture. One picture at a time, so it may be computed once before a private training.

    >>> whitened({"scattering": torch.rand(2, 81, 7, 7)}, power=0.2).flatten(1).norm(dim=1).round()
    tensor([63., 63.])
    """

    def one(name: str, batch: Tensor) -> Tensor:
        found = drawn_whitening(name, power)(_normed(batch, name))
        found = torch.tanh(found) if bent else found
        size = found.flatten(1).norm(dim=1)[:, None, None, None]
        return found * (NORM / math.sqrt(len(maps)) / size.clamp(min=1e-6))

    names = sorted(maps)
    batches = zip(*(maps[name].split(batch_size) for name in names), strict=True)
    return torch.cat([torch.cat([one(*part) for part in zip(names, b, strict=True)], dim=1) for b in batches])


def features(
    images: Tensor,
    parts: Sequence[str],
    *,
    power: float,
    bent: bool = True,
    watch: Callable[[Sequence[Any]], Iterable[Any]] = iter,
) -> Tensor:
    """Whitened maps of pictures [N, 28, 28] in [0, 1]; `watch` goes through the batches, and may show how far it is."""
    size = 2000 if images.is_cuda else 50
    found = images.new_empty(len(images), sum(CHANNELS[name] for name in parts), 7, 7)  # gigabytes: not twice
    for batch, place in watch(list(zip(images.split(size), found.split(size), strict=True))):
        maps = {name: MAPS[name](batch, batch_size=size) for name in parts}
        place.copy_(whitened(maps, power=power, bent=bent))
    return found


def _normed(maps: Tensor, name: str) -> Tensor:
    return F.group_norm(maps, GROUPS) if name == "scattering" else maps


@lru_cache(maxsize=8)
def drawn_whitening(name: str, power: float) -> Whitening:
    """The whitening by drawings: the spread of every direction, an eigenvalue, to the power -`power` on each side.

    A power of 1/2 makes the spread of drawings equal in all directions, up to a ridge of a tenth of the mean; 0 only
    takes the mean away. The scale is such that a feature of a drawing has a mean square of 1.
    """
    generator = torch.Generator().manual_seed(SEED)
    which = torch.arange(DRAWINGS // 2) % (DRAWINGS // 4)  # two drawings of each glyph, two of each shape
    alphabets = [kind(DRAWINGS // 4, generator=generator) for kind in (Glyphs, Shapes)]
    drawings = torch.cat([alphabet.draw(which, generator=generator) for alphabet in alphabets])
    features = _normed(MAPS[name](drawings).double(), name).flatten(2)
    mean = features.mean(dim=0)
    centred = features - mean
    channels = _power(torch.einsum("ncp,ndp->cd", centred, centred) / len(drawings), -power)
    places = _power(torch.einsum("ncp,ncq->pq", centred, centred) / len(drawings), -power)
    scale = (channels @ centred @ places).square().mean().rsqrt()
    return Whitening(mean, channels * scale, places)


def _power(spread: Tensor, exponent: float) -> Tensor:
    values, vectors = torch.linalg.eigh(spread)
    values = values.clamp(min=0) + RIDGE * values.mean()
    return vectors @ torch.diag(values**exponent) @ vectors.T
