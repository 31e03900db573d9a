"""hush plan: what a budget buys, before any data is touched. Imports no torch, charges nothing."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from hush.accounting import Budget, planner
from hush.accounting.planner import Advice
from hush.commands import figure
from hush.commands.ranges import count, path, proper_budget, within

MOST_RECORDS = 10**12


def mount(app: typer.Typer) -> None:
    """Add `plan` to the application."""
    app.command()(plan)


def plan(
    records: Annotated[int, typer.Option(parser=count, metavar="N", help="Number of training records N.")],
    epsilon: Annotated[float, typer.Option(help="Epsilon not to be exceeded, > 0.")],
    delta: Annotated[float, typer.Option(help="Delta, in (0, 1); well below 1 / records.")],
    steps: Annotated[
        int | None, typer.Option(parser=count, metavar="N", help="Number of steps; 2,000 by default.")
    ] = None,
    step_seconds: Annotated[
        float | None, typer.Option(help="Seconds of one step for every 1,000 records of its lot.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(parser=path, metavar="FILE", help="Write the figure to this file (.png, .pdf, .svg).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Lot sizes, noise and time for a budget, and where larger lots stop helping. No data, no charge.

    Example: hush plan --records 60000 --epsilon 2 --delta 1e-5 --step-seconds 0.01
    """
    budget = proper_budget(epsilon, delta)
    within("--records", records, 2, MOST_RECORDS)
    if steps is not None:
        within("--steps", steps, 1, 10**9)
    if step_seconds is not None:
        within("--step-seconds", step_seconds, 1e-12, 1e12)
    if plot is not None:
        figure.must_be_drawable(plot)
    each = None if step_seconds is None else step_seconds / 1000
    advice = planner.advise(records, budget, steps=steps, seconds_per_record=each)
    if plot is not None:
        _draw(plot, advice, records, budget)
    if as_json:
        print(json.dumps(asdict(advice) | {"records": records, "epsilon": epsilon, "delta": delta}))
        return
    print("\n".join(_lines(advice, records, budget)))


def _lines(advice: Advice, records: int, budget: Budget) -> list[str]:
    rows = advice.rows
    lines = [
        f"{records} records, epsilon {budget.epsilon:g} at delta {budget.delta:g}, {rows[0].steps} steps:",
        f"  {'lot':>8} {'epochs':>8} {'noise':>8} {'noise/lot':>10} {'share':>6} {'time':>8}",
    ]
    for index, row in enumerate(rows):
        time = "" if row.seconds is None else _time(row.seconds)
        mark = ("  <- the knee" if index == advice.knee else "") + (
            "  <- sqrt(N)" if row.lot_size == advice.paper_lot else ""
        )
        lines.append(
            f"  {row.lot_size:>8} {row.epochs:>8.4g} {row.noise_multiplier:>8.4g} {row.noise_to_lot:>10.3g} "
            f"{row.share:>6.0%} {time:>8}{mark}"
        )
    lines += [
        "share: the signal over the noise of the whole run, of the most that the budget can buy at any lot size.",
        "The knee is the smallest lot that keeps 90 %; beyond it larger lots cost time and buy little."
        if advice.knee is not None
        else "No lot here keeps 90 %: more steps or larger lots would help.",
        f"The paper's advice (Abadi et al. 2016, 3.3): lots near sqrt(N) = {advice.paper_lot}, and about as many "
        f"epochs as an epoch has lots, here {advice.paper_epochs}.",
        "At the knee, the signal over the noise grows by: "
        + ", ".join(f"{factor:.2f} for {what}" for what, factor in advice.buys.items())
        + ".",
    ]
    return lines


def _time(seconds: float) -> str:
    return (
        f"{seconds:.3g} s"
        if seconds < 120
        else f"{seconds / 60:.3g} min"
        if seconds < 7200
        else f"{seconds / 3600:.3g} h"
    )


def _draw(file: Path, advice: Advice, records: int, budget: Budget) -> None:
    from matplotlib.figure import Figure

    lots = [row.lot_size for row in advice.rows]
    picture = Figure(figsize=(7.0, 4.5), layout="constrained")
    axes = picture.add_subplot()
    axes.plot(lots, [row.noise_to_lot for row in advice.rows], color="#2166ac", marker="o", label="noise-to-lot ratio")
    axes.set(xscale="log", yscale="log", xlabel="lot size", ylabel="noise multiplier / lot size")
    axes.set_title(
        f"{records} records, epsilon {budget.epsilon:g}, delta {budget.delta:g}, {advice.rows[0].steps} steps"
    )
    axes.axvline(advice.paper_lot, color="grey", linestyle=":", label="sqrt(N), the paper's advice")
    if advice.knee is not None:
        axes.axvline(lots[advice.knee], color="#b2182b", linestyle="--", label="the knee: 90 % of the signal")
    axes.grid(True, which="both", alpha=0.25)
    axes.legend(fontsize="small")
    picture.savefig(file, dpi=150)
