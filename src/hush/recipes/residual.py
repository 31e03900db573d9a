"""A residual network that is trained with batch norm on public pictures and used without: folded, it has none left.

Batch norm mixes the examples of a batch, so a private model may not have it in training mode. With its statistics fixed
it is a scale and a shift of each channel, which experiments/cifar_pretrain.py takes into the convolution before it:
what remains is convolutions with biases, each example by itself.
"""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ResidualNetwork(nn.Module):
    """Stages of residual blocks of two 3 x 3 convolutions; every stage but the first halves the sides.

    It gives the maps of its last stage, [B, widths[-1], H / 4, W / 4] for three stages; there is no classifier.

    >>> ResidualNetwork(widths=(8, 16, 32), blocks=(1, 1, 1))(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 32, 8, 8])
    """

    def __init__(
        self,
        *,
        widths: tuple[int, ...] = (64, 128, 384),
        blocks: tuple[int, ...] = (3, 3, 2),
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        if len(widths) != len(blocks) or min(blocks) < 1:
            raise ValueError(f"expected as many widths as numbers of blocks, each at least 1, got {widths}, {blocks}")
        self.widths, self.blocks, self.batch_norm = widths, blocks, batch_norm
        self.first = convolution(3, widths[0], 3, batch_norm=batch_norm)
        stages = []
        for index, (before, after) in enumerate(pairwise((widths[0], *widths))):
            parts = [ResidualBlock(before, after, stride=2 if index else 1, batch_norm=batch_norm)]
            parts += [ResidualBlock(after, after, batch_norm=batch_norm) for _ in range(blocks[index] - 1)]
            stages.append(nn.Sequential(*parts))
        self.stages = nn.ModuleList(stages)

    def forward(self, x: Tensor) -> Tensor:
        return self.maps(x)[-1]

    def maps(self, x: Tensor) -> list[Tensor]:
        """The maps at the end of every stage."""
        x, found = F.relu(self.first(x)), []
        for stage in self.stages:
            x = stage(x)
            found.append(x)
        return found


class ResidualBlock(nn.Module):
    """relu(x + conv(relu(conv(x)))), with a 1 x 1 convolution on x where width or stride changes."""

    def __init__(self, before: int, after: int, *, stride: int = 1, batch_norm: bool = False) -> None:
        super().__init__()
        self.conv1 = convolution(before, after, 3, stride=stride, batch_norm=batch_norm)
        self.conv2 = convolution(after, after, 3, batch_norm=batch_norm)
        same = before == after and stride == 1
        self.shortcut = None if same else convolution(before, after, 1, stride=stride, batch_norm=batch_norm)

    def forward(self, x: Tensor) -> Tensor:
        kept = x if self.shortcut is None else self.shortcut(x)
        return F.relu(kept + self.conv2(F.relu(self.conv1(x))))


def convolution(before: int, after: int, size: int, *, stride: int = 1, batch_norm: bool = False) -> nn.Module:
    """A convolution that keeps the sides (but for its stride), with a bias, or with a batch norm behind it."""
    layer = nn.Conv2d(before, after, size, stride=stride, padding=size // 2, bias=not batch_norm)
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return nn.Sequential(layer, nn.BatchNorm2d(after)) if batch_norm else layer


def read_weights(path: str | Path) -> Mapping[str, Tensor]:
    """Parameters that were kept in half precision under their names (experiments/cifar_pretrain.py), in single."""
    with np.load(path) as kept:
        return {name: torch.from_numpy(kept[name].astype(np.float32)) for name in kept.files}
