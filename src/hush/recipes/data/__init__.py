"""Image data sets: MNIST in the package; Fashion-MNIST, CIFAR-10, CIFAR-100 from a folder or their public homes."""

from hush.recipes.data.images import NAMES, DataError, Images, load

__all__ = ["NAMES", "DataError", "Images", "load"]
