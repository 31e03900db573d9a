"""What tuning costs: the paper's numbers, and what each newer bound charges for as many settings.

    python experiments/tuning/charges.py          writes results/tuning_charges.json and prints the tables

Counting: a count of right answers on 10,000 private validation records, and the paper's promise: with probability 0.95
at most 1 % is lost against the best of K settings. The paper's theorem has eps' = 1/2. The newer ways add Laplace noise
to each count and release the best: the scale is the largest that keeps the promise, with so many trials on average that
none of them is a good setting with probability 0.025, and that noise is off by more than 50 with probability 0.025.

Training: a trial is the paper's example (q = 0.01, sigma = 4, 10,000 steps), scores come from public data.
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np

from hush import accounting
from hush.accounting import Event, Gaussian, Laplace, PoissonSampled, Selected, Trials, renyi
from hush.accounting.gupta import gupta

SETTINGS = (50, 500, 6700)
VALIDATION, LOST, FAILURE = 10_000, 100, 0.05
RULES = ("geometric", "logarithmic", "poisson")
TRAINING = PoissonSampled(0.01, Gaussian(4.0)) * 10_000
DELTA = 1e-5
RESULTS = Path(__file__).resolve().parents[2] / "results"


def trials_needed(settings: int) -> Trials:
    """Random stopping with which no trial is the good one of the settings with probability FAILURE / 2 at most.

    With a share p of good settings that is f(1 - p) = gamma (1 - p) / (gamma + p - gamma p), f the generating function.
    """
    share = 1 / settings
    gamma = share * (FAILURE / 2) / ((1 - share) * (1 - FAILURE / 2))
    return Trials("geometric", 1 / gamma)


def count_epsilon(trials: Trials) -> float:
    """The smallest Laplace epsilon for which all trials' noise is within LOST / 2, but for FAILURE / 2.

    E[K] P(|noise| > LOST / 2) bounds the chance that one is further out.
    """
    return math.log(trials.mean / (FAILURE / 2)) / (LOST / 2)


def counting(settings: int) -> dict[str, dict[str, float]]:
    near = 0.5 - 1e-9
    paper = gupta(settings, eps_prime=near, failure=FAILURE)
    rows = {"paper": {"epsilon": paper.epsilon, "runs": paper.runs, "lost": paper.lost}}
    each = math.log(settings / FAILURE) / (LOST / 2)
    rows["every setting paid for"] = {"epsilon": each * settings, "runs": settings, "lost": LOST}
    trials = trials_needed(settings)
    event = Selected(Laplace(1 / count_epsilon(trials)), trials.rule, trials.mean)
    rows["geometric"] = {"epsilon": accounting.reductions.pure_total(event), "runs": trials.mean, "lost": LOST}
    return rows


def one_layer(trial: Event, trials: Trials) -> float:
    """E[K] delta(epsilon - gap), gap = (1 + eta) ln(e^a + delta(a) / gamma) at the best a: one point bounds the gap."""
    points = [(a, accounting.delta(trial, epsilon=float(a)).upper) for a in np.linspace(0.1, 1.5, 29)]
    gap = (1 + trials.eta) * min(math.log(math.exp(a) + delta / trials.stopping) for a, delta in points)
    return float(gap + accounting.epsilon(trial, delta=DELTA / trials.mean).upper)


def training(settings: int) -> dict[str, dict[str, float | None]]:
    rows: dict[str, dict[str, float | None]] = {
        "every setting paid for": {"hush": accounting.epsilon(TRAINING * settings, delta=DELTA).upper}
    }
    for rule in RULES:
        event = Selected(TRAINING, rule, float(settings))
        rows[rule] = {
            "hush": accounting.epsilon(event, delta=DELTA).upper,
            "renyi": renyi.epsilon(event, delta=DELTA).upper,
            "one layer": one_layer(TRAINING, event.trials) if rule != "poisson" else None,
        }
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--settings", type=int, nargs="+", default=list(SETTINGS))
    args = parser.parse_args(arguments)
    found = {
        "one trial": accounting.epsilon(TRAINING, delta=DELTA).upper,
        "counting": {str(settings): counting(settings) for settings in args.settings},
        "training": {str(settings): training(settings) for settings in args.settings},
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "tuning_charges.json").write_text(json.dumps(found, indent=1) + "\n")
    for part in ("counting", "training"):
        for settings, rows in found[part].items():
            for way, row in rows.items():
                numbers = ", ".join(f"{name} {value:.4g}" for name, value in row.items() if value is not None)
                print(f"{part}, {settings} settings, {way}: {numbers}")


if __name__ == "__main__":
    main()
