"""A small network that was trained to tell drawn glyphs apart: features of strokes, learnt without anybody's data.

Its weights come with the package (half precision, 0.6 MB); experiments/glyph_network.py trained them, on drawings of
`hush.drawings` alone, so that reading a picture with it costs no privacy.
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

FILE = Path(__file__).parent / "data" / "files" / "glyphs" / "network.npz"
LAYERS = ((1, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1))  # channels in and out, stride
Weights = Sequence[tuple[Tensor, Tensor]]  # of each convolution: weight and bias


@lru_cache(maxsize=1)
def weights() -> Weights:
    """The weights that come with the package."""
    with np.load(FILE) as kept:
        parts = [torch.from_numpy(kept[f"arr_{i}"].astype(np.float32)) for i in range(2 * len(LAYERS))]
    return list(zip(parts[::2], parts[1::2], strict=True))


def strokes(images: Tensor, *, batch_size: int = 250) -> Tensor:
    """Pictures [N, 28, 28] in [0, 1] -> maps [N, 128, 7, 7], every picture by itself.

    >>> strokes(torch.zeros(2, 28, 28)).shape
    torch.Size([2, 128, 7, 7])
    """
    layers = [(weight.to(images), bias.to(images)) for weight, bias in weights()]
    return torch.cat([_maps(part[:, None], layers) for part in images.split(batch_size)])


@torch.no_grad()
def _maps(x: Tensor, layers: Weights) -> Tensor:
    for (weight, bias), (_, _, stride) in zip(layers, LAYERS, strict=True):
        x = F.conv2d(x, weight, bias, stride=stride, padding=1).relu_()
    return x
