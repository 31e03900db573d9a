"""Recipes for CIFAR-10 by what is public: CIFAR-100 ("public"), random pictures ("synthetic"), nothing ("scratch").

Features are computed once, by layers that never saw CIFAR-10 or by scattering; a linear head on them is trained
privately. Settings were chosen by experiments/cifar_best.py on the last 5,000 training records, which are set aside:
looked at without charge, not trained on, and covered by no guarantee.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from hush.pca import ProjectionLayer
from hush.recipes.features.pretrained import FOLDER, Watch, colour_scattering, pooled, residual_network
from hush.recipes.mnist import Recipe

Tier = Literal["public", "synthetic", "scratch"]
CHOSEN = "on 5,000 records set aside, which are not trained on and which the guarantee does not cover"
SET_ASIDE = 5_000
SCALE = {"backbone": 3.0, "drawn": 3.0, "scattering": 0.04}  # brings the features to norms about 5


@dataclass(frozen=True, kw_only=True)
class Cifar10(Recipe):
    """A linear head on frozen features of CIFAR-10; `maps` are "backbone", "drawn" (networks) or "scattering"."""

    maps: tuple[str, ...]
    views: int = 4
    folder: Path = FOLDER

    def features(self, images: Tensor, *, watch: Watch = iter) -> Tensor:
        """[N, 3, 32, 32] (uint8) -> [N, D], computed once; minutes on a CPU, which `watch` may show."""
        found = []
        for name in self.maps:
            if name == "scattering":
                maps = colour_scattering(images, watch=watch).flatten(1).float()
            else:
                network = residual_network(name, folder=self.folder).to(images.device, torch.bfloat16)
                network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
                maps = pooled(images, network, views=self.views, watch=watch)
            found.append(maps.mul_(SCALE[name]))
        return torch.cat(found, dim=1)

    def model(
        self, projection: ProjectionLayer | None = None, *, generator: torch.Generator | None = None
    ) -> nn.Module:
        """The linear head, at zero."""
        if projection is not None:
            raise ValueError("no recipe for CIFAR-10 has a projection")
        inputs = 0
        for name in self.maps:
            widths = () if name == "scattering" else residual_network(name, folder=self.folder).widths
            inputs += 2 * widths[-1] + widths[-2] if widths else 243 * 64
        head = nn.Linear(inputs, 10)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        return head


def _linear(maps: tuple[str, ...], lot_size: int, epochs: int, clip: float, rate: float) -> Cifar10:
    return Cifar10(
        settings_from=CHOSEN, maps=maps, lot_size=lot_size, epochs=epochs, clip=clip, rate=rate, fall=0.0,
        momentum=0.9, averaging=0.9, set_aside=SET_ASIDE,
    )  # fmt: skip


TIERS: dict[str, dict[float, Cifar10]] = {
    "public": {1.0: _linear(("backbone",), 16384, 60, 1.0, 1.0)},
    "synthetic": {1.0: _linear(("drawn", "scattering"), 16384, 60, 1.0, 1.0)},
    "scratch": {1.0: _linear(("scattering",), 16384, 60, 1.0, 1.0)},
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
