"""Settings that do well on public data sets: networks, features, data."""

from hush.recipes import mnist as _mnist
from hush.recipes.cifar import cifar10
from hush.recipes.mnist import Recipe

__all__ = ["cifar10", "recipe"]


def recipe(data_set: str, kind: str, *, epsilon: float) -> Recipe:
    """The recipe of a data set: of the MNISTs by model (paper, best), of CIFAR-10 by tier."""
    if data_set == "cifar10":
        return cifar10(kind, epsilon=epsilon)
    return _mnist.recipe(data_set, model=kind, epsilon=epsilon)
