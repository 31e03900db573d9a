"""A recipe and its data as a job for `hush train`: features, DP-PCA charged upfront, network, optimizer, schedule."""

from dataclasses import replace

import torch
from torch.optim.lr_scheduler import LambdaLR

from hush.accounting import Event, Gaussian
from hush.commands.watching import watched
from hush.pca import ProjectionLayer, dp_pca
from hush.randomness.streams import Key
from hush.recipes import data
from hush.recipes.cifar import cifar10
from hush.recipes.mnist import Recipe, recipe
from hush.training import HeldOut, Job, Upfront

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
    projection, upfront = _projection(found, x, seed)
    model = found.model(projection, generator=torch.Generator().manual_seed(weights_seed)).to(device)
    optimizer = found.optimizer(model)
    steps = max(1, found.steps(len(x)))
    return Job(
        model=model,
        train_set=(x, train_y.to(device)),
        loss=found.loss,
        optimizer=optimizer,
        lot_size=found.lot_size,
        epochs=found.epochs,
        steps=steps,
        clip=found.clipping(),
        held_out=HeldOut(data=(test, test_y.to(device)), public=True, name=f"the {TITLES[name]} test set"),
        scheduler=LambdaLR(optimizer, found.rate_factor(steps)) if found.fall != 1 else None,
        average=found.averaging,
        upfront=upfront,
        fingerprint_of=(train_x, train_y),
        data_name=f"the {TITLES[name]} training set"
        + (f" less the last {found.set_aside:,} records" if found.set_aside else ""),
        settings_from=found.settings_from,
    )


def choose(name: str, *, model: str, epsilon: float, lot: int | None, epochs: int | None, clip: float | None) -> Recipe:
    """The recipe for a data set and a budget, with what the caller wants otherwise; CIFAR-10's models are its tiers."""
    found = cifar10(model, epsilon=epsilon) if name == "cifar10" else recipe(name, model=model, epsilon=epsilon)
    return replace(
        found,
        lot_size=found.lot_size if lot is None else lot,
        epochs=found.epochs if epochs is None else epochs,
        clip=found.clip if clip is None else clip,
    )


def _projection(found: Recipe, x: torch.Tensor, seed: int | None) -> tuple[ProjectionLayer | None, Upfront | None]:
    """A projection layer that is empty until its DP-PCA was charged; none where the recipe has none."""
    if found.pca_noise is None:
        return None, None
    layer, noise = ProjectionLayer(torch.zeros(x.shape[1], found.pca_dimensions)), found.pca_noise

    def run() -> Event:
        key = None if seed is None else Key.from_seed(seed)
        projection = dp_pca(x, dimensions=found.pca_dimensions, noise_multiplier=noise, key=key)
        layer.matrix.copy_(projection.matrix)
        return projection.event

    name = f"DP-PCA to {found.pca_dimensions} dimensions"
    return layer, Upfront(name=name, event=Gaussian(noise), run=run)
