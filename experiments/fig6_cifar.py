"""Figure 6: the paper's CIFAR-10 network, convolutions from CIFAR-100, its fully connected layers trained privately.

Literally as printed: softmax layer and one or both fully connected layers, first weights from the pretrained network
(a new softmax), softmax clipped at twice the bound of the others (3, also 6 and 10), sigma 6 for each layer, lots of
600, 2,000 and 4,000, all 50,000 records. Not printed and chosen here: the learning rate, on the last 5,000 training
records. Ten cached views, 24 x 24 patches in five places, mirrored or not, stand for the paper's fresh distortions: a
record has one of ten forms at each use, with brightness and contrast as they are.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from budgets import AS_PUBLISHED, VALID, remembered
from cifar_private import DELTA, Pictures, Setting, accuracy, one_view, read, seeds, train
from torch import Tensor, nn

from hush.accounting import Budget, Gaussian, PoissonSampled, calibrate, moments, pld
from hush.clipping.clips import PerLayerClip
from hush.recipes.features.pretrained import CONVOLUTIONS, FOLDER, convolved, paper_network

SIGMA, EXAMPLES = 6.0, 50_000
PAPER = {2.0: 0.67, 4.0: 0.70, 8.0: 0.73}
PANELS = {2.0: 2000, 4.0: 4000, 8.0: 4000}  # epsilon and the lot of its panel
RATES = (0.01, 0.03, 0.1, 0.3)
VIEWS = 10


def layers_of(depth: int) -> int:
    """How many layers are trained: the softmax and `depth` fully connected ones."""
    return depth + 1


def event(steps: int, lot: int, *, layers: int, counting: str, examples: int = EXAMPLES) -> Any:
    """The run as the paper's code counted (every layer as if it had a lot of its own), or as it is, jointly."""
    if counting == AS_PUBLISHED:
        return PoissonSampled(lot / examples, Gaussian(SIGMA)) * (steps * layers)
    return PoissonSampled(lot / examples, Gaussian(SIGMA / layers**0.5)) * steps


def longest(epsilon: float, lot: int, *, layers: int, counting: str, delta: float = DELTA) -> int:
    """The most steps within the budget."""

    def answer() -> float:
        return calibrate.steps(
            lambda n: event(n, lot, layers=layers, counting=counting),
            Budget(epsilon=epsilon, delta=delta),
            accountant="moments" if counting == AS_PUBLISHED else "pld",
            at_most=100_000,
        )

    return int(remembered(f"figure 6: steps {epsilon} {delta} {lot} {layers} {counting}", answer))


def deltas(epsilon: float, lot: int, marks: list[int], *, layers: int, counting: str) -> list[float]:
    """Delta spent after so many steps at a fixed epsilon: the rising line of the figure."""
    accountant = moments if counting == AS_PUBLISHED else pld
    return [
        accountant.delta(event(mark, lot, layers=layers, counting=counting), epsilon=epsilon).upper for mark in marks
    ]


def head(network: nn.Sequential, depth: int) -> nn.Sequential:
    """What is trained (and what stands frozen before it): softmax and the top one, or both, fully connected layers."""
    layers = network[CONVOLUTIONS:]
    if depth == 1:
        layers[0].requires_grad_(False)
    return layers


def clipping(model: nn.Module, bound: float) -> PerLayerClip:
    """The softmax layer at twice the bound of the others; patterns are the layers' names in the model."""
    last = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)][-1]
    return PerLayerClip({last: 2 * bound, "*": bound})


def one_run(
    x: Tensor,
    y: Tensor,
    tests: dict[str, tuple[Tensor, Tensor]],
    *,
    folder: Path,
    lot: int,
    steps: int,
    bound: float,
    rate: float,
    depth: int,
    seed: int,
    marks: list[int],
    last: Callable[[nn.Sequential], None] | None = None,
) -> dict[str, list[float]]:
    """Accuracy at every mark, of the model of that step."""
    model = head(paper_network(folder=folder), depth).to(x.device)
    layers = layers_of(depth)
    setting = Setting(
        lot_size=lot, steps=steps, noise=SIGMA / layers**0.5, clip=clipping(model, bound), rate=rate, momentum=0.0,
        fall=1.0,
    )  # fmt: skip
    found: dict[str, list[float]] = {name: [] for name in tests}

    def at(step: int, model: nn.Module) -> None:
        if step in marks:
            for name, (test_x, test_y) in tests.items():
                found[name].append(accuracy(model, test_x, test_y))

    generator = torch.Generator(x.device).manual_seed(seed)
    train(model, setting, one_view(x, y, generator), len(y), seed=seed, at=at)
    if last is not None:
        last(model)
    return found


def gradient_norms(model: nn.Sequential, x: Tensor, y: Tensor) -> dict[str, float]:
    """Median norm of a record's gradient by layer: the paper's "roughly twice as large", of records set aside."""
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    parameters = [p for p in model.parameters() if p.requires_grad]
    norms: dict[str, list[float]] = {}
    for one, label in zip(x[:200, 0].float(), y[:200], strict=True):
        gradients = torch.autograd.grad(nn.functional.cross_entropy(model(one[None]), label[None]), parameters)
        squares: dict[str, float] = {}
        for name, gradient in zip(names, gradients, strict=True):
            layer = name.split(".")[0]
            squares[layer] = squares.get(layer, 0.0) + gradient.square().sum().item()
        for layer, square in squares.items():
            norms.setdefault(layer, []).append(square**0.5)
    return {f"layer {layer}": statistics.median(values) for layer, values in norms.items()}


def measure(pictures: Pictures, folder: Path, *, quick: bool, repetitions: int, minutes: float, keep: Any) -> None:
    """Rate first, then the three panels, then the other lots and bounds, as long as there is time."""
    started = time.time()
    network = paper_network(folder=folder).to(pictures.train_x.device)
    x, test_x = convolved(pictures.train_x, network, views=VIEWS), convolved(pictures.test_x, network)
    y, test_y = pictures.train_y, pictures.test_y
    told: dict[str, Any] = {}
    lengths = {
        (depth, eps, counting): 6 if quick else longest(eps, lot, layers=layers_of(depth), counting=counting)
        for depth in (1, 2)
        for eps, lot in PANELS.items()
        for counting in (VALID, AS_PUBLISHED)
    }
    told["steps within the budget"] = {
        f"epsilon {eps:g}, {layers_of(d)} layers, {c}": n for (d, eps, c), n in lengths.items()
    }
    first = len(y) * 9 // 10
    rest = (x[first:, :1], y[first:])
    aside = {"set aside": rest}
    rows: list[dict[str, Any]] = []
    norms: list[dict[str, float]] = []
    for rate in RATES:
        steps = lengths[2, 2.0, VALID]
        found = one_run(
            x[:first], y[:first], aside, folder=folder, lot=min(2000, first // 10), steps=steps, bound=3.0, rate=rate,
            depth=2, seed=1, marks=[steps], last=lambda model: norms.append(gradient_norms(model, *rest)),
        )  # fmt: skip
        rows.append({"rate": rate, "accuracy on records set aside": found["set aside"][-1]})
        rows[-1]["median gradient norm after training"] = norms[-1]
        print(rows[-1], f"{time.time() - started:.0f} s", flush=True)
    told["rates tried (lot 2,000, bound 3, epsilon 2)"] = rows
    rate = max(rows, key=lambda row: row["accuracy on records set aside"])["rate"]
    told["rate"] = rate
    runs = [(2, 2000, 3.0, 2016), (2, 4000, 3.0, 2016), (2, 600, 3.0, 2016)]
    runs += [(1, lot, 3.0, 2016) for lot in (2000, 4000)]
    runs += [(2, lot, 3.0, seed) for seed in list(seeds(repetitions))[1:] for lot in (2000, 4000)]
    runs += [(2, lot, bound, 2016) for lot in (2000, 4000) for bound in (6.0, 10.0)]
    told["runs"] = []
    keep(told)
    for depth, lot, bound, seed in runs:
        if time.time() - started > 60 * minutes:
            told["note"] = "ended by its time limit before all runs were done"
            break
        budgets = [eps for eps, panel in PANELS.items() if panel == lot] or [2.0]
        ends = {
            f"epsilon {eps:g}, {c}": 6 if quick else longest(eps, lot, layers=layers_of(depth), counting=c)
            for eps in budgets
            for c in (VALID, AS_PUBLISHED)
        }
        steps = max(ends.values())
        spaced = {round(steps * (i / 24)) for i in range(1, 25)}
        marks = sorted({m for m in spaced if m} | {end for end in ends.values() if end})
        few = min(lot, len(y) // 10)
        found = one_run(
            x, y, {"test": (test_x, test_y)}, folder=folder, lot=few, steps=steps, bound=bound, rate=rate, depth=depth,
            seed=seed, marks=marks,
        )["test"]  # fmt: skip
        told["runs"].append(
            {"layers": layers_of(depth), "lot": lot, "bound": bound, "seed": seed, "marks": marks, "test": found}
            | {"at the budget": {name: found[marks.index(end)] for name, end in ends.items()}}
        )
        print(told["runs"][-1]["at the budget"], depth, lot, bound, seed, f"{time.time() - started:.0f} s", flush=True)
        keep(told)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results")
    parser.add_argument("--pictures", type=Path, help="an .npz instead of CIFAR-10's own files")
    parser.add_argument("--weights", type=Path, default=FOLDER)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=600.0)
    parser.add_argument("--quick", action="store_true", help="shows that it runs, not what it finds")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    started = time.time()
    pictures = read(args.pictures, args.device, 600 if args.quick else None)
    where = torch.cuda.get_device_name() if args.device.startswith("cuda") else "CPU"

    def keep(told: dict[str, Any]) -> None:
        facts = {"name": "fig6_cifar", "device": where, "torch": torch.__version__.split("+")[0], "paper": PAPER}
        facts |= {"values rounded to multiples of": pictures.coarse, "seconds": round(time.time() - started, 1)}
        (args.out / "fig6_cifar.json").write_text(json.dumps(facts | told, indent=1) + "\n")

    measure(
        pictures, args.weights, quick=args.quick, repetitions=args.repetitions, minutes=args.minutes, keep=keep
    )  # fmt: skip


if __name__ == "__main__":
    main()
