"""Scattering features made round: scaled so that directions in which all pictures vary a lot do not drown the others.

The noise of private training falls on every direction alike, in proportion to the norm of the features, so norm spent
on directions that say little is lost. The spread of the features is measured on pictures drawn at random
(`hush.drawings`), not on data, and costs no privacy. It is taken apart into the spread over channels and that over
places, which a few hundred drawings fix.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from hush.drawings import Glyphs
from hush.scattering import scatter

GROUPS = 27
DRAWINGS, SEED, RIDGE = 500, 2016, 0.1


@dataclass(frozen=True)
class Whitening:
    """x [B, channels, H, W] -> channels @ (group_norm(x) - mean) @ places, one example at a time."""

    mean: Tensor  # [channels, places]
    channels: Tensor  # [channels, channels]
    places: Tensor  # [places, places]

    def __call__(self, x: Tensor) -> Tensor:
        mean, channels, places = (part.to(x.device, x.dtype) for part in (self.mean, self.channels, self.places))
        return (channels @ (F.group_norm(x, GROUPS).flatten(2) - mean) @ places).view_as(x)


def whitened(coefficients: Tensor, *, power: float, bent: bool = True, batch_size: int = 2000) -> Tensor:
    """Scattering coefficients, whitened by drawings, `bent`: their tails bent in (tanh), each example's mean square 1.

    One example at a time, so it may be computed once before a private training.

    >>> [round(one.square().mean().item(), 3) for one in whitened(torch.rand(2, 81, 7, 7), power=0.2)]
    [1.0, 1.0]
    """
    whitening = drawn_whitening(power)

    def one_part(part: Tensor) -> Tensor:
        found = torch.tanh(whitening(part)) if bent else whitening(part)
        return found * found.square().mean(dim=(1, 2, 3), keepdim=True).clamp(min=1e-12).rsqrt()

    return torch.cat([one_part(part) for part in coefficients.split(batch_size)])


@lru_cache(maxsize=4)
def drawn_whitening(power: float) -> Whitening:
    """The whitening by drawings: the spread of every direction, an eigenvalue, to the power -`power` on each side.

    A power of 1/2 makes the spread of drawings equal in all directions, up to a ridge of a tenth of the mean; 0 only
    takes the mean away. The scale is such that a feature of a drawing has a mean square of 1.
    """
    generator = torch.Generator().manual_seed(SEED)
    alphabet = Glyphs(DRAWINGS // 4, generator=generator)
    drawings = alphabet.draw(torch.arange(DRAWINGS) % (DRAWINGS // 4), generator=generator)
    features = F.group_norm(scatter(drawings).double(), GROUPS).flatten(2)
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
