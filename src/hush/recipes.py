"""Recipes: everything a private training of MNIST or Fashion-MNIST needs but the budget's noise, as values.

Every recipe says where its settings come from. Those of experiments/mnist_paper.py and mnist_best.py were chosen on
stand-ins (the other data set, for the best recipes also glyphs drawn at random), so choosing them looked at no record
of the data they are used for. What all best recipes share (whitened scattering, a linear head, lots of 4,096, 40
epochs, clipping at 0.1) was fixed by trials on both data sets.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hush.gradients.clip import Clip, FlatClip, PerLayerClip
from hush.models import paper_mnist, scattering_head
from hush.pca import ProjectionLayer
from hush.scattering import scatter
from hush.whitening import whitened

ON_FASHION = "on Fashion-MNIST, without a look at this data"
RATE_FOR_MNIST = "the rate on Fashion-MNIST and drawn glyphs; everything else in trials on both data sets"
RATE_FOR_FASHION = "the rate on MNIST and rough drawn glyphs; everything else in trials on both data sets"
AS_PRINTED = "by Abadi et al. (2016), who chose them on MNIST itself and did not charge for that"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to train: features, network, lots, clipping, optimizer. The noise follows from the budget.

    `pca_noise` is the noise multiplier of a DP-PCA that comes first and is charged with the lots, or None where there
    is none; the network then reads scattering features, whitened to the power `whitening`. Clipping is flat at `clip`,
    or every layer at `clip` by itself. The learning rate falls linearly from `rate` to `rate * fall` over `fall_epochs`
    (None: over the whole run) and then stays. `settings_from` says how the settings were chosen.
    """

    settings_from: str
    lot_size: int
    epochs: int
    clip: float
    rate: float
    fall: float = 1.0
    fall_epochs: int | None = None
    per_layer: bool = False
    momentum: float = 0.0
    averaging: float = 0.0
    pca_noise: float | None = None
    pca_dimensions: int = 60
    gain: tuple[float, float] = (1.0, 1.0)
    whitening: float = 0.2

    def steps(self, examples: int) -> int:
        """Lots in all the epochs."""
        return self.epochs * examples // self.lot_size

    def clipping(self) -> Clip:
        """The rule by which gradients are clipped."""
        return PerLayerClip(self.clip) if self.per_layer else FlatClip(self.clip)

    def features(self, images: Tensor) -> Tensor:
        """What the network reads, computed once: pixels in [0, 1] for the projection, else whitened scattering."""
        pixels = images.to(torch.float32) / 255
        if self.pca_noise is not None:
            return pixels.flatten(1)
        return whitened(scatter(pixels, batch_size=2000 if pixels.is_cuda else 50), power=self.whitening)

    def model(
        self, projection: ProjectionLayer | None = None, *, generator: torch.Generator | None = None
    ) -> nn.Module:
        """The network; where the recipe has a projection, that of `dp_pca(...).layer()` is its frozen first layer."""
        if (projection is None) != (self.pca_noise is None):
            raise ValueError("give a projection exactly where the recipe has one (pca_noise is not None)")
        if projection is None:
            return scattering_head(groups=None, generator=generator)
        network = paper_mnist(inputs=self.pca_dimensions, gain=self.gain, generator=generator)
        return nn.Sequential(projection, *network)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Plain SGD, with momentum where the recipe has it."""
        trained = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=self.rate, momentum=self.momentum)

    def rate_factor(self, steps: int) -> Callable[[int], float]:
        """For torch's LambdaLR: the share of the first learning rate at each of so many steps."""
        falling = steps if self.fall_epochs is None else max(1, round(steps * self.fall_epochs / self.epochs))
        return lambda step: 1 - (1 - self.fall) * min(step, falling) / falling


PAPER = {
    0.5: Recipe(settings_from=ON_FASHION, lot_size=600, epochs=30, clip=1.0, rate=0.965, fall=0.1, averaging=0.95,
                pca_noise=16.0, gain=(2.0, 0.1)),
    2.0: Recipe(settings_from=ON_FASHION, lot_size=2400, epochs=120, clip=2.0, rate=1.743, fall=0.1, averaging=0.95,
                pca_noise=7.0, gain=(1.0, 0.1)),
    8.0: Recipe(settings_from=AS_PRINTED, lot_size=600, epochs=413, clip=4.0, per_layer=True, rate=0.1, fall=0.52,
                fall_epochs=10, pca_noise=4.0),
}  # fmt: skip
BEST = {
    "mnist": {
        epsilon: Recipe(settings_from=RATE_FOR_MNIST, lot_size=4096, epochs=40, clip=0.1, rate=rate, fall=0.2,
                        momentum=0.9, averaging=0.97, whitening=0.2)
        for epsilon, rate in ((0.5, 1.0), (2.0, 4.0), (8.0, 11.0))
    },
    "fashion-mnist": {
        epsilon: Recipe(settings_from=RATE_FOR_FASHION, lot_size=4096, epochs=40, clip=0.1, rate=rate, fall=0.2,
                        momentum=0.9, averaging=0.97, whitening=0.2)
        for epsilon, rate in ((3.0, 5.6),)
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
