"""One entrance: the name of a data set -> its images and labels, every byte checked by sha256."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hush.recipes.data import formats, homes
from hush.recipes.data.errors import DataError

NAMES = ("mnist", "fashion-mnist", "cifar10", "cifar100")
_BUNDLED = Path(__file__).parent / "files"

__all__ = ["NAMES", "DataError", "Images", "load"]


@dataclass(frozen=True)
class Images:
    """Training and test images as stored (uint8) and labels (int64). The test set is not covered by any guarantee."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    classes: int


def load(name: str, *, folder: str | Path | None = None) -> Images:
    """Read a data set: MNIST from the package, others from `folder`, else from HUSH_DATA, else downloaded once.

    x is uint8 [N, 28, 28] or [N, 3, 32, 32] (RGB), y is int64 [N]. Every file is checked against its sha256 before
    it is used; a file that differs is refused. Downloads are kept in HUSH_DATA where it is set, else in the user's
    cache folder. A CIFAR-100 folder in the packed format of this project holds noisy training labels.

    >>> images = load("mnist")
    >>> tuple(images.train_x.shape), tuple(images.test_y.shape)
    ((60000, 28, 28), (10000,))
    """
    if name not in NAMES:
        raise ValueError(f"unknown data set {name!r}: expected one of {', '.join(NAMES)}")
    read: Callable[[Path], formats.Arrays] = formats.READERS[name]
    for root in _roots(name, folder):
        if formats.present(name, root / name):
            return _images(read(root / name), classes=100 if name == "cifar100" else 10)
    if folder is not None:
        raise DataError(f"no {name} in {Path(folder) / name}: expected {', '.join(formats.expected(name))}")
    home = homes.fetch(name, _cache())
    return _images(read(home), classes=100 if name == "cifar100" else 10)


def _roots(name: str, folder: str | Path | None) -> list[Path]:
    if folder is not None:
        return [Path(folder)]
    roots = [_BUNDLED] if name == "mnist" else []
    return [*roots, _cache()]


def _cache() -> Path:
    """Where files from outside the package are looked for, and where downloads are kept."""
    if named := os.environ.get("HUSH_DATA"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hush"


def _images(arrays: formats.Arrays, *, classes: int) -> Images:
    train_x, train_y, test_x, test_y = arrays

    def labels(y: np.ndarray) -> Tensor:
        return torch.from_numpy(y.astype(np.int64))

    return Images(torch.from_numpy(train_x), labels(train_y), torch.from_numpy(test_x), labels(test_y), classes)
