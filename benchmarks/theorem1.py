"""Theorem 1 in numbers: the noise that epsilon = 1 needs as steps grow, by accountant; what the Filter's grid costs.

python benchmarks/theorem1.py [--plot docs/figures/noise_by_steps.png]
"""

import argparse
import math

from hush.accounting import Budget, Event, Filter, Gaussian, PoissonSampled, calibrate, renyi, theorem1

RATE, DELTA, EPSILON = 0.01, 1e-5, 1.0
STEPS = (10**3, 10**4, 10**5, 10**6)
RUNS = (
    (0.01, 4.0, 100),
    (0.01, 4.0, 10_000),
    (0.04, 8.0, 500),
    (0.1, 5.0, 100),
    (0.01, 1.1, 1_500),
    (0.01, 1.0, 1_000),
    (0.001, 1.0, 100),
)


def noise_needed(steps: int, accountant: str) -> float:
    """The smallest noise multiplier for (EPSILON, DELTA) by this accountant."""

    def run(sigma: float) -> Event:
        return PoissonSampled(RATE, Gaussian(sigma)) * steps

    return calibrate.noise(run, Budget(epsilon=EPSILON, delta=DELTA), accountant=accountant)  # type: ignore[arg-type]


def grid_cost(run: Event) -> float:
    """The smallest budget, over Renyi's best epsilon, at which the default Filter lets the run through."""
    best, low, high = renyi.epsilon(run, delta=DELTA).upper, 1.0, 3.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        fits = Filter(Budget(epsilon=middle * best, delta=DELTA)).affords(run)
        low, high = (low, middle) if fits else (middle, high)
    return high


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plot")
    arguments = parser.parse_args()
    columns = ("strong", "moments", "renyi", "pld")
    curves: dict[str, list[float]] = {name: [noise_needed(steps, name) for steps in STEPS] for name in columns}
    print(f"noise for epsilon {EPSILON:g} at delta {DELTA:g}, rate {RATE:g}")
    print("in brackets: divided by q sqrt(T ln(1/delta)) / epsilon")
    print("| T | theorem, c2 = 2 | " + " | ".join(columns) + " | strong / pld | sqrt(ln(T/delta)) |")
    for place, steps in enumerate(STEPS):
        unit = theorem1.noise(rate=RATE, steps=steps, epsilon=EPSILON, delta=DELTA, c2=1.0)
        cells = [f"{curves[name][place]:.3f} ({curves[name][place] / unit:.2f})" for name in columns]
        claimed = math.sqrt(math.log(steps / DELTA))
        ratio = curves["strong"][place] / curves["pld"][place]
        print(f"| {steps:,} | {2 * unit:.3f} | {' | '.join(cells)} | {ratio:.2f} | {claimed:.2f} |")
    print("\nwhat the default Filter costs, epsilon over Renyi's at the best order:")
    for rate, sigma, steps in RUNS:
        print(f"| {rate:g}, {sigma:g}, {steps:,} | {grid_cost(PoissonSampled(rate, Gaussian(sigma)) * steps):.3f} |")
    if arguments.plot:
        draw(arguments.plot, curves)


def draw(path: str, curves: dict[str, list[float]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for name, curve in curves.items():
        axes.loglog(STEPS, curve, marker="o", label=name)
    theorem = [theorem1.noise(rate=RATE, steps=steps, epsilon=EPSILON, delta=DELTA) for steps in STEPS]
    axes.loglog(STEPS, theorem, linestyle="--", color="gray", label="Theorem 1, c2 = 2")
    axes.set(xlabel="steps T", ylabel="noise multiplier", title=f"epsilon {EPSILON:g}, delta {DELTA:g}, rate {RATE:g}")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
