"""Settings that do well on public data sets: networks, features, data."""

from hush.recipes.cifar import cifar10

__all__ = ["cifar10"]
