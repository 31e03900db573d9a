"""A small network that was trained to tell drawn glyphs and shapes apart: features learnt without anybody's data.

Its weights come with the package (half precision, 1.2 MB); experiments/glyph_network.py trained them, on drawings of
`hush.recipes.features.drawings` alone, so that reading a picture with it costs no privacy.
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

FILE = Path(__file__).parents[1] / "data" / "files" / "glyphs" / "network.npz"
LAYERS = ((1, 48, 1), (48, 96, 2), (96, 96, 1), (96, 192, 2), (192, 192, 1))  # channels in and out, stride
Weights = Sequence[tuple[Tensor, Tensor]]  # of each convolution: weight and bias


@lru_cache(maxsize=1)
def weights() -> Weights:
    """The weights that come with the package."""
    with np.load(FILE) as kept:
        parts = [torch.from_numpy(kept[f"arr_{i}"].astype(np.float32)) for i in range(2 * len(LAYERS))]
    return list(zip(parts[::2], parts[1::2], strict=True))


def strokes(images: Tensor, *, batch_size: int = 250) -> Tensor:
    """Pictures [N, 28, 28] in [0, 1] -> maps [N, 192, 7, 7] of the last layer, every picture by itself.

    >>> strokes(torch.zeros(2, 28, 28)).shape
    torch.Size([2, 192, 7, 7])
    """
    return torch.cat([_maps(part, len(LAYERS)) for part in images.split(batch_size)])


def lines(images: Tensor, *, batch_size: int = 250) -> Tensor:
    """Pictures [N, 28, 28] in [0, 1] -> maps [N, 96, 7, 7] of the third layer, the mean of four places each.

    >>> lines(torch.zeros(2, 28, 28)).shape
    torch.Size([2, 96, 7, 7])
    """
    return torch.cat([F.avg_pool2d(_maps(part, 3), 2) for part in images.split(batch_size)])


@torch.no_grad()
def _maps(images: Tensor, depth: int) -> Tensor:
    x = images[:, None]
    for (weight, bias), (_, _, stride) in list(zip(weights(), LAYERS, strict=True))[:depth]:
        x = F.conv2d(x, weight.to(x), bias.to(x), stride=stride, padding=1).relu_()
    return x
