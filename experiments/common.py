"""What the experiments share: their options, the images as tables of numbers, and how results are written."""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from side_by_side import Data
from torch import Tensor

from hush.noise.pca import dp_pca
from hush.randomness.streams import Key
from hush.recipes import data
from hush.recipes.features.drawings import Glyphs

ROOT = Path(__file__).parents[1]
WOBBLE = {"glyphs": 0.13, "rough glyphs": 0.3}  # alphabets that stand in for data: about as easy as MNIST, and harder
MOST_DIMENSIONS = 200  # of a projection
Pictures = tuple[Tensor, Tensor, Tensor, Tensor]  # rows of pixels and labels for training, then for the test


@dataclass(frozen=True)
class Options:
    """How an experiment is to be run."""

    device: str = "cpu"
    out: Path = ROOT / "results"
    quick: bool = False
    repetitions: int = 3
    seed: int = 2016

    @property
    def figures(self) -> Path:
        """Where pictures go."""
        return ROOT / "docs" / "figures" if self.out == ROOT / "results" else self.out


def run_script(
    name: str,
    measure: Callable[[Options], dict[str, Any]],
    draw: Callable[[dict[str, Any], Path], None],
    account: Callable[[dict[str, Any]], Any] | None = None,
) -> None:
    """The command line of one experiment: measure, write results/<name>.json, draw docs/figures/<name>.png."""
    parser = argparse.ArgumentParser(description=(sys.modules["__main__"].__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=ROOT / "results")
    parser.add_argument("--quick", action="store_true", help="a few seconds: shows that it runs, not what it finds")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--seed", type=int, default=2016)
    parser.add_argument("--draw-only", action="store_true", help="draw from the results that are there")
    args = parser.parse_args()
    options = Options(args.device, args.out, args.quick, args.repetitions, args.seed)
    if not args.draw_only:
        save(options, name, measure)
    illustrate(options, name, draw, account)
    print(f"wrote {options.figures / name}.png")


def illustrate(
    options: Options,
    name: str,
    draw: Callable[[dict[str, Any], Path], None],
    account: Callable[[dict[str, Any]], Any] | None,
) -> None:
    """Epsilon by each accountant into results/<name>.json, where records were touched with a guarantee; the picture."""
    result = read(options, name)
    if account is not None:
        result["epsilon by each accountant"] = account(result)
        write(options, name, result)
    options.figures.mkdir(parents=True, exist_ok=True)
    draw(result, options.figures / f"{name}.png")


def save(options: Options, name: str, measure: Callable[[Options], dict[str, Any]]) -> dict[str, Any]:
    """Run an experiment and write its JSON: the command, the seed, the machine, the time, and what was measured."""
    started = time.time()
    print(f"{name} ...", flush=True)
    measured = measure(options)
    where = torch.cuda.get_device_name() if options.device.startswith("cuda") else "CPU"
    result = {
        "name": name,
        "command": f"python experiments/{name}.py" + (" --quick" if options.quick else ""),
        "seed": options.seed,
        "repetitions": options.repetitions,
        "device": where,
        "torch": torch.__version__.split("+")[0],
        "seconds": round(time.time() - started, 1),
        "note": "seeded runs, which measure accuracy and protect nobody; test accuracy of the last model",
    } | measured
    write(options, name, result)
    print(f"{name}: {result['seconds']} s", flush=True)
    return result


def write(options: Options, name: str, result: dict[str, Any]) -> None:
    """Write results/<name>.json, whole or not at all."""
    options.out.mkdir(parents=True, exist_ok=True)
    partial = options.out / f"{name}.json.part"
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.replace(options.out / f"{name}.json")


def read(options: Options, name: str) -> dict[str, Any]:
    """What results/<name>.json holds."""
    path = options.out / f"{name}.json"
    if not path.exists():
        raise SystemExit(f"{path} is not there; run experiments/{name}.py without --draw-only first")
    return json.loads(path.read_text())


def summary(values: list[float]) -> dict[str, Any]:
    """Mean and standard deviation over the repetitions, and the values themselves."""
    return {
        "mean": statistics.fmean(values),
        "std": statistics.stdev(values) if len(values) > 1 else 0.0,
        "values": values,
    }


def log_error(accuracies: Sequence[float]) -> float:
    """Mean logarithm of the error: a tenth fewer wrong answers count the same on an easy stand-in and a hard one."""
    return sum(math.log(1 - accuracy + 1e-4) for accuracy in accuracies) / len(accuracies)


@lru_cache(maxsize=2)
def pixels(name: str, options: Options) -> Pictures:
    """Images as rows of numbers in [0, 1] and labels, on the device; a few hundred of them for --quick."""
    if name in WOBBLE:
        return drawn(WOBBLE[name], options)
    images = data.load(name)
    train, test = (300, 100) if options.quick else (None, None)
    parts = (images.train_x[:train], images.train_y[:train], images.test_x[:test], images.test_y[:test])
    train_x, train_y, test_x, test_y = (part.to(options.device) for part in parts)
    return train_x.flatten(1) / 255.0, train_y, test_x.flatten(1) / 255.0, test_y


@lru_cache(maxsize=2)
def drawn(wobble: float, options: Options) -> Pictures:
    """As many drawings of ten glyphs as MNIST has digits, in the form of `pixels`; more wobble is harder to read."""
    generator = torch.Generator(options.device).manual_seed(options.seed)
    alphabet = Glyphs(10, generator=generator)
    train, test = (300, 100) if options.quick else (60_000, 10_000)
    labels = torch.randint(10, (train + test,), generator=generator, device=options.device)
    parts = [alphabet.draw(part, generator=generator, wobble=wobble).flatten(1) for part in labels.split(2000)]
    rows = torch.cat(parts)
    return rows[:train], labels[:train], rows[train:], labels[train:]


def pca(x: Tensor, *, dimensions: int, noise: float, seed: int) -> Tensor:
    """A seeded DP-PCA of the rows: the matrix [784, dimensions]; fewer dimensions are the first of more."""
    return _directions(x, noise, seed)[:, :dimensions]


@lru_cache(maxsize=64)
def _directions(x: Tensor, noise: float, seed: int) -> Tensor:
    found = dp_pca(x, dimensions=MOST_DIMENSIONS, noise_multiplier=noise, key=Key.from_seed(seed))
    return found.matrix.to(device=x.device, dtype=torch.float32)


def projected(images: Pictures, matrices: list[Tensor], *, unit: bool = False) -> Data:
    """The input tables: the images (un-normalised, as the published code has them) times each matrix.

    `unit` scales every projected row to the same norm, 9 (about that of an MNIST image): one example at a time.
    """
    train_x, train_y, test_x, test_y = images

    def tables(x: Tensor) -> Tensor:
        rows = torch.stack([x @ matrix for matrix in matrices])
        return 9.0 * torch.nn.functional.normalize(rows, dim=2) if unit else rows

    return Data(tables(train_x), train_y, tables(test_x), test_y)
