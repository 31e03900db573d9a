"""Each statement of the paper's text about figure 4, judged by the numbers of results/fig4_mnist_parameters.json."""

from typing import Any

from budgets import VALID

Result = dict[str, Any]
POINT = 0.01  # one per cent
NOISE = 0.004  # two standard deviations of one training's accuracy, about


def percent(x: float) -> str:
    """0.9512 -> 95.12 %."""
    return f"{100 * x:.2f} %"


def line(statement: str, holds: bool, number: str) -> str:
    """One checked statement."""
    return f"| {statement} | {'holds' if holds else 'does not hold'} | {number} |"


def sweep(result: Result, panel: str, projection: str = "pca") -> dict[float, float]:
    """x -> accuracy (valid counting) of one panel of figure 4."""
    chosen = [p for p in result["points"] if p["panel"] == panel and p["projection"] == projection]
    return {p["x"]: p["accuracy"][VALID] for p in chosen if p["accuracy"][VALID] is not None}


def best(curve: dict[float, float]) -> float:
    """Where a curve is highest."""
    return max(curve, key=lambda x: curve[x])


def spread(curve: dict[float, float]) -> float:
    """Highest less lowest."""
    return max(curve.values()) - min(curve.values())


def figure4_lines(result: Result) -> list[str]:
    """Each statement of the paper's text about the six sweeps."""
    dims, hidden, lots = (sweep(result, panel) for panel in ("projection dimensions", "hidden units", "lot size"))
    rates, clips = sweep(result, "learning rate"), sweep(result, "gradient clipping norm")
    noise, pca_noise = sweep(result, "noise level"), sweep(result, "PCA noise level")
    few = sweep(result, "few epochs (noise 2), hidden units")
    (none,) = sweep(result, "projection dimensions", "none").values()
    (drawn,) = sweep(result, "projection dimensions", "random").values()
    wide = {x: a for x, a in dims.items() if x >= 20}
    middle = {x: a for x, a in rates.items() if 0.01 <= x <= 0.07}
    reference = next(p for p in result["points"] if p["panel"] == "gradient clipping norm" and p["x"] == 4)
    norms = {int(step): norm for step, norm in reference["median gradient norm (private)"].items()}
    median = sorted(norms.values())[len(norms) // 2]
    course = ", ".join(f"{norms[step]:.2g} at step {step:,}" for step in (1, 100, 1000, 10_000) if step in norms)
    nearest = min(clips, key=lambda x: abs(x - median))
    return [
        line("accuracy is fairly stable in the PCA dimension", spread(wide) < 2 * POINT,
             f"{percent(spread(wide))} between the best and the worst of 20 to 200"),
        line("the best PCA dimension is 60", dims[best(dims)] - dims[60] <= NOISE,
             f"best {best(dims):g}: {percent(dims[best(dims)])}; 60: {percent(dims[60])}"),
        line("no PCA costs about 2 %", abs(dims[60] - none - 2 * POINT) <= POINT / 2,
             f"costs {percent(dims[60] - none)}"),
        line("a random projection gives about 92.5 %, less than PCA at every dimension",
             abs(drawn - 0.925) < POINT and drawn < min(wide.values()),
             f"random {percent(drawn)}; lowest PCA (20 to 200) {percent(min(wide.values()))}"),
        line("accuracy is stable over a large range of PCA noise", spread(pca_noise) < POINT,
             f"{percent(spread(pca_noise))} between PCA noise {min(pca_noise):g} and {max(pca_noise):g}"),
        line("more hidden units do not decrease accuracy", hidden[max(hidden)] >= hidden[min(hidden)] - NOISE,
             f"{min(hidden):g}: {percent(hidden[min(hidden)])}; {max(hidden):g}: {percent(hidden[max(hidden)])}"),
        line("with few epochs a larger network is better", few[max(few)] > few[min(few)],
             f"{min(few):g}: {percent(few[min(few)])}; {max(few):g}: {percent(few[max(few)])}"),
        line("lot size has a relatively large impact", spread(lots) > POINT, percent(spread(lots))),
        line("the best lot size is roughly sqrt(N) = 245", best(lots) <= 490, f"best {best(lots):g}"),
        line("accuracy is stable for learning rates in [0.01, 0.07]", spread(middle) < 2 * POINT,
             percent(spread(middle))),
        line("accuracy peaks at a learning rate of 0.05", rates[best(rates)] - rates[0.05] <= NOISE,
             f"best {best(rates):g}: {percent(rates[best(rates)])}; 0.05: {percent(rates[0.05])}"),
        line("accuracy falls significantly if the learning rate is too large",
             rates[best(rates)] - rates[max(rates)] > POINT,
             f"{max(rates):g}: {percent(rates[max(rates)])}"),
        line("too small a clipping norm, and too large a one, cost accuracy",
             min(clips) < best(clips) < max(clips),
             f"best {best(clips):g}; {min(clips):g}: {percent(clips[min(clips)])}; "
             f"{max(clips):g}: {percent(clips[max(clips)])}"),
        line("the median of the gradient norms is a good clipping norm",
             clips[best(clips)] - clips[nearest] <= POINT,
             f"the median is {course}; best bound {best(clips):g}: {percent(clips[best(clips)])}, "
             f"the one nearest to the median of the whole run, {nearest:g}: {percent(clips[nearest])}"),
        line("the noise level has a large impact", spread(noise) > POINT,
             f"{percent(spread(noise))}; best {best(noise):g}"),
    ]  # fmt: skip
