"""The non-private baseline of section 5.2: the same network without clipping and noise, 98.30 % in the paper."""

from pathlib import Path
from typing import Any

from common import Options, pca, pixels, projected, run_script, summary
from side_by_side import Run
from training import Job, Plan, Readings, carried_out

EPOCHS, LOT = 100, 600
RATES = {"paper's rates (0.1 to 0.052)": (0.1, 0.052), "five times the paper's rates": (0.5, 0.26)}
NO_CLIPPING, NO_NOISE = 1e9, 1e-6


def measure(options: Options) -> dict[str, Any]:
    """Accuracy by epoch, and of the last models."""
    return carried_out(plan(options))


def plan(options: Options) -> Plan:
    """Several trainings with each learning rate."""
    images = pixels("mnist", options)
    lot, epochs = (60, 2) if options.quick else (LOT, EPOCHS)
    per_epoch = len(images[1]) // lot
    names = [(name, r) for name in RATES for r in range(options.repetitions)]
    data = projected(images, [pca(images[0], dimensions=60, noise=NO_NOISE, seed=options.seed)])
    runs = [
        Run(
            steps=epochs * per_epoch, noise=0.0, clip=NO_CLIPPING, lot_size=lot,
            rate=RATES[name][0], rate_end=RATES[name][1], rate_steps=10 * per_epoch,
        )
        for name, _ in names
    ]  # fmt: skip
    marks = [e * per_epoch for e in range(1, epochs + 1)]
    job = Job(runs=runs, data=data, seed=options.seed, marks=marks, train_accuracy=True, truncated=True)

    def result(found: list[Readings]) -> dict[str, Any]:
        return curves_and_ends(found[0], [name for name, _ in names], marks)

    return Plan([job], result)


def curves_and_ends(readings: Readings, names: list[str], marks: list[int]) -> dict[str, Any]:
    """The curves of all runs, and the last models of each learning rate."""
    curves = {kind: [[readings[m][kind][k] for m in marks] for k in range(len(names))] for kind in readings[marks[0]]}
    last = {name: summary([curves["test"][k][-1] for k, of in enumerate(names) if of == name]) for name in RATES}
    return {
        "paper": 0.983,
        "epochs": len(marks),
        "runs": names,
        "accuracy": curves,
        "last models": last,
    }


def draw(result: dict[str, Any], path: Path) -> None:
    """Train and test accuracy by epoch: the gap is what private training does not show."""
    from pictures import figure

    picture, axes = figure(columns=len(RATES), title="MNIST without privacy: 60-dimensional PCA, 1,000 hidden units")
    for axis, name in zip(axes, RATES, strict=True):
        for kind, colour in (("test", "#2e86ab"), ("train (private)", "#e08e1b")):
            curves = [c for c, of in zip(result["accuracy"][kind], result["runs"], strict=True) if of == name]
            mean = [sum(values) / len(values) for values in zip(*curves, strict=True)]
            axis.plot(range(1, len(mean) + 1), mean, color=colour, label=kind.split(" ")[0])
        axis.set_ylim(0.95, 1.0)
        axis.set_xlabel("epoch")
        axis.set_ylabel("accuracy")
        axis.set_title(name, fontsize=10)
        axis.legend()
    picture.savefig(path, dpi=130)


if __name__ == "__main__":
    run_script("mnist_baseline", measure, draw)
