"""The paper's networks and the modern ones: plain modules, nothing in them knows about privacy.

Initial weights come from an explicit generator; seeding them does not touch the guarantee.
"""

import math
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Network = TypeVar("Network", bound=nn.Module)


def paper_mnist(
    *,
    inputs: int = 60,
    hidden: int = 1000,
    classes: int = 10,
    gain: tuple[float, float] = (1.0, 1.0),
    generator: torch.Generator | None = None,
) -> nn.Sequential:
    """The MNIST network of section 5.2: one hidden layer of ReLU units, no biases, normal weights gain / sqrt(fan in).

    It reads what a projection (`dp_pca(...).layer()`) makes of the image.

    >>> sum(p.numel() for p in paper_mnist().parameters())
    70000
    """
    layers = [nn.Linear(inputs, hidden, bias=False), nn.Linear(hidden, classes, bias=False)]
    for layer, scale in zip(layers, gain, strict=True):
        nn.init.normal_(layer.weight, std=scale / math.sqrt(layer.in_features), generator=generator)
    return nn.Sequential(layers[0], nn.ReLU(), layers[1])


def paper_cifar10(*, classes: int = 10, generator: torch.Generator | None = None) -> nn.Sequential:
    """The CIFAR-10 network of section 5.3 for 24 x 24 crops: two 5 x 5 convolutions of 64 channels, two layers of 384.

    >>> paper_cifar10()(torch.zeros(2, 3, 24, 24)).shape
    torch.Size([2, 10])
    """
    network = nn.Sequential(
        nn.Conv2d(3, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 6 * 6, 384), nn.ReLU(), nn.Linear(384, 384), nn.ReLU(), nn.Linear(384, classes),
    )  # fmt: skip
    return _he(network, generator)


def scattering_head(
    *,
    channels: int = 81,
    side: int = 7,
    classes: int = 10,
    widths: tuple[int, ...] = (),
    groups: int | None = 27,
    generator: torch.Generator | None = None,
) -> nn.Sequential:
    """A head on scattering features [B, channels, side, side]: linear, or two 3 x 3 convolutions (`widths`) before it.

    The group norm in front (None: no norm) has no parameters and looks at one example at a time; the last layer starts
    at zero.

    >>> scattering_head()(torch.zeros(2, 81, 7, 7)).shape
    torch.Size([2, 10])
    """
    layers: list[nn.Module] = [] if groups is None else [nn.GroupNorm(groups, channels, affine=False)]
    features = channels * side * side
    if widths:
        first, second = widths
        layers += [nn.Conv2d(channels, first, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2)]
        layers += [nn.Conv2d(first, second, 3, padding=1), nn.Tanh()]
        features = second * (side // 2) ** 2
    last = nn.Linear(features, classes)
    network = _he(nn.Sequential(*layers, nn.Flatten(), last), generator, gain=1.0)
    nn.init.zeros_(last.weight)
    return network


class WideResNet(nn.Module):
    """A wide residual network (Zagoruyko and Komodakis 2016) with group norm, which private training needs.

    >>> WideResNet(depth=16, width=4)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        *,
        depth: int = 16,
        width: int = 4,
        classes: int = 10,
        groups: int = 16,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if depth < 10 or (depth - 4) % 6:
            raise ValueError(f"depth must be 6 n + 4 with n >= 1, got {depth}")
        sizes = [16, 16 * width, 32 * width, 64 * width]
        blocks: list[nn.Module] = []
        for stage, (before, after) in enumerate(pairwise(sizes)):
            for index in range((depth - 4) // 6):
                stride = 2 if stage and not index else 1
                blocks.append(_Residual(after if index else before, after, stride, groups))
        self.first = nn.Conv2d(3, sizes[0], 3, padding=1)
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.GroupNorm(groups, sizes[-1])
        self.last = nn.Linear(sizes[-1], classes)
        _he(self, generator)

    def forward(self, x: Tensor) -> Tensor:
        out = self.blocks(self.first(x))
        return self.last(F.relu(self.norm(out)).mean(dim=(2, 3)))


class _Residual(nn.Module):
    def __init__(self, before: int, after: int, stride: int, groups: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(min(groups, before), before)
        self.conv1 = nn.Conv2d(before, after, 3, stride=stride, padding=1)
        self.norm2 = nn.GroupNorm(groups, after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1)
        self.shortcut = nn.Conv2d(before, after, 1, stride=stride) if before != after else None

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(x))
        kept = x if self.shortcut is None else self.shortcut(out)
        out = self.conv2(F.relu(self.norm2(self.conv1(out))))
        return kept + out


def _he(network: Network, generator: torch.Generator | None, gain: float = math.sqrt(2)) -> Network:
    """Normal weights of standard deviation gain / sqrt(fan in), zero biases."""
    for module in network.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            fan_in = module.weight[0].numel()
            nn.init.normal_(module.weight, std=gain / math.sqrt(fan_in), generator=generator)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return network
