"""hush epsilon, delta, noise, steps, compare: what a plan costs, and which plan a budget buys. Imports no torch."""

import json
import math
from pathlib import Path
from typing import Annotated, cast

import typer

from hush import accounting
from hush.accounting import Accountant, Allocated, Budget, Event, Gaussian, PoissonSampled, Shuffled, rounded_up
from hush.commands import figure

Rate = Annotated[float, typer.Option(help="Sampling rate q = lot size / examples, in [0, 1].")]
LEAST_NOISE, MOST_NOISE, MOST_STEPS = 1e-3, 1e6, 10**12
MOST_COMPARED = 10**8  # lots: 24 points of a curve are drawn

Noise = Annotated[float, typer.Option(help=f"Noise multiplier sigma, {LEAST_NOISE:g} to {MOST_NOISE:g}.")]
Steps = Annotated[int, typer.Option(help=f"Number of lots T, a whole number from 0 to {MOST_STEPS:g}.")]
Delta = Annotated[float, typer.Option(help="Delta, in (0, 1).")]
Epsilon = Annotated[float, typer.Option(help="Epsilon not to be exceeded, > 0.")]
WhichAccountant = Annotated[str, typer.Option(help=f"One of {', '.join(accounting.ACCOUNTANTS)}.")]
Sampling = Annotated[str, typer.Option(help="How lots are drawn: poisson, allocated or shuffled.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def mount(app: typer.Typer) -> None:
    """Add this module's commands to the application."""
    for command in (epsilon, delta, noise, steps, compare):
        app.command()(command)


def epsilon(
    rate: Rate,
    noise: Noise,
    steps: Steps,
    delta: Delta,
    accountant: WhichAccountant = "pld",
    sampling: Sampling = "poisson",
    as_json: Json = False,
) -> None:
    """Epsilon that a run spends.

    Example: hush epsilon --rate 0.01 --noise 4 --steps 10000 --delta 1e-5
    """
    event = run_event(rate=rate, noise=noise, steps=steps, sampling=sampling)
    bounds = accounting.epsilon(event, delta=delta, accountant=_known(accountant))
    why = accounting.NOT_VALID.get(accountant)
    values = {"epsilon": bounds.upper, "lower": bounds.lower, "accountant": accountant, "sampling": sampling}
    remark = f"; NOT a valid bound: {why}" if why else ""
    _show(
        values | {"valid": why is None},
        f"epsilon {bounds} at delta {delta:g} ({accountant}, {sampling}){remark}",
        as_json,
    )


def delta(
    rate: Rate,
    noise: Noise,
    steps: Steps,
    epsilon: Annotated[float, typer.Option(help="Epsilon at which delta is asked for, >= 0.")],
    accountant: WhichAccountant = "pld",
    sampling: Sampling = "poisson",
    as_json: Json = False,
) -> None:
    """Delta that a run has at this epsilon.

    Example: hush delta --rate 0.01 --noise 4 --steps 10000 --epsilon 1
    """
    event = run_event(rate=rate, noise=noise, steps=steps, sampling=sampling)
    bounds = accounting.delta(event, epsilon=epsilon, accountant=_known(accountant))
    values = {"delta": bounds.upper, "lower": bounds.lower, "accountant": accountant, "sampling": sampling}
    _show(values | {"valid": True}, f"delta {bounds} at epsilon {epsilon:g} ({accountant}, {sampling})", as_json)


def noise(
    epsilon: Epsilon,
    delta: Delta,
    rate: Rate,
    steps: Steps,
    accountant: WhichAccountant = "pld",
    sampling: Sampling = "poisson",
    as_json: Json = False,
) -> None:
    """The smallest noise multiplier for a budget.

    Example: hush noise --epsilon 2 --delta 1e-5 --rate 0.01 --steps 10000
    """
    which = _known(accountant)

    def planned(multiplier: float) -> Event:
        return run_event(rate=rate, noise=multiplier, steps=steps, sampling=sampling)

    found = accounting.calibrate.noise(planned, Budget(epsilon=epsilon, delta=delta), accountant=which)
    spent = accounting.epsilon(planned(found), delta=delta, accountant=which).upper
    values = {
        "noise_multiplier": found,
        "epsilon": spent,
        "accountant": accountant,
        "sampling": sampling,
        "valid": True,
    }
    _show(values, f"noise multiplier {found} (epsilon {rounded_up(spent)} at delta {delta:g})", as_json)


def steps(
    epsilon: Epsilon,
    delta: Delta,
    rate: Rate,
    noise: Noise,
    accountant: WhichAccountant = "pld",
    sampling: Sampling = "poisson",
    as_json: Json = False,
) -> None:
    """The largest number of steps for a budget; whole epochs where sampling is by epochs.

    Example: hush steps --epsilon 2 --delta 1e-5 --rate 0.01 --noise 4
    """
    which = _known(accountant)
    each = 1 if sampling == "poisson" else _lots_per_epoch(rate)

    def planned(units: int) -> Event:
        return run_event(rate=rate, noise=noise, steps=units * each, sampling=sampling)

    found = accounting.calibrate.steps(planned, Budget(epsilon=epsilon, delta=delta), accountant=which)
    spent = accounting.epsilon(planned(found), delta=delta, accountant=which).upper
    values = {"steps": found * each, "epsilon": spent, "accountant": accountant, "sampling": sampling, "valid": True}
    _show(values, f"{found * each} steps (epsilon {rounded_up(spent)} at delta {delta:g})", as_json)


def compare(
    rate: Rate,
    noise: Noise,
    delta: Delta,
    epochs: Annotated[int, typer.Option(help="Epochs E; one epoch is 1/rate lots.")] = 400,
    plot: Annotated[Path | None, typer.Option(help="Write the figure to this file (.png, .pdf, .svg).")] = None,
    as_json: Json = False,
) -> None:
    """Epsilon as a function of the epoch, by every accountant: the paper's figure.

    Example: hush compare --rate 0.01 --noise 4 --epochs 400 --delta 1e-5 --plot compare.png
    """
    if epochs < 1:
        raise ValueError(f"epochs must be a whole number >= 1, got {epochs}")
    if not 0 < rate <= 1:
        raise ValueError(f"rate must lie in (0, 1] to count epochs, got {rate}")
    if epochs / rate > MOST_COMPARED:
        raise ValueError(
            f"compare draws at most {MOST_COMPARED:g} lots, got {epochs / rate:g}; ask hush epsilon for one"
        )
    at = sorted({max(1, round(epochs * (k / 24) ** 2)) for k in range(1, 25)})  # denser where the curves bend
    runs = [run_event(rate=rate, noise=noise, steps=steps_in(epoch, rate), sampling="poisson") for epoch in at]
    curves = {
        name: [accounting.epsilon(run, delta=delta, accountant=cast(Accountant, name)).upper for run in runs]
        for name in accounting.ACCOUNTANTS
    }
    if plot is not None:
        figure.draw(plot, epochs=at, curves=curves, title=f"rate {rate:g}, noise {noise:g}, delta {delta:g}")
    values = {"epochs": at, "epsilon": curves, "valid": {name: name not in accounting.NOT_VALID for name in curves}}
    lines = [f"epsilon after {at[-1]} epochs at delta {delta:g}:"]
    for name, curve in curves.items():
        lines.append(
            f"  {name:<13}{rounded_up(curve[-1])}"
            + ("" if name not in accounting.NOT_VALID else "  (not a valid bound)")
        )
    _show(values | {"plot": str(plot) if plot else None}, "\n".join(lines), as_json)


def run_event(*, rate: float, noise: float, steps: int, sampling: str) -> Event:
    """The event of a run of Gaussian lots; epochs, where sampling is by epochs, are charged whole when begun."""
    if steps < 0:
        raise ValueError(f"steps must be a whole number >= 0, got {steps}")
    if steps > MOST_STEPS:
        raise ValueError(f"steps must be at most {MOST_STEPS:g}, got {steps}")
    mechanism = Gaussian(noise)
    if not LEAST_NOISE <= noise <= MOST_NOISE:
        raise ValueError(f"noise must lie in [{LEAST_NOISE:g}, {MOST_NOISE:g}], got {noise:g}")
    if not 0 <= rate <= 1:
        raise ValueError(f"rate must lie in [0, 1], got {rate}")
    match sampling:
        case "poisson":
            return PoissonSampled(rate, mechanism) * steps
        case "allocated":
            lots = _lots_per_epoch(rate)
            return Allocated(lots, mechanism) * -(-steps // lots)
        case "shuffled":
            lots = _lots_per_epoch(rate)
            return Shuffled(lots, mechanism) * -(-steps // lots)
    raise ValueError(f"sampling must be poisson, allocated or shuffled, got {sampling!r}")


def steps_in(epochs: int, rate: float) -> int:
    """Lots in so many epochs, E / q: the whole number meant, or rounded up (1 / (1/93) must not lose a lot)."""
    exact = epochs / rate
    nearest = round(exact)
    return nearest if abs(exact - nearest) <= 1e-9 * exact else math.ceil(exact)


def _lots_per_epoch(rate: float) -> int:
    lots = round(1 / rate) if 0 < rate <= 1 else 0
    if lots < 1 or abs(rate * lots - 1) > 1e-6:
        raise ValueError(
            f"an epoch needs a whole number of lots, so rate must be 1/n (such as 0.01 or 0.005), got {rate}"
        )
    return lots


def _known(accountant: str) -> Accountant:
    if accountant not in accounting.ACCOUNTANTS:
        raise ValueError(f"accountant must be one of {', '.join(accounting.ACCOUNTANTS)}, got {accountant!r}")
    return cast(Accountant, accountant)


def _show(values: dict[str, object], text: str, as_json: bool) -> None:
    print(json.dumps(values) if as_json else text)
