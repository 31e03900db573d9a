"""Figure 1: epsilon by epoch for q = 0.01, sigma = 4, delta = 1e-5, by every accountant; needs no data."""

from pathlib import Path
from typing import Any

from common import Options, run_script

from hush.accounting import Gaussian, PoissonSampled, moments, pld, renyi, strong

RATE, NOISE, DELTA = 0.01, 4.0, 1e-5
PRINTED = {100: {"strong composition": 9.34, "moments": 1.26}, 400: {"strong composition": 24.22, "moments": 2.55}}
NOT_VALID = "strong composition as printed (not valid)"  # its amplification needs epsilon <= 1 for a step; it is 1.46


def measure(options: Options) -> dict[str, Any]:
    """Epsilon of every accountant after each number of epochs."""
    epochs = [100, 400] if options.quick else [1, 5, 10, 20, 40, 60, 80, 100, 150, 200, 250, 300, 350, 400]
    curves: dict[str, list[float]] = {
        NOT_VALID: [], "strong composition (valid)": [], "moments": [], "renyi": [], "pld": [], "pld, lower bound": []
    }  # fmt: skip
    for epoch in epochs:
        event = PoissonSampled(RATE, Gaussian(NOISE)) * round(epoch / RATE)
        best = pld.epsilon(event, delta=DELTA)
        curves[NOT_VALID].append(strong.paper_epsilon(event, delta=DELTA).upper)
        curves["strong composition (valid)"].append(strong.epsilon(event, delta=DELTA).upper)
        curves["moments"].append(moments.epsilon(event, delta=DELTA).upper)
        curves["renyi"].append(renyi.epsilon(event, delta=DELTA).upper)
        curves["pld"].append(best.upper)
        curves["pld, lower bound"].append(best.lower)
    printed = {str(epoch): values for epoch, values in PRINTED.items()}
    return {"epochs": epochs, "epsilon": curves, "printed in the paper": printed, "valid": {NOT_VALID: False}}


def draw(result: dict[str, Any], path: Path) -> None:
    """Two panels: all curves, and the three that are close together."""
    from pictures import colours, figure

    picture, axes = figure(columns=2, title="Epsilon by epoch: q = 0.01, sigma = 4, delta = 1e-5")
    names = [name for name in result["epsilon"] if name != "pld, lower bound"]
    for axis, chosen in zip(axes, (names, names[2:]), strict=True):
        for name in chosen:
            axis.plot(result["epochs"], result["epsilon"][name], label=name, color=colours(names)[name])
        axis.set_xlabel("epoch")
        axis.set_ylabel("epsilon")
        axis.set_ylim(bottom=0)
    axes[0].set_yscale("log")
    axes[0].set_ylim(0.05, 200)
    axes[0].legend(fontsize=7, loc="lower right")
    axes[1].legend(fontsize=8)
    picture.savefig(path, dpi=130)


if __name__ == "__main__":
    run_script("fig1_accountants", measure, draw)
