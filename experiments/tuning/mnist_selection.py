"""Fifty settings of the paper's MNIST network, tuned under one budget.

    python experiments/tuning/mnist_selection.py plan      the noise of every way to spend the budget (CPU minutes)
    python experiments/tuning/mnist_selection.py train     50 settings x 5 seeds at each noise (a GPU, minutes)
    python experiments/tuning/mnist_selection.py replay    every way of tuning, replayed on the finished table

Ways: `untuned`, the whole budget for one run of the paper's own setting; `geometric` (random stopping) and
`logarithmic`, 50 runs on average, the best released; `sum`, 50 runs, each of them paid for. All networks of a table
train at once: 60 private principal components, 1,000 hidden units, Poisson lots of 600, per-example clipping. Every
other test image is the public validation set that a score is measured on, the rest is what is reported.
"""

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hush.accounting import Budget, Event, Gaussian, PoissonSampled, Selected, Trials, calibrate, epsilon
from hush.noise.pca import dp_pca
from hush.recipes.data.images import load

DELTA = 1e-5
PCA_NOISE = {2.0: 7.0, 8.0: 4.0}  # the paper's, at the same budgets
HIDDEN, DIMENSIONS, LOT = 1000, 60, 600
RESULTS = Path(__file__).resolve().parents[2] / "results"


def ways(settings: int) -> dict[str, str]:
    return {"untuned": "", "geometric": "geometric", "logarithmic": "logarithmic", "sum": f"{settings} runs"}


def event_of(way: str, noise: float, *, pca: float, rate: float, steps: int, settings: int) -> Event:
    """What a way of tuning does to the training records, DP-PCA included."""
    run = PoissonSampled(rate, Gaussian(noise)) * steps
    if way == "untuned":
        return Gaussian(pca) + run
    if way == "sum":
        return Gaussian(pca) + run * settings
    return Gaussian(pca) + Selected(run, way, float(settings))


def draw_settings(count: int) -> dict[str, np.ndarray]:
    """Learning rate, clipping bound, and where the rate ends after half of the steps; the paper's own setting last."""
    rng = np.random.default_rng(20161024)
    rates = np.exp(rng.uniform(math.log(0.02), math.log(8.0), count))
    clips = np.exp(rng.uniform(math.log(0.1), math.log(8.0), count))
    ends = rng.choice([1.0, 0.5, 0.1], count)
    return {"rate": np.append(rates, 0.1), "clip": np.append(clips, 4.0), "end": np.append(ends, 0.52)}


def plan(args: argparse.Namespace) -> None:
    rate = LOT / args.examples
    found: dict[str, dict[str, dict[str, float]]] = {}
    for budget in args.epsilons:
        for way in ways(args.settings):

            def event(noise: float, way: str = way, budget: float = budget) -> Event:
                pca = PCA_NOISE[budget]
                return event_of(way, noise, pca=pca, rate=rate, steps=args.steps, settings=args.settings)

            # A thousandth is left over: an accountant on another grid may answer a little more.
            noise = calibrate.noise(event, Budget(epsilon=0.999 * budget, delta=DELTA))
            spent = epsilon(event(noise), delta=DELTA).upper
            alone = epsilon(PoissonSampled(rate, Gaussian(noise)) * args.steps, delta=DELTA).upper
            found.setdefault(f"{budget:g}", {})[way] = {"noise": noise, "epsilon": spent, "epsilon_of_one_run": alone}
            print(f"epsilon {budget:g}, {way}: noise {noise:.4f}, one run {alone:.4f}, all {spent:.4f}", flush=True)
    shape = {"examples": args.examples, "steps": args.steps, "settings": args.settings, "delta": DELTA}
    write(args.out / "mnist_selection_plan.json", shape | {"noise": found})


def train(args: argparse.Namespace) -> None:
    planned = json.loads((args.plan or args.out / "mnist_selection_plan.json").read_text())
    device = torch.device(args.device)
    images = load("mnist")
    tables = {}
    began = time.time()
    for budget, ways_of in planned["noise"].items():
        x, test = projected(images, PCA_NOISE[float(budget)], planned["examples"], device)
        y = images.train_y[: planned["examples"]].to(device)
        for way, one in ways_of.items():
            start = time.time()
            networks = Networks(draw_settings(planned["settings"]), args.seeds, device)
            for step in range(planned["steps"]):
                networks.step(x, y, noise=one["noise"], share=step / planned["steps"])
            right = networks.right(test, images.test_y.to(device))
            tables.setdefault(budget, {})[way] = {
                "validation": right[:, 0::2].mean(1).view(-1, args.seeds).tolist(),
                "reported": right[:, 1::2].mean(1).view(-1, args.seeds).tolist(),
                "seconds": time.time() - start,
            }
            print(f"epsilon {budget}, {way}: {time.time() - start:.1f} s", flush=True)
    machine = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    about = {"plan": planned, "seeds": args.seeds, "device": machine, "torch": torch.__version__}
    write(args.out / "mnist_selection_table.json", about | {"seconds": time.time() - began, "tables": tables})


def projected(images: object, noise: float, examples: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Training rows and test rows on the noisy principal components of the training rows."""
    rows = images.train_x[:examples].flatten(1).float() / 255  # type: ignore[attr-defined]
    found = dp_pca(rows, dimensions=DIMENSIONS, noise_multiplier=noise)
    test = images.test_x.flatten(1).float() / 255  # type: ignore[attr-defined]
    return found(rows).to(device), found(test).to(device)


class Networks:
    """All settings times all seeds, trained side by side; the same arithmetic as one after another."""

    def __init__(self, settings: dict[str, np.ndarray], seeds: int, device: torch.device) -> None:
        def spread(values: np.ndarray) -> Tensor:
            return torch.tensor(np.repeat(values, seeds), dtype=torch.float32, device=device)

        self.rate, self.clip, self.end = (spread(settings[name]) for name in ("rate", "clip", "end"))
        self.count, self.device = len(self.rate), device
        shapes = [(DIMENSIONS, HIDDEN), (1, HIDDEN), (HIDDEN, 10), (1, 10)]
        spreads = [DIMENSIONS**-0.5, 0.0, HIDDEN**-0.5, 0.0]
        self.weights = [
            scale * torch.randn(self.count, *shape, device=device) for scale, shape in zip(spreads, shapes, strict=True)
        ]

    def lots(self, examples: int) -> tuple[Tensor, Tensor]:
        """One Poisson lot for each network: distances between members of a Poisson lot are geometric."""
        rate = LOT / examples
        most = LOT + 10 * math.isqrt(LOT) + 10
        uniform = torch.rand(self.count, most, device=self.device, dtype=torch.float64)
        places = torch.cumsum(torch.floor(torch.log1p(-uniform) / math.log1p(-rate)) + 1, dim=1).long() - 1
        inside = places < examples
        width = int(inside.sum(1).max())
        return torch.where(inside, places, 0)[:, :width], inside[:, :width]

    def step(self, x: Tensor, y: Tensor, *, noise: float, share: float) -> None:
        index, mask = self.lots(len(x))
        gradients = clipped_sums(self.weights, x[index], y[index], mask, self.clip)
        rate = self.rate * (1 + (self.end - 1) * min(2 * share, 1.0)) / LOT
        for weight, gradient in zip(self.weights, gradients, strict=True):
            spread = (noise * self.clip)[:, None, None]
            weight.sub_(rate[:, None, None] * (gradient + spread * torch.randn_like(gradient)))

    def right(self, x: Tensor, y: Tensor) -> Tensor:
        """For each network and test row, whether it is right."""
        parts = [
            forward(self.weights, rows.expand(self.count, -1, -1))[1].argmax(2) == labels
            for rows, labels in zip(x.split(500), y.split(500), strict=True)
        ]
        return torch.cat(parts, dim=1).double().cpu()


def forward(weights: list[Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    hidden = torch.relu(torch.baddbmm(weights[1], x, weights[0]))
    return hidden, torch.baddbmm(weights[3], hidden, weights[2])


def clipped_sums(weights: list[Tensor], x: Tensor, y: Tensor, mask: Tensor, clip: Tensor) -> list[Tensor]:
    """Sums of per-example gradients of the cross-entropy, each clipped to its network's bound.

    The gradient of an affine layer is an outer product, so its norm is a product of two norms.
    """
    hidden, logits = forward(weights, x)
    top = torch.softmax(logits, dim=2)
    top.scatter_add_(2, y[..., None], -torch.ones_like(top[..., :1]))
    below = torch.bmm(top, weights[2].mT) * (hidden > 0)
    squares = top.square().sum(2) * (hidden.square().sum(2) + 1) + below.square().sum(2) * (x.square().sum(2) + 1)
    factors = (torch.clamp(clip[:, None] / squares.sqrt().clamp_min(1e-30), max=1.0) * mask)[..., None]
    top, below = top * factors, below * factors
    return [
        torch.bmm(x.mT, below),
        below.sum(1, keepdim=True),
        torch.bmm(hidden.mT, top),
        top.sum(1, keepdim=True),
    ]


def replay(args: argparse.Namespace) -> None:
    """Tune many times on the finished table: draw trials as the rule says, release the one with the best score."""
    table = json.loads((args.table or args.out / "mnist_selection_table.json").read_text())
    shape, rng = table["plan"], np.random.default_rng(1)
    settings, rate = shape["settings"], LOT / shape["examples"]
    summary: dict[str, dict[str, dict[str, float]]] = {}
    for budget, ways_of in table["tables"].items():
        for way, one in ways_of.items():
            score, reported = np.array(one["validation"]), np.array(one["reported"])
            if way == "untuned":
                got = reported[-1]
            else:
                got = np.array([once(way, score[:-1], reported[:-1], settings, rng) for _ in range(args.times)])
            noise, pca = shape["noise"][budget][way]["noise"], PCA_NOISE[float(budget)]
            event = event_of(way, noise, pca=pca, rate=rate, steps=shape["steps"], settings=settings)
            summary.setdefault(budget, {})[way] = {
                "epsilon": epsilon(event, delta=DELTA).upper,
                "epsilon_of_one_run": epsilon(
                    PoissonSampled(rate, Gaussian(noise)) * shape["steps"], delta=DELTA
                ).upper,
                "mean": float(got.mean()),
                "deviation": float(got.std(ddof=1)),
                "worst_in_20": float(np.quantile(got, 0.05)),
                "best_setting_of_the_table": float(reported[:-1].mean(1).max()),
                "median_setting_of_the_table": float(np.median(reported[:-1].mean(1))),
            }
            spent = summary[budget][way]["epsilon"]
            print(f"{way}, epsilon {spent:.4f}: {got.mean():.4f} +- {got.std(ddof=1):.4f}")
    write(args.out / "mnist_selection.json", {"times": args.times, "delta": DELTA, "accuracy": summary})


def once(way: str, score: np.ndarray, reported: np.ndarray, settings: int, rng: np.random.Generator) -> float:
    if way == "sum":
        trials = [(setting, int(rng.integers(score.shape[1]))) for setting in range(settings)]
    else:
        number = Trials(way, float(settings)).draw(int.from_bytes(rng.bytes(16)), 128)
        trials = [(int(rng.integers(settings)), int(rng.integers(score.shape[1]))) for _ in range(number)]
    return float(reported[max(trials, key=lambda trial: score[trial])])


def write(path: Path, values: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=1) + "\n")
    print(f"wrote {path}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=("plan", "train", "replay"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--plan", type=Path, help="the plan's file, where it is not in --out")
    parser.add_argument("--table", type=Path, help="the table's file, where it is not in --out")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--epsilons", type=float, nargs="+", default=[2.0, 8.0])
    parser.add_argument("--settings", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--times", type=int, default=2000, help="how often the replay tunes")
    parser.add_argument("--tiny", action="store_true", help="a toy of the same shape, in seconds")
    args = parser.parse_args(arguments)
    args.examples = 60_000
    if args.tiny:
        args.examples, args.epsilons, args.settings, args.seeds, args.steps, args.times = 2_400, [8.0], 2, 2, 3, 20
    {"plan": plan, "train": train, "replay": replay}[args.command](args)


if __name__ == "__main__":
    main()
