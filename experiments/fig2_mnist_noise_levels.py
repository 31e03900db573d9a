"""Figure 2: MNIST accuracy by epoch for large, medium and small noise, and delta by epoch for fixed epsilon.

The paper's network and settings: 60-dimensional DP-PCA, 1,000 hidden units, lots of 600, C = 4 for each layer, learning
rate 0.1 falling to 0.052 over 10 epochs. The same with flat clipping at C = 4, which the same noise protects better.
"""

from pathlib import Path
from typing import Any

from budgets import AS_PUBLISHED, DELTA, VALID, Cost, spent
from common import Options, pca, pixels, projected, run_script, summary
from side_by_side import FLAT, PER_LAYER, Run
from training import Job, Plan, Readings, carried_out

LEVELS = {"large": (8.0, 16.0, 0.5), "medium": (4.0, 7.0, 2.0), "small": (2.0, 4.0, 8.0)}  # sigma, PCA's sigma, epsilon
PRINTED = {"large": 0.90, "medium": 0.95, "small": 0.97}
LONGEST = {"large": 300, "medium": 500, "small": 1000}  # epochs; some budgets of figure 3 would allow more
LOT = 600


def cost(level: str, clipping: str) -> Cost:
    """What a run at this level does to the data."""
    sigma, pca_sigma, _ = LEVELS[level]
    return Cost(noise=sigma, pca_noise=pca_sigma, per_layer=clipping == PER_LAYER, lot_size=LOT)


def measure(options: Options) -> dict[str, Any]:
    """Accuracy on the way (figure 3 reads it too) and at the end of every budget."""
    return carried_out(plan(options))


def plan(options: Options) -> Plan:
    """A program for each noise level: both clippings, several times."""
    images = pixels("mnist", options)
    lot = 60 if options.quick else LOT
    per_epoch = len(images[1]) // lot
    stops = {} if options.quick else planned_stops()
    kinds = [(clipping, r) for clipping in (PER_LAYER, FLAT) for r in range(options.repetitions)]
    jobs = []
    for number, (level, (sigma, pca_sigma, _)) in enumerate(LEVELS.items()):
        longest = 2 if options.quick else LONGEST[level]
        seeds = [options.seed + r for r in range(options.repetitions)]
        data = projected(images, [pca(images[0], dimensions=60, noise=pca_sigma, seed=seed) for seed in seeds])
        runs = [
            Run(
                steps=longest * per_epoch, noise=sigma, clip=4.0, clipping=clipping, lot_size=lot, table=r,
                rate_steps=10 * per_epoch,
            )
            for clipping, r in kinds
        ]  # fmt: skip
        marks = [e * per_epoch for e in [*range(1, 50), *range(50, longest + 1, 10)]]
        marks += [stop for name, stop in stops.items() if name.startswith(level)]
        jobs.append(
            Job(runs=runs, data=data, seed=options.seed + number, marks=marks, train_accuracy=True, truncated=True)
        )

    def result(found: list[Readings]) -> dict[str, Any]:
        histories = [
            history(level, kind, k, readings)
            for level, readings in zip(LEVELS, found, strict=True)
            for k, kind in enumerate(kinds)
        ]
        at_end = at_the_budget(histories, stops)
        return {"steps per epoch": per_epoch, "stops": stops, "histories": histories, "at the budget": at_end}

    return Plan(jobs, result)


def history(level: str, kind: tuple[str, int], k: int, readings: Readings) -> dict[str, Any]:
    """What was read of run k of a level."""
    steps = sorted(readings)
    curves = {name: [round(readings[t][name][k], 5) for t in steps] for name in ("test", "train (private)")}
    return {"level": level, "clipping": kind[0], "repetition": kind[1], "steps": steps} | curves


def planned_stops() -> dict[str, int]:
    """The last step each budget allows, in both countings, as "level, clipping, counting"."""
    return {
        f"{level}, {clipping}, {counting}": cost(level, clipping).longest(
            epsilon=LEVELS[level][2], counting=counting, at_most=LONGEST[level] * 100
        )
        for level in LEVELS
        for clipping in (PER_LAYER, FLAT)
        for counting in (AS_PUBLISHED, VALID)
    }


def at_the_budget(histories: list[dict[str, Any]], stops: dict[str, int]) -> dict[str, Any]:
    """Test accuracy of the last model that each budget allows, mean over the repetitions."""
    found = {}
    for name, stop in stops.items():
        level, clipping, _ = name.split(", ")
        chosen = [h for h in histories if (h["level"], h["clipping"]) == (level, clipping)]
        found[name] = summary([h["test"][h["steps"].index(stop)] for h in chosen]) | {
            "steps": stop, "epsilon": LEVELS[level][2], "paper": PRINTED[level]
        }  # fmt: skip
    return found


def account(result: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Epsilon of every row by each accountant."""
    return {name: spent(cost(*name.split(", ")[:2]), row["steps"]) for name, row in result["at the budget"].items()}


def draw(result: dict[str, Any], path: Path) -> None:
    """One panel a level: train and test accuracy, and delta on the right-hand axis in both countings."""
    from pictures import figure

    picture, axes = figure(columns=3, title="MNIST, noise levels of the paper (per-layer clipping at 4)")
    per_epoch = result["steps per epoch"]
    for axis, level in zip(axes, LEVELS, strict=True):
        sigma, pca_sigma, epsilon = LEVELS[level]
        chosen = [h for h in result["histories"] if (h["level"], h["clipping"]) == (level, PER_LAYER)]
        last = max(
            [stop for name, stop in result["stops"].items() if name.startswith(f"{level}, {PER_LAYER}")] or [10**9]
        )
        steps = [step for step in chosen[0]["steps"] if step <= last]
        epochs = [step / per_epoch for step in steps]
        for kind, colour in (("test", "#2e86ab"), ("train (private)", "#e08e1b")):
            mean = [sum(h[kind][i] for h in chosen) / len(chosen) for i in range(len(steps))]
            axis.plot(epochs, mean, color=colour, label=f"{kind} accuracy")
        axis.set_ylim(0.8, 1.0)
        axis.set_xlabel("epoch")
        if level == "large":
            axis.set_ylabel("accuracy")
        axis.set_title(f"{level} noise ({sigma:g}, {pca_sigma:g}), epsilon {epsilon:g}", fontsize=10)
        right = axis.twinx()
        for counting, line in ((AS_PUBLISHED, ":"), (VALID, "-")):
            parts = min(24, len(steps))
            at = [max(1, round(steps[-1] * i / parts)) for i in range(parts + 1)]
            spent = [cost(level, PER_LAYER).delta(step, epsilon=epsilon, counting=counting) for step in at]
            right.plot([step / per_epoch for step in at], spent, line, color="#444444", label=f"delta, {counting}")
        right.set_yscale("log")
        right.set_ylim(1e-9, 1e-3)
        if level == "small":
            right.set_ylabel("delta")
        right.axhline(DELTA, color="#bbbbbb", linewidth=0.8)
    lines = [part for each in (axis, right) for part in each.get_lines() if not part.get_label().startswith("_")]
    picture.legend(handles=lines, loc="outside lower center", ncols=4, fontsize=9)
    picture.savefig(path, dpi=130)


if __name__ == "__main__":
    run_script("fig2_mnist_noise_levels", measure, draw, account)
