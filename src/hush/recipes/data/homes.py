"""Downloads from the public homes of the data sets, written only after the sha256 was checked."""

import gzip
import os
import urllib.error
import urllib.request
from pathlib import Path

from hush.recipes.data import sums
from hush.recipes.data.errors import DataError

HOMES = {
    "fashion-mnist": "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    "cifar10": "https://www.cs.toronto.edu/~kriz/",
    "cifar100": "https://www.cs.toronto.edu/~kriz/",
}


def fetch(name: str, root: Path) -> Path:
    """Download what is missing of a data set into root/name, and return that folder."""
    if name not in HOMES:
        raise DataError(f"the files of {name} are part of the package and are missing; install the package again")
    folder = root / name
    files = sums.IDX.get(name) or sums.ARCHIVE[name]
    for file, expected_sum in files.items():
        if not (folder / file).is_file():
            _download(HOMES[name] + file, folder / file, expected_sum)
    return folder


def _download(url: str, path: Path, expected_sum: str) -> None:
    try:
        content = _read(url)
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise DataError(
            f"{path.parent.name} is neither in {path.parent} nor could it be downloaded from {url} ({error}); "
            "set HUSH_DATA to a folder that holds it, or connect this machine to the network"
        ) from error
    is_idx = "ubyte" in path.name
    sums.check(gzip.decompress(content) if is_idx else content, expected_sum, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    partial.write_bytes(content)
    partial.replace(path)  # whole or not at all, also when two processes download at once


def _read(url: str) -> bytes:
    """The bytes behind an address, with a progress bar on the terminal where there is one to draw."""
    with urllib.request.urlopen(url, timeout=60) as response:
        try:
            from rich.progress import wrap_file
        except ImportError:
            return response.read()
        total = int(response.headers.get("Content-Length") or 0)
        with wrap_file(response, total=total, description=url.rsplit("/", 1)[-1]) as file:
            return file.read()
