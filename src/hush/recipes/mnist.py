"""Recipes: everything a private training of MNIST or Fashion-MNIST needs but the budget's noise, as values.

Every recipe says where its settings come from. Those for MNIST (experiments/mnist_paper.py, mnist_best.py) were chosen
on stand-ins: Fashion-MNIST, for the paper's network also glyphs drawn at random.
Those for Fashion-MNIST were chosen on 10,000 of its own records, which are set aside: they are not trained on, and no
guarantee covers them. What is not chosen there, in the best recipes the linear head, lots of 4,096, 40 epochs,
clipping at 0.1, was fixed by earlier trials on both data sets, at no charge: each recipe's `settings_from` says so.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hush.clipping.clips import Clip, FlatClip, PerLayerClip
from hush.noise.pca import ProjectionLayer
from hush.recipes.features.whitening import CHANNELS, features
from hush.recipes.networks import paper_mnist, scattering_head

WITHOUT_MNIST = "on drawn glyphs and Fashion-MNIST, without a look at this data"
FOR_MNIST = "features and rate on Fashion-MNIST; the rest in earlier trials on both data sets"
FOR_FASHION = (
    "features and rate on 10,000 records set aside, which are not trained on and which the guarantee does not cover; "
    "the rest in earlier trials on both data sets"
)
SET_ASIDE = 10_000


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to train: features, network, lots, clipping, optimizer. The noise follows from the budget.

    `pca_noise` is the noise multiplier of a DP-PCA that comes first and is charged with the lots, or None where there
    is none; the network then reads the maps named in `parts` (see `hush.recipes.features.whitening`), whitened to the
    power `whitening` and, if `bent`, their tails bent in. Clipping is flat at `clip`, or every layer at `clip` by
    itself. The learning rate falls linearly from `rate` to `rate * fall`. `settings_from` says how the settings were
    chosen; the last `set_aside` records served for that and are not trained on.
    """

    settings_from: str
    lot_size: int
    epochs: int
    clip: float
    rate: float
    fall: float = 1.0
    per_layer: bool = False
    momentum: float = 0.0
    averaging: float = 0.0
    pca_noise: float | None = None
    pca_dimensions: int = 60
    gain: tuple[float, float] = (1.0, 1.0)
    parts: tuple[str, ...] = ("lines", "scattering", "strokes")
    whitening: float = 0.2
    bent: bool = True
    set_aside: int = 0

    def steps(self, examples: int) -> int:
        """Lots in all the epochs."""
        return self.epochs * examples // self.lot_size

    def clipping(self) -> Clip:
        """The rule by which gradients are clipped."""
        return PerLayerClip(self.clip) if self.per_layer else FlatClip(self.clip)

    def features(self, images: Tensor, *, watch: Callable[[Sequence[Any]], Iterable[Any]] = iter) -> Tensor:
        """What the network reads, computed once: pixels in [0, 1] for the projection, else whitened maps.

        Maps take minutes on a CPU: `watch` goes through the batches, and may show how far it is.
        """
        pixels = images.to(torch.float32) / 255
        if self.pca_noise is not None:
            return pixels.flatten(1)
        return features(pixels, self.parts, power=self.whitening, bent=self.bent, watch=watch)

    def model(
        self, projection: ProjectionLayer | None = None, *, generator: torch.Generator | None = None
    ) -> nn.Module:
        """The network; where the recipe has a projection, that of `dp_pca(...).layer()` is its frozen first layer."""
        if (projection is None) != (self.pca_noise is None):
            raise ValueError("give a projection exactly where the recipe has one (pca_noise is not None)")
        if projection is None:
            channels = sum(CHANNELS[name] for name in self.parts)
            return scattering_head(channels=channels, groups=None, generator=generator)
        network = paper_mnist(inputs=self.pca_dimensions, gain=self.gain, generator=generator)
        return nn.Sequential(projection, *network)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Plain SGD, with momentum where the recipe has it."""
        trained = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=self.rate, momentum=self.momentum)

    @property
    def public_data(self) -> str:
        """Which data was taken as public, for the report."""
        return ""

    @property
    def loss(self) -> Callable[..., Tensor]:
        """The loss of the model's outputs."""
        return F.cross_entropy

    def rate_factor(self, steps: int) -> Callable[[int], float]:
        """For torch's LambdaLR: the share of the first learning rate at each of so many steps."""
        return lambda step: 1 - (1 - self.fall) * min(step, steps) / steps


PAPER = {
    0.5: Recipe(settings_from=WITHOUT_MNIST, lot_size=600, epochs=30, clip=2.0, per_layer=True,
                rate=0.2131, fall=0.1, averaging=0.95, pca_noise=16.0, gain=(1.0, 1.0)),
    2.0: Recipe(settings_from=WITHOUT_MNIST, lot_size=2400, epochs=120, clip=0.5,
                rate=6.674, fall=0.3, averaging=0.99, pca_noise=7.0, gain=(1.4, 0.3)),
    8.0: Recipe(settings_from=WITHOUT_MNIST, lot_size=2400, epochs=120, clip=0.5,
                rate=14.77, fall=0.3, averaging=0.95, pca_noise=4.0, gain=(1.0, 1.0)),
}  # fmt: skip
BEST = {
    "mnist": {
        0.5: Recipe(settings_from=FOR_MNIST, lot_size=4096, epochs=40, clip=0.1, rate=1.0, fall=0.2,
                    momentum=0.9, averaging=0.97, whitening=0.2, bent=False),
        2.0: Recipe(settings_from=FOR_MNIST, lot_size=4096, epochs=40, clip=0.1, rate=2.8, fall=0.2,
                    momentum=0.9, averaging=0.97, whitening=0.3, bent=False),
        8.0: Recipe(settings_from=FOR_MNIST, lot_size=4096, epochs=40, clip=0.1, rate=16.0, fall=0.2,
                    momentum=0.9, averaging=0.97, parts=("lines", "strokes"), whitening=0.2, bent=False),
    },
    "fashion-mnist": {
        3.0: Recipe(settings_from=FOR_FASHION, lot_size=4096, epochs=40, clip=0.1, rate=5.6, fall=0.2,
                    momentum=0.9, averaging=0.97, whitening=0.3, bent=False, set_aside=SET_ASIDE),
    },
}  # fmt: skip


def recipe(data_set: str, *, model: str, epsilon: float) -> Recipe:
    """The recipe tuned for the largest epsilon not above this one (the smallest there is, if all are above).

    >>> recipe("mnist", model="paper", epsilon=3.0).pca_noise
    7.0
    """
    if model == "paper" and data_set == "mnist":
        tuned = PAPER
    elif model == "best" and data_set in BEST:
        tuned = BEST[data_set]
    else:
        raise ValueError(
            f"no recipe for {data_set!r} with model {model!r}; there are mnist (paper, best) and fashion-mnist (best)"
        )
    below = [known for known in tuned if known <= epsilon]
    return tuned[max(below) if below else min(tuned)]
