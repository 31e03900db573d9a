"""Recipes: everything a private training of MNIST or Fashion-MNIST needs but the budget's noise, as values.

Settings for MNIST were chosen on Fashion-MNIST and the other way round (experiments/mnist_paper.py, mnist_best.py), so
that choosing them looked at no record of the data they are used for.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hush.models import ScaleRows, paper_mnist, scattering_head
from hush.pca import ProjectionLayer
from hush.scattering import scatter

ROW_NORM = 9.0  # about the norm of an MNIST image


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to train: features, network, lots, clipping, optimizer. The noise follows from the budget.

    `pca_noise` is the noise multiplier of a DP-PCA that comes first and is charged with the lots, or None where there
    is none. Clipping is flat at `clip`. The learning rate falls linearly from `rate` to `rate * fall`.
    """

    lot_size: int
    epochs: int
    clip: float
    rate: float
    fall: float = 1.0
    momentum: float = 0.0
    averaging: float = 0.0
    pca_noise: float | None = None
    pca_dimensions: int = 60
    scale_rows: bool = False
    gain: tuple[float, float] = (1.0, 1.0)
    widths: tuple[int, ...] = ()
    groups: int = 27

    def steps(self, examples: int) -> int:
        """Lots in all the epochs."""
        return self.epochs * examples // self.lot_size

    def features(self, images: Tensor) -> Tensor:
        """What the network reads, computed once: pixels in [0, 1] for the projection, else scattering coefficients."""
        pixels = images.to(torch.float32) / 255
        return pixels.flatten(1) if self.pca_noise is not None else scatter(pixels)

    def model(
        self, projection: ProjectionLayer | None = None, *, generator: torch.Generator | None = None
    ) -> nn.Module:
        """The network; where the recipe has a projection, that of `dp_pca(...).layer()` is its frozen first layer."""
        if (projection is None) != (self.pca_noise is None):
            raise ValueError("give a projection exactly where the recipe has one (pca_noise is not None)")
        if projection is None:
            return scattering_head(widths=self.widths, groups=self.groups, generator=generator)
        network = paper_mnist(inputs=self.pca_dimensions, gain=self.gain, generator=generator)
        scaled = [ScaleRows(ROW_NORM)] if self.scale_rows else []
        return nn.Sequential(projection, *scaled, *network)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Plain SGD, with momentum where the recipe has it."""
        trained = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=self.rate, momentum=self.momentum)

    def rate_factor(self, steps: int) -> Callable[[int], float]:
        """For torch's LambdaLR: the share of the first learning rate at each of so many steps."""
        return lambda step: 1 - (1 - self.fall) * min(step, steps) / steps


PAPER = {
    0.5: Recipe(lot_size=1200, epochs=30, clip=1.0, rate=1.0, fall=0.1, averaging=0.99, pca_noise=16.0,
                scale_rows=True, gain=(1.0, 0.1)),
    2.0: Recipe(lot_size=600, epochs=60, clip=1.0, rate=1.0, fall=0.1, averaging=0.99, pca_noise=7.0,
                scale_rows=True, gain=(1.0, 0.1)),
    8.0: Recipe(lot_size=600, epochs=120, clip=1.0, rate=1.0, fall=0.1, averaging=0.99, pca_noise=4.0,
                scale_rows=True, gain=(1.0, 0.1)),
}  # fmt: skip
BEST = {
    "mnist": {2.0: Recipe(lot_size=4096, epochs=20, clip=0.1, rate=8.0, momentum=0.9, averaging=0.9)},
    "fashion-mnist": {3.0: Recipe(lot_size=4096, epochs=40, clip=0.1, rate=8.0, momentum=0.9, averaging=0.9)},
}


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
