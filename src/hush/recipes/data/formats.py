"""The three formats: gzip'd idx files, CIFAR packed losslessly under xz, and CIFAR's own binary archive."""

import gzip
import lzma
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hush.recipes.data import sums
from hush.recipes.data.errors import DataError

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # train x, train y, test x, test y; all uint8
_PIXELS = 3 * 32 * 32


def expected(name: str) -> list[str]:
    """The file names a folder of this data set holds."""
    return list(sums.IDX.get(name) or sums.PACKED[name])


def present(name: str, folder: Path) -> bool:
    """Whether the folder holds the whole data set in one of its formats."""
    choices = (sums.IDX.get(name), sums.PACKED.get(name), sums.ARCHIVE.get(name))
    return any(files is not None and all((folder / file).is_file() for file in files) for files in choices)


def read_idx(name: str, folder: Path) -> Arrays:
    """MNIST and Fashion-MNIST: four gzip'd idx files."""
    train_x, train_y, test_x, test_y = (
        _idx(folder / file, expected_sum) for file, expected_sum in sums.IDX[name].items()
    )
    return train_x, train_y, test_x, test_y


def read_cifar(name: str, folder: Path) -> Arrays:
    """CIFAR: the packed files where they are, else the original archive."""
    if all((folder / file).is_file() for file in sums.PACKED[name]):
        parts = [_packed(folder / file, expected_sum) for file, expected_sum in sums.PACKED[name].items()]
    else:
        ((file, expected_sum),) = sums.ARCHIVE[name].items()
        parts = _archive(folder / file, expected_sum, labels=2 if name == "cifar100" else 1)
    train_x, train_y = (np.concatenate(column) for column in zip(*parts[:-1], strict=True))
    return train_x, train_y, *parts[-1]


READERS: dict[str, Callable[[Path], Arrays]] = {
    "mnist": lambda folder: read_idx("mnist", folder),
    "fashion-mnist": lambda folder: read_idx("fashion-mnist", folder),
    "cifar10": lambda folder: read_cifar("cifar10", folder),
    "cifar100": lambda folder: read_cifar("cifar100", folder),
}


def _idx(path: Path, expected_sum: str) -> np.ndarray:
    try:
        content = gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is not a whole gzip file ({error}); delete it and fetch it again") from error
    sums.check(content, expected_sum, path)
    dimensions = content[3]
    shape = np.frombuffer(content, ">i4", dimensions, 4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape).copy()


def _packed(path: Path, expected_sum: str) -> tuple[np.ndarray, np.ndarray]:
    """Residual planes G, R-G+128, B-G+128 (mod 256) of all images, then the labels."""
    content = np.frombuffer(lzma.decompress(sums.check(path.read_bytes(), expected_sum, path)), np.uint8)
    count = len(content) // (_PIXELS + 1)
    planes = content[: count * _PIXELS].reshape(3, count, 32, 32)
    green, red, blue = (_unpredict(plane) for plane in planes)
    x = np.stack((red + green - np.uint8(128), green, blue + green - np.uint8(128)), axis=1)
    return x, content[count * _PIXELS :].copy()


def _unpredict(residuals: np.ndarray) -> np.ndarray:
    """Undo the median edge detector: each pixel was predicted from its left, upper and upper-left neighbours."""
    r = np.ascontiguousarray(residuals.transpose(1, 2, 0)).astype(np.int16)
    for i in range(r.shape[0]):
        for j in range(r.shape[1]):
            if i and j:
                left, up, corner = r[i, j - 1], r[i - 1, j], r[i - 1, j - 1]
                guess = np.clip(left + up - corner, np.minimum(left, up), np.maximum(left, up))
            elif i or j:
                guess = r[i - 1, j] if i else r[i, j - 1]
            else:
                continue
            r[i, j] = (r[i, j] + guess) & 255
    return r.astype(np.uint8).transpose(2, 0, 1)


def _archive(path: Path, expected_sum: str, *, labels: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """The original archive: records of label bytes (CIFAR-100: coarse, then fine) and 3,072 pixel bytes."""
    sums.check(path.read_bytes(), expected_sum, path)
    parts = []
    with tarfile.open(path) as archive:
        members = sorted((m for m in archive.getmembers() if m.name.endswith(".bin")), key=lambda m: m.name)
        for member in [m for m in members if "test" not in m.name] + [m for m in members if "test" in m.name]:
            file = archive.extractfile(member)
            assert file is not None
            records = np.frombuffer(file.read(), np.uint8).reshape(-1, labels + _PIXELS)
            parts.append((records[:, labels:].reshape(-1, 3, 32, 32).copy(), records[:, labels - 1].copy()))
    return parts
