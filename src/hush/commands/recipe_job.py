"""A recipe and its data as a job for `hush train`: features, DP-PCA charged upfront, network, optimizer, schedule."""

import torch
from torch.optim.lr_scheduler import LambdaLR

from hush.accounting import Event, Gaussian
from hush.commands.watching import watched
from hush.gradients.functional import per_example
from hush.noise.pca import ProjectionLayer, dp_pca
from hush.plan import PrivatePreprocessing
from hush.randomness.streams import Key
from hush.recipes import data
from hush.recipes.mnist import Recipe
from hush.sampling.loader import Loader
from hush.training import About, Averaging, Callback, HeldOut, Job, Scheduler

TITLES = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}


def recipe_job(
    name: str,
    *,
    found: Recipe,
    device: str,
    seed: int | None = None,
    weights_seed: int = 0,
    examples: int | None = None,
) -> Job:
    """The job of a recipe on a bundled or known data set; `examples` takes only the first so many of both sets."""
    images = data.load(name)
    trained = slice(min(len(images.train_x) - found.set_aside, examples or len(images.train_x)))
    train_x, train_y = images.train_x[trained], images.train_y[trained]
    test_x, test_y = images.test_x[:examples], images.test_y[:examples]
    x = found.features(train_x.to(device), watch=watched("features of the training set"))
    test = found.features(test_x.to(device), watch=watched("features of the test set"))
    projection, preprocessing = _projection(found, x, seed)
    model = found.model(projection, generator=torch.Generator().manual_seed(weights_seed)).to(device)
    optimizer = found.optimizer(model)
    steps = max(1, found.steps(len(x)))
    callbacks: list[Callback] = []
    if found.fall != 1:
        callbacks.append(Scheduler(LambdaLR(optimizer, found.rate_factor(steps))))
    if found.averaging:
        callbacks.append(Averaging(found.averaging))
    left_out = f" less the last {found.set_aside:,} records" if found.set_aside else ""
    return Job(
        model=model,
        data=Loader(
            (x, train_y.to(device)), name=f"the {TITLES[name]} training set{left_out}", fingerprint=(train_x, train_y)
        ),
        losses_of=per_example(found.loss),
        optimizer=optimizer,
        lot_size=found.lot_size,
        steps=steps,
        clip=found.clipping(),
        preprocessing=preprocessing,
        held_out=HeldOut(data=(test, test_y.to(device)), public=True, name=f"the {TITLES[name]} test set"),
        callbacks=callbacks,
        about=About(
            settings_from=found.settings_from,
            initial_weights="drawn at random or zero",
            public_data=found.public_data,
        ),
    )


def _projection(
    found: Recipe, x: torch.Tensor, seed: int | None
) -> tuple[ProjectionLayer | None, PrivatePreprocessing | None]:
    """A projection layer that is empty until its DP-PCA was charged; none where the recipe has none."""
    if found.pca_noise is None:
        return None, None
    layer, noise = ProjectionLayer(torch.zeros(x.shape[1], found.pca_dimensions)), found.pca_noise

    def run() -> Event:
        key = None if seed is None else Key.from_seed(seed)
        projection = dp_pca(x, dimensions=found.pca_dimensions, noise_multiplier=noise, key=key)
        layer.take(projection)
        return projection.event

    name = f"DP-PCA to {found.pca_dimensions} dimensions"
    return layer, PrivatePreprocessing(name=name, event=Gaussian(noise), run=run)
