"""Figure 4: MNIST accuracy when one parameter varies; every point is trained until (2, 1e-5) would be violated.

Reference: 60 PCA dimensions, 1,000 hidden units, lots of 600, C = 4 for each layer, learning rate 0.1 falling to 0.052
over 10 epochs, sigma 4 and 7 for PCA. One training a point; its accuracy is read at the length of each counting.
"""

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from budgets import AS_PUBLISHED, VALID, Cost, spent
from common import Options, pca, pixels, projected, run_script
from side_by_side import Data, Run, median_norms
from training import Job, Plan, Readings, carried_out

EPSILON = 2.0
MOST = 300_000  # steps
COUNTINGS = (AS_PUBLISHED, VALID)


@dataclass(frozen=True, kw_only=True)
class Point:
    """One setting of the figure; x is its place on the axis of its panel."""

    panel: str
    x: float
    projection: str = "pca"  # or "random", "none"
    dimensions: int = 60
    hidden: int = 1000
    lot_size: int = 600
    rate: float = 0.052
    clip: float = 4.0
    noise: float = 4.0
    pca_noise: float = 7.0

    @property
    def cost(self) -> Cost:
        """What this training does to the data."""
        charged = self.pca_noise if self.projection == "pca" else None
        return Cost(noise=self.noise, lot_size=self.lot_size, pca_noise=charged)

    def lengths(self) -> dict[str, int]:
        """Steps to (2, 1e-5) in each counting."""
        return {c: self.cost.longest(epsilon=EPSILON, counting=c, at_most=MOST) for c in COUNTINGS}


SWEEPS: dict[str, tuple[str, tuple[float, ...]]] = {
    "projection dimensions": ("dimensions", (10, 20, 30, 40, 60, 80, 100, 150, 200)),
    "hidden units": ("hidden", (200, 400, 600, 800, 1000, 1400, 2000)),
    "lot size": ("lot_size", (200, 300, 400, 600, 800, 1200, 1600, 2400)),
    "learning rate": ("rate", (0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07, 0.1, 0.2, 0.4)),
    "gradient clipping norm": ("clip", (0.5, 1, 2, 3, 4, 6, 8, 12)),
    "noise level": ("noise", (2, 3, 4, 5, 6, 7, 8, 10)),
    "PCA noise level": ("pca_noise", (3, 4, 5, 7, 10, 16, 28)),
}


def points() -> list[Point]:
    """All settings: the six sweeps of the paper, PCA's noise, no projection, and a random projection."""
    found = [
        replace(Point(panel=panel, x=x), **{field: int(x) if field in ("dimensions", "hidden", "lot_size") else x})
        for panel, (field, values) in SWEEPS.items()
        for x in values
    ]
    first = "projection dimensions"
    found.append(Point(panel=first, x=784, projection="none", dimensions=784))
    found.append(Point(panel=first, x=60, projection="random"))
    found += [Point(panel="few epochs (noise 2), hidden units", x=h, hidden=h, noise=2.0) for h in (200, 1000, 2000)]
    return found


def measure(options: Options) -> dict[str, Any]:
    """The accuracy of every point."""
    return carried_out(plan(options))


def plan(options: Options) -> Plan:
    """Every point once; points of the same shape and about the same length in one program."""
    images = pixels("mnist", options)
    chosen = points()
    if options.quick:
        chosen = [replace(p, lot_size=min(p.lot_size, 100), hidden=min(p.hidden, 50)) for p in chosen[::9]]
    lengths = [{c: 3 + (c == VALID) for c in COUNTINGS} if options.quick else p.lengths() for p in chosen]
    shapes: dict[tuple[int, ...], list[int]] = {}
    for i, p in enumerate(chosen):  # of the same shape and about the same length
        length = int(2 * math.log2(max(1, *lengths[i].values())))
        shapes.setdefault((p.dimensions, p.hidden, p.lot_size, length), []).append(i)
    jobs = []
    for number, members in enumerate(shapes.values()):
        group = [chosen[i] for i in members]
        runs = [
            run(p, max(lengths[i].values()), k, len(images[1]))
            for k, (i, p) in enumerate(zip(members, group, strict=True))
        ]
        marks = [length for i in members for length in lengths[i].values()] + [1, 100, 1000, 3000, 10_000]
        tables = inputs(group, images, options.seed)
        seed = options.seed + number
        jobs.append(Job(runs=runs, data=tables, seed=seed, marks=marks, truncated=True, probe=median_norms))

    def result(found: list[Readings]) -> dict[str, Any]:
        rows = []
        for members, job, readings in zip(shapes.values(), jobs, found, strict=True):
            for k, i in enumerate(members):
                accuracy = {c: readings[lengths[i][c]]["test"][k] if lengths[i][c] else None for c in COUNTINGS}
                norms = {step: reading["probe"][k] for step, reading in readings.items() if step <= job.runs[k].steps}
                rows.append(
                    {
                        "panel": chosen[i].panel,
                        "x": chosen[i].x,
                        "projection": chosen[i].projection,
                        "cost": asdict(chosen[i].cost),
                        "steps": lengths[i],
                        "accuracy": accuracy,
                        "median gradient norm (private)": norms,
                    }
                )
        return {"epsilon": EPSILON, "most steps": MOST, "points": rows}

    return Plan(jobs, result)


def run(p: Point, steps: int, table: int, examples: int) -> Run:
    """The training of a point; the learning rate's schedule keeps the paper's ratio of 0.1 to 0.052."""
    return Run(
        steps=max(1, steps), noise=p.noise, clip=p.clip, lot_size=p.lot_size, hidden=p.hidden, inputs=p.dimensions,
        table=table, rate=p.rate * 0.1 / 0.052, rate_end=p.rate, rate_steps=10 * examples // p.lot_size,
    )  # fmt: skip


def inputs(group: list[Point], images: tuple[torch.Tensor, ...], seed: int) -> Data:
    """A table for each point of the group: noisy PCA, a random projection, or the pixels themselves."""
    x = images[0]
    matrices = []
    for p in group:
        if p.projection == "pca":
            matrices.append(pca(x, dimensions=p.dimensions, noise=p.pca_noise, seed=seed))
        elif p.projection == "random":
            normal = torch.randn(x.shape[1], p.dimensions, generator=torch.Generator().manual_seed(seed))
            matrices.append(torch.linalg.qr(normal)[0].to(x.device))
        else:
            matrices.append(torch.eye(x.shape[1], device=x.device))
    return projected((images[0], images[1], images[2], images[3]), matrices)


def account(result: dict[str, Any]) -> list[dict[str, dict[str, float]]]:
    """Epsilon of every point by each accountant, at the length of each counting."""
    return [
        {counting: spent(Cost(**point["cost"]), steps) for counting, steps in point["steps"].items() if steps}
        for point in result["points"]
    ]


def draw(result: dict[str, Any], path: Path) -> None:
    """Six panels as in the paper; PCA's noise shares the first."""
    from pictures import figure

    panels = [name for name in SWEEPS if name != "PCA noise level"]
    picture, axes = figure(columns=3, rows=2, title="MNIST, one parameter varies, each point trained to (2, 1e-5)")
    styles = ((AS_PUBLISHED, "o:", "#444444"), (VALID, "o-", "#2e86ab"))
    for axis, panel in zip(axes, panels, strict=True):
        for counting, line, colour in styles:
            curve = [p for p in result["points"] if p["panel"] == panel and p["projection"] == "pca"]
            curve = sorted((p for p in curve if p["accuracy"][counting] is not None), key=lambda p: p["x"])
            axis.plot(
                [p["x"] for p in curve],
                [p["accuracy"][counting] for p in curve],
                line,
                ms=3,
                color=colour,
                label=counting,
            )
        axis.set_xlabel(panel)
        axis.set_ylim(0.88, 0.97)
    for axis in axes[::3]:
        axis.set_ylabel("test accuracy")
    axes[3].set_xscale("log")
    for p in result["points"]:
        if p["projection"] != "pca":
            axes[0].axhline(p["accuracy"][VALID], color="#d1495b" if p["projection"] == "random" else "#8e5ea2", lw=0.8)
            title = "no projection" if p["projection"] == "none" else "random projection"
            axes[0].text(200, p["accuracy"][VALID] - 0.001, f"{title}, valid", fontsize=7, va="top", ha="right")
    axes[1].legend(fontsize=8)
    picture.savefig(path, dpi=130)


if __name__ == "__main__":
    run_script("fig4_mnist_parameters", measure, draw, account)
