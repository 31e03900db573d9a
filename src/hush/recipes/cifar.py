"""Recipes for CIFAR-10 by what is public: CIFAR-100 ("public"), random pictures ("synthetic"), nothing ("scratch").

Features are computed once, by layers that never saw CIFAR-10 or by scattering; a head on them is trained privately.
Settings were chosen by experiments/cifar_best.py on the last 5,000 training records, which are set aside: looked at
without charge, not trained on, and covered by no guarantee.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hush.noise.pca import ProjectionLayer
from hush.recipes.features.pretrained import (
    FOLDER,
    Directions,
    Watch,
    colour_scattering,
    pooled,
    residual_network,
)
from hush.recipes.mnist import Recipe
from hush.recipes.networks import scattering_head

Tier = Literal["public", "synthetic", "scratch"]
CHOSEN = "on 5,000 records set aside, which are not trained on and which the guarantee does not cover"
SET_ASIDE = 5_000
SCALE = {"backbone": 3.0, "drawn": 3.0, "scattering": 0.04}  # brings the features to norms about 5


@dataclass(frozen=True, kw_only=True)
class Cifar10(Recipe):
    """A head on frozen features of CIFAR-10; `maps` are "backbone", "drawn" (networks) or "scattering".

    With a `power` what "backbone" gives is taken along the main directions of CIFAR-100 and whitened by their spread
    there to that power. The head is linear, or (`widths`) two convolutions on the scattering of each picture and of its
    mirror image, whose losses are averaged before clipping. `won_as` names the row of results/cifar_*.json that the
    settings come from.
    """

    won_as: str
    maps: tuple[str, ...]
    widths: tuple[int, ...] = ()
    power: float | None = None
    views: int = 4
    folder: Path = FOLDER

    def features(self, images: Tensor, *, watch: Watch = iter) -> Tensor:
        """[N, 3, 32, 32] (uint8) -> [N, D], or [N, 2, 243, 8, 8] for convolutions; minutes on a CPU."""
        if self.widths:
            return torch.stack([colour_scattering(x, watch=watch) for x in (images, images.flip(3))], dim=1)
        found = []
        for name in self.maps:
            if name == "scattering":
                maps = colour_scattering(images, watch=watch).flatten(1).float()
            else:
                network = residual_network(name, folder=self.folder).to(images.device, torch.bfloat16)
                network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
                maps = pooled(images, network, views=self.views, watch=watch)
            if name == "backbone" and self.power is not None:
                known = Directions.read(self.folder)
                found.append(known.whitened(known.rows(maps), self.power))
            else:
                found.append(maps.mul_(SCALE[name]))
        return torch.cat(found, dim=1)

    def model(
        self, projection: ProjectionLayer | None = None, *, generator: torch.Generator | None = None
    ) -> nn.Module:
        """The head; a linear one starts at zero."""
        if projection is not None:
            raise ValueError("no recipe for CIFAR-10 has a projection")
        if self.widths:
            head = scattering_head(channels=243, side=8, widths=self.widths, groups=None, generator=generator)
            return OverViews(head)
        linear = nn.Linear(sum(self._width(name) for name in self.maps), 10)
        nn.init.zeros_(linear.weight)
        nn.init.zeros_(linear.bias)
        return linear

    @property
    def public_data(self) -> str:
        """Of the public tier CIFAR-100: photographs that were published for research."""
        if "backbone" not in self.maps:
            return ""
        return "CIFAR-100, published for research: a network learnt from it, whose weights come with the package"

    @property
    def loss(self) -> Callable[..., Tensor]:
        """Of views the mean of their losses."""
        return F.nll_loss if self.widths else F.cross_entropy

    def _width(self, name: str) -> int:
        if name == "scattering":
            return 243 * 64
        if name == "backbone" and self.power is not None:
            return Directions.read(self.folder).vectors.shape[1]
        widths = residual_network(name, folder=self.folder).widths
        return 2 * widths[-1] + widths[-2]


class OverViews(nn.Module):
    """The head's log-probabilities averaged over the views [B, K, ..] of a record: nll_loss is the views' mean loss."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x.flatten(0, 1).to(torch.float32))
        return out.log_softmax(1).unflatten(0, x.shape[:2]).mean(1)


def _chosen(won_as: str, maps: tuple[str, ...], **settings: Any) -> Cifar10:
    return Cifar10(
        settings_from=CHOSEN, won_as=won_as, maps=maps, fall=0.0, momentum=0.9, averaging=0.9, set_aside=SET_ASIDE,
        **settings,
    )  # fmt: skip


_FROZEN, _BESIDE = "residual network frozen, linear head", "the same beside colour scattering, linear head"
_CONVOLUTIONS = "colour scattering, two convolutions"
TIERS: dict[str, dict[float, Cifar10]] = {
    "public": {
        epsilon: _chosen(_FROZEN, ("backbone",), power=0.5, lot_size=8192, epochs=45, clip=1.0, rate=rate)
        for epsilon, rate in ((1.0, 2.0), (2.0, 2.0), (4.0, 8.0), (8.0, 8.0))
    },
    "synthetic": {
        1.0: _chosen(_BESIDE, ("drawn", "scattering"), lot_size=4096, epochs=30, clip=1.0, rate=2.0),
    },
    "scratch": {
        1.0: _chosen(_CONVOLUTIONS, ("scattering",), widths=(64, 64), lot_size=8192, epochs=50, clip=0.3, rate=4.0),
    },
}


def cifar10(tier: Tier | str = "public", *, epsilon: float) -> Cifar10:
    """The recipe of a tier for the largest epsilon not above this one (the smallest there is, if all are above).

    >>> import hush.recipes
    >>> hush.recipes.cifar10("public", epsilon=2.5).maps
    ('backbone',)
    """
    if tier not in TIERS:
        raise ValueError(f"no recipe for CIFAR-10 in the tier {tier!r}: expected {', '.join(get_args(Tier))}")
    tuned = TIERS[tier]
    below = [known for known in tuned if known <= epsilon]
    return tuned[max(below) if below else min(tuned)]
