"""Figure 3: MNIST accuracy for many (epsilon, delta), one curve for each delta; reads the trainings of figure 2.

The schedule of those trainings does not depend on their length, so the model after t steps is the last model of a run
of t steps. For each (epsilon, delta) a noise level is trained as long as the budget allows; as in the paper, the point
is the best of the noise levels, read on the test set.
"""

from pathlib import Path
from typing import Any

from budgets import AS_PUBLISHED, VALID, spent
from common import Options, read, run_script, summary
from fig2_mnist_noise_levels import LEVELS, LONGEST, cost
from side_by_side import FLAT, PER_LAYER

DELTAS = (1e-5, 1e-4, 1e-3, 1e-2)
EPSILONS = (0.25, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
COUNTINGS = {f"{AS_PUBLISHED}, {PER_LAYER}": (AS_PUBLISHED, PER_LAYER), f"{VALID}, {FLAT}": (VALID, FLAT)}


def allowed(counting: str, clipping: str, epsilon: float, delta: float) -> dict[str, int]:
    """The steps that a budget allows each noise level."""
    return {
        level: cost(level, clipping).longest(
            epsilon=epsilon, delta=delta, counting=counting, at_most=LONGEST[level] * 100
        )
        for level in LEVELS
    }


def measure(options: Options) -> dict[str, Any]:
    """The accuracy that every budget buys, in both countings."""
    base = read(options, "fig2_mnist_noise_levels")
    points = []
    for name, (counting, clipping) in COUNTINGS.items():
        for delta in DELTAS[:1] if options.quick else DELTAS:
            for epsilon in (0.5, 2.0) if options.quick else EPSILONS:
                best = None
                for level, steps in allowed(counting, clipping, epsilon, delta).items():
                    chosen = [h for h in base["histories"] if (h["level"], h["clipping"]) == (level, clipping)]
                    marks = [i for i, step in enumerate(chosen[0]["steps"]) if step <= steps]
                    if marks:
                        accuracy = summary([h["test"][marks[-1]] for h in chosen])
                        found = accuracy | {"level": level, "steps": chosen[0]["steps"][marks[-1]]}
                        best = found if best is None or found["mean"] > best["mean"] else best
                if best is not None:
                    points.append({"counting": name, "epsilon": epsilon, "delta": delta} | best)
    return {"points": points}


def account(result: dict[str, Any]) -> list[dict[str, float]]:
    """Epsilon of every point by each accountant, at its delta."""
    return [
        spent(cost(point["level"], COUNTINGS[point["counting"]][1]), point["steps"], delta=point["delta"])
        for point in result["points"]
    ]


def draw(result: dict[str, Any], path: Path) -> None:
    """One panel a counting, one curve a delta."""
    from pictures import colours, epsilon_axis, figure

    picture, axes = figure(columns=2, title="MNIST accuracy for (epsilon, delta)")
    palette = colours([str(delta) for delta in DELTAS])
    for axis, name in zip(axes, COUNTINGS, strict=True):
        for delta in DELTAS:
            curve = [p for p in result["points"] if p["counting"] == name and p["delta"] == delta]
            values = [p["mean"] for p in curve]
            axis.plot(
                [p["epsilon"] for p in curve], values, "o-", ms=3, color=palette[str(delta)], label=f"delta {delta:g}"
            )
        epsilon_axis(axis, (0.25, 0.5, 1, 2, 4, 8))
        axis.set_ylabel("test accuracy")
        axis.set_ylim(0.87, 0.98)
        axis.set_title(name + (" (not a guarantee)" if AS_PUBLISHED in name else ""), fontsize=10)
        axis.legend(fontsize=8, loc="lower right")
    picture.savefig(path, dpi=130)


if __name__ == "__main__":
    run_script("fig3_mnist_eps_delta", measure, draw, account)
