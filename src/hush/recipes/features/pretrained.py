"""Networks that were trained without CIFAR-10, and what their frozen layers make of its pictures.

Their weights come with the package in half precision; experiments/cifar_pretrain.py trained them. "paper" is the
network of section 5.3 and "backbone" a residual one, both on CIFAR-100, which is public data here; "drawn" learnt from
random pictures alone. Every picture is read by itself, so that its features cost no privacy.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hush.recipes.features.scattering import Scattering
from hush.recipes.networks import paper_cifar10
from hush.recipes.residual import ResidualNetwork, read_weights

FOLDER = Path(__file__).parents[1] / "data" / "files" / "cifar"
CONVOLUTIONS = 7  # of the paper's network: the layers up to and with Flatten
Watch = Callable[[Sequence[Any]], Iterable[Any]]


def paper_network(*, folder: Path = FOLDER) -> nn.Sequential:
    """The network of section 5.3 as CIFAR-100 left it, with a new last layer of zeros for ten classes."""
    network = paper_cifar10()
    kept = {name: value for name, value in read_weights(folder / "paper.npz").items() if not name.startswith("11.")}
    last = network[11]
    assert isinstance(last, nn.Linear)
    network.load_state_dict(kept | {"11.weight": torch.zeros_like(last.weight), "11.bias": torch.zeros(10)})
    return network


def residual_network(name: str, *, folder: Path = FOLDER) -> ResidualNetwork:
    """The network "backbone" or "drawn", norms folded in; its widths and blocks are those of the weights."""
    kept = dict(read_weights(folder / f"{name}.npz"))
    blocks = Counter(int(key.split(".")[1]) for key in kept if key.endswith("conv1.weight"))
    widths = tuple(len(kept[f"stages.{stage}.0.conv1.weight"]) for stage in sorted(blocks))
    network = ResidualNetwork(widths=widths, blocks=tuple(blocks[stage] for stage in sorted(blocks)))
    network.load_state_dict(kept)
    return network.eval()


@dataclass(frozen=True)
class Directions:
    """Main directions of features over public pictures: their mean, unit vectors [D, d], the spread along each."""

    mean: Tensor
    vectors: Tensor
    spread: Tensor

    @classmethod
    def read(cls, folder: Path = FOLDER) -> "Directions":
        """Those of the network "backbone" over CIFAR-100; in half precision they come with the package."""
        with np.load(folder / "directions.npz") as kept:
            return cls(*(torch.from_numpy(kept[name].astype(np.float32)) for name in ("mean", "vectors", "spread")))

    def rows(self, features: Tensor) -> Tensor:
        """[N, D] -> [N, d]: coordinates along the directions."""
        return (features - self.mean.to(features)) @ self.vectors.to(features)

    def whitened(self, rows: Tensor, power: float, *, norm: float = 5.0) -> Tensor:
        """Coordinates over spread to the power: 0 leaves them, 1 makes all alike; public rows get this root mean norm.

        >>> two = Directions(torch.zeros(2), torch.eye(2), torch.tensor([2.0, 1.0]))
        >>> two.whitened(torch.tensor([[2.0, 1.0]]), 1.0, norm=2**0.5).round(decimals=4).tolist()
        [[1.0, 1.0]]
        """
        scales = self.spread.to(rows) ** -power
        return rows * scales * (norm / (self.spread.to(rows) * scales).norm())


def fixed_views(images: Tensor, count: int, *, shift: int = 2) -> Tensor:
    """[N, C, H, W] -> [N, count, C, H, W]: the pictures, mirrored ones, then both moved to the four corners in turn.

    >>> fixed_views(torch.arange(4.0).view(1, 1, 2, 2), 2, shift=0)[0, 1].flatten().tolist()
    [1.0, 0.0, 3.0, 2.0]
    """
    height, width = images.shape[2:]
    framed = F.pad(images, (shift,) * 4, mode="reflect") if shift else images
    corners = [(shift, shift), (0, 0), (2 * shift, 2 * shift), (0, 2 * shift), (2 * shift, 0)]
    found = []
    for index in range(count):
        down, right = corners[index // 2 % len(corners)]
        patch = framed[:, :, down : down + height, right : right + width]
        found.append(patch.flip(3) if index % 2 else patch)
    return torch.stack(found, dim=1)


def standardised(images: Tensor) -> Tensor:
    """Each picture less its mean, over its standard deviation (at least 1 / sqrt(number of its values)).

    >>> standardised(torch.ones(1, 3, 4, 4)).abs().max().item()
    0.0
    """
    values = images.flatten(1)
    spread = values.std(dim=1, correction=0).clamp(min=values.shape[1] ** -0.5)
    return (images - values.mean(dim=1)[:, None, None, None]) / spread[:, None, None, None]


@torch.no_grad()
def convolved(
    images: Tensor, network: nn.Sequential, *, views: int = 1, batch_size: int = 500, watch: Watch = iter
) -> Tensor:
    """Pictures (uint8) -> [N, views, 2304] in half precision: the paper's convolutions of the 24 x 24 patches."""
    found = images.new_empty(len(images), views, 2304, dtype=torch.float16)
    for part, place in watch(list(zip(images.split(batch_size), found.split(batch_size), strict=True))):
        patches = fixed_views(part.float() / 255, views, shift=2)[..., 4:28, 4:28].flatten(0, 1)
        maps = network[:CONVOLUTIONS](standardised(patches).to(next(network.parameters()).dtype))
        place.copy_(maps.unflatten(0, (len(part), views)))
    return found


@torch.no_grad()
def pooled(
    images: Tensor, network: ResidualNetwork, *, views: int = 2, batch_size: int = 250, watch: Watch = iter
) -> Tensor:
    """Pictures (uint8) -> [N, D]: means and maxima of the last maps and means of the maps before, over some views.

    Each of the three is scaled to norm 1 in every view, and the mean over the views is taken.
    """
    width = 2 * network.widths[-1] + network.widths[-2]
    found = torch.empty(len(images), width, device=images.device)
    kind = next(network.parameters()).dtype
    for part, place in watch(list(zip(images.split(batch_size), found.split(batch_size), strict=True))):
        seen = fixed_views(part.float() / 255, views).flatten(0, 1)
        maps = network.maps(((seen - 0.5) * 4).to(kind).contiguous(memory_format=torch.channels_last))
        last, before = maps[-1].float(), maps[-2].float()
        parts = [last.mean(dim=(2, 3)), last.amax(dim=(2, 3)), before.mean(dim=(2, 3))]
        joined = torch.cat([F.normalize(one, dim=1) for one in parts], dim=1)
        place.copy_(joined.unflatten(0, (len(part), views)).mean(1))
    return found


@torch.no_grad()
def colour_scattering(images: Tensor, *, batch_size: int = 250, watch: Watch = iter) -> Tensor:
    """Pictures (uint8) -> [N, 243, 8, 8] in half precision: scattering of each colour, scaled in 27 groups of maps."""
    network = Scattering(32).to(images.device)
    found = torch.empty(len(images), 3 * network.channels, 8, 8, dtype=torch.float16, device=images.device)
    for part, place in watch(list(zip(images.split(batch_size), found.split(batch_size), strict=True))):
        maps = network((part.float() / 255).flatten(0, 1)).unflatten(0, (len(part), 3)).flatten(1, 2)
        place.copy_(F.group_norm(maps, 27))
    return found
