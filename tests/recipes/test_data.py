"""hush.recipes.data: what is bundled, what a folder holds, what is refused."""

import gzip
import hashlib
import io
import lzma
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest

from hush.recipes.data import DataError, homes, load, sums
from hush.recipes.data.formats import read_cifar


def idx(array: np.ndarray) -> bytes:
    return struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}i", *array.shape) + array.tobytes()


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def fashion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, dict[str, np.ndarray]]:
    rng = np.random.default_rng(3)
    arrays = {
        "train-images-idx3-ubyte.gz": rng.integers(0, 256, (7, 28, 28), np.uint8),
        "train-labels-idx1-ubyte.gz": rng.integers(0, 10, 7, np.uint8),
        "t10k-images-idx3-ubyte.gz": rng.integers(0, 256, (3, 28, 28), np.uint8),
        "t10k-labels-idx1-ubyte.gz": rng.integers(0, 10, 3, np.uint8),
    }
    (tmp_path / "fashion-mnist").mkdir()
    for file, array in arrays.items():
        (tmp_path / "fashion-mnist" / file).write_bytes(gzip.compress(idx(array)))
    monkeypatch.setitem(sums.IDX, "fashion-mnist", {file: digest(idx(array)) for file, array in arrays.items()})
    return tmp_path, arrays


def test_mnist_is_bundled_whole_and_known() -> None:
    images = load("mnist")
    assert images.train_x.shape == (60_000, 28, 28) and images.test_x.shape == (10_000, 28, 28)
    assert images.train_y[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]  # the well-known first digits
    assert images.test_y[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
    assert images.train_y.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert abs(images.train_x.double().mean().item() / 255 - 0.1306604762738429) < 1e-12  # printed everywhere


def test_a_folder_is_read_and_named_by_the_environment(fashion, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, arrays = fashion
    monkeypatch.setenv("HUSH_DATA", str(folder))
    images = load("fashion-mnist")
    assert np.array_equal(images.train_x.numpy(), arrays["train-images-idx3-ubyte.gz"])
    assert np.array_equal(images.test_y.numpy(), arrays["t10k-labels-idx1-ubyte.gz"])


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty"])
def test_a_damaged_file_is_refused(fashion, damage: str) -> None:
    folder, arrays = fashion
    path = folder / "fashion-mnist" / "train-labels-idx1-ubyte.gz"
    if damage == "flip":
        path.write_bytes(gzip.compress(idx(arrays[path.name] ^ np.uint8(1))))
    else:
        path.write_bytes(path.read_bytes()[: 12 if damage == "truncate" else 0])
    with pytest.raises(DataError, match="fetch it again"):
        load("fashion-mnist", folder=folder)


def test_neither_folder_nor_network_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HUSH_DATA", str(tmp_path))
    monkeypatch.setitem(homes.HOMES, "cifar10", "http://127.0.0.1:9/")  # the discard port: nobody answers
    with pytest.raises(DataError, match="set HUSH_DATA"):
        load("cifar10")
    with pytest.raises(DataError, match=r"expected train-1\.xz"):
        load("cifar10", folder=tmp_path)
    with pytest.raises(ValueError, match="one of mnist"):
        load("imagenet")


def test_a_download_is_kept_only_if_its_sum_is_right(fashion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, arrays = fashion
    served = {file: (folder / "fashion-mnist" / file).read_bytes() for file in arrays}
    monkeypatch.setattr(homes, "_read", lambda url: served[url.rsplit("/", 1)[-1]])
    cache = tmp_path / "cache"
    monkeypatch.setenv("HUSH_DATA", str(cache))
    assert load("fashion-mnist").train_x.shape == (7, 28, 28)
    assert sorted(p.name for p in (cache / "fashion-mnist").iterdir()) == sorted(arrays)
    victim = cache / "fashion-mnist" / "t10k-labels-idx1-ubyte.gz"
    victim.unlink()
    served[victim.name] = gzip.compress(b"not the labels")
    with pytest.raises(DataError, match="sha256"):
        load("fashion-mnist")
    assert not victim.exists()


def predict(plane: np.ndarray) -> np.ndarray:
    """The packer, written as a plain loop over one image plane (uint8 [32, 32]) -> residuals."""
    out = np.empty_like(plane)
    for i in range(32):
        for j in range(32):
            a, b = int(plane[i, j - 1]) if j else 0, int(plane[i - 1, j]) if i else 0
            c = int(plane[i - 1, j - 1]) if i and j else 0
            inner = min(max(a + b - c, min(a, b)), max(a, b))
            guess = inner if i and j else b if i else a
            out[i, j] = (int(plane[i, j]) - guess) % 256
    return out


def test_both_cifar_formats_give_the_same_pixels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(5)
    splits = [(rng.integers(0, 256, (2, 3, 32, 32), np.uint8), rng.integers(0, 10, 2, np.uint8)) for _ in range(6)]
    files = [f"train-{k}.xz" for k in range(1, 6)] + ["test.xz"]
    packed, original = tmp_path / "packed", tmp_path / "original"
    packed.mkdir(), original.mkdir()
    known = {}
    for file, (x, y) in zip(files, splits, strict=True):
        r, g, b = (x[:, k].astype(int) for k in range(3))
        planes = [(g % 256), (r - g + 128) % 256, (b - g + 128) % 256]
        residuals = b"".join(predict(image).tobytes() for plane in planes for image in plane.astype(np.uint8))
        (packed / file).write_bytes(lzma.compress(residuals + y.tobytes()))
        known[file] = digest((packed / file).read_bytes())
    monkeypatch.setitem(sums.PACKED, "cifar10", known)
    with tarfile.open(original / "cifar-10-binary.tar.gz", "w:gz") as archive:
        names = [f"data_batch_{k}.bin" for k in range(1, 6)] + ["test_batch.bin"]
        for name, (x, y) in zip(names, splits, strict=True):
            content = b"".join(bytes([label]) + image.tobytes() for image, label in zip(x, y, strict=True))
            info = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    whole = digest((original / "cifar-10-binary.tar.gz").read_bytes())
    monkeypatch.setitem(sums.ARCHIVE, "cifar10", {"cifar-10-binary.tar.gz": whole})
    for folder in (packed, original):
        train_x, train_y, test_x, test_y = read_cifar("cifar10", folder)
        assert np.array_equal(train_x, np.concatenate([x for x, _ in splits[:5]]))
        assert np.array_equal(train_y, np.concatenate([y for _, y in splits[:5]]))
        assert np.array_equal(test_x, splits[5][0]) and np.array_equal(test_y, splits[5][1])
