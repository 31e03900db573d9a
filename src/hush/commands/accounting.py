"""hush epsilon, delta, noise, steps, compare: what a plan costs, and which plan a budget buys. Imports no torch."""

import json
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TypeVar, cast

import typer

from hush import accounting
from hush.accounting import Accountant, Allocated, Bounds, Budget, Event, Gaussian, PoissonSampled, Shuffled, rounded_up
from hush.commands import figure
from hush.commands.ranges import MOST_EPSILON, MOST_STEPS, count, path, proper_budget, proper_delta, within
from hush.commands.watching import watched

T = TypeVar("T", int, float)

_TOO_DEAR = 1e4  # an epsilon that protects nobody; certifying it can take a minute and a gigabyte
LEAST_NOISE = 0.05  # less protects nobody
_PATIENCE = 5.0  # seconds for a search by the accountant that was asked for
_LEAST_RATE = {"poisson": 1e-9, "allocated": 1e-5, "shuffled": 1e-9}
_LEAST_RATE_TO_SEARCH = 1e-6  # a search asks the accountant twenty times, and a rate below this takes it seconds

Rate = Annotated[float, typer.Option(help="Sampling rate q = lot size / examples, in [0, 1].")]
Noise = Annotated[float, typer.Option(help="Noise multiplier sigma, from 0.05 to 1e6.")]
Steps = Annotated[int, typer.Option(parser=count, metavar="N", help="Number of lots T, a whole number up to 1e12.")]
Delta = Annotated[float, typer.Option(help="Delta, in (0, 1).")]
Epsilon = Annotated[float, typer.Option(help="Epsilon not to be exceeded, from 1e-6 to 1000.")]
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
    bounds = _epsilon(event, proper_delta(delta), _known(accountant))
    why = accounting.NOT_VALID.get(accountant)
    values = {"epsilon": bounds.upper, "lower": bounds.lower, "accountant": accountant, "sampling": sampling}
    remark = f"; NOT a valid bound: {why}" if why else ""
    _show(
        values | {"valid": why is None},
        f"epsilon {bounds} at delta {rounded_up(delta, 6)} ({accountant}, {sampling}){remark}",
        as_json,
    )


def delta(
    rate: Rate,
    noise: Noise,
    steps: Steps,
    epsilon: Annotated[float, typer.Option(help="Epsilon at which delta is asked for, from 0 to 1000.")],
    accountant: WhichAccountant = "pld",
    sampling: Sampling = "poisson",
    as_json: Json = False,
) -> None:
    """Delta that a run has at this epsilon.

    Example: hush delta --rate 0.01 --noise 4 --steps 10000 --epsilon 1
    """
    which = _known(accountant)
    event = run_event(rate=rate, noise=noise, steps=steps, sampling=sampling)
    within("epsilon", epsilon, 0, MOST_EPSILON)
    _epsilon(event, 1e-5, "renyi")  # refuses a plan that protects nobody
    with _answering(which):
        bounds = accounting.delta(event, epsilon=epsilon, accountant=which)
    values = {"delta": bounds.upper, "lower": bounds.lower, "accountant": accountant, "sampling": sampling}
    at = rounded_up(epsilon, 6)
    _show(values | {"valid": True}, f"delta {bounds} at epsilon {at} ({accountant}, {sampling})", as_json)


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
    which, budget = _known(accountant), proper_budget(epsilon, delta)

    def planned(multiplier: float) -> Event:
        return _event(rate, multiplier, steps, sampling)

    _searchable(rate)
    least = run_event(rate=rate, noise=LEAST_NOISE, steps=steps, sampling=sampling)
    with _answering(which):
        found = LEAST_NOISE
        if accounting.epsilon(least, delta=delta, accountant=which).upper > epsilon:
            found, which = _searched(accounting.calibrate.noise, planned, budget, which)
        spent = accounting.epsilon(planned(found), delta=delta, accountant=which).upper
    values = {
        "noise_multiplier": found,
        "epsilon": spent,
        "accountant": which,
        "sampling": sampling,
        "valid": True,
    }
    _show(values, f"noise multiplier {found} (epsilon {rounded_up(spent)} at delta {rounded_up(delta, 6)})", as_json)


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
    which, budget = _known(accountant), proper_budget(epsilon, delta)
    _searchable(rate)
    run_event(rate=rate, noise=noise, steps=1, sampling=sampling)
    each = 1 if sampling == "poisson" else _lots_per_epoch(rate)

    def planned(units: int) -> Event:
        return _event(rate, noise, units * each, sampling)

    with _answering(which):
        found, which = _searched(accounting.calibrate.steps, planned, budget, which)
        spent = accounting.epsilon(planned(found), delta=delta, accountant=which).upper
    values = {"steps": found * each, "epsilon": spent, "accountant": which, "sampling": sampling, "valid": True}
    _show(values, f"{found * each} steps (epsilon {rounded_up(spent)} at delta {rounded_up(delta, 6)})", as_json)


def compare(
    rate: Rate,
    noise: Noise,
    delta: Delta,
    epochs: Annotated[
        int, typer.Option(parser=count, metavar="N", help="Epochs E, up to 1e6; one epoch is 1/rate lots.")
    ] = 400,
    plot: Annotated[
        Path | None, typer.Option(parser=path, metavar="FILE", help="Write the figure to this file (.png, .pdf, .svg).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Epsilon as a function of the epoch, by every accountant: the paper's figure.

    Example: hush compare --rate 0.01 --noise 4 --epochs 400 --delta 1e-5 --plot compare.png
    """
    within("epochs", epochs, 1, 10**6)
    _searchable(rate)
    if rate == 0:
        raise ValueError(f"rate must lie in (0, 1] to count epochs, got {rate}")
    if plot is not None:
        figure.must_be_drawable(plot)
    at = sorted({max(1, round(epochs * (k / 24) ** 2)) for k in range(1, 25)})  # denser where the curves bend
    runs = [run_event(rate=rate, noise=noise, steps=steps_in(epoch, rate), sampling="poisson") for epoch in at]
    _epsilon(runs[-1], proper_delta(delta), "renyi")
    curves: dict[str, list[float]] = {name: [] for name in accounting.ACCOUNTANTS}
    for run in watched("epsilon by every accountant")(runs):
        for name, curve in curves.items():
            curve.append(_epsilon(run, delta, cast(Accountant, name)).upper)
    if plot is not None:
        figure.draw(plot, epochs=at, curves=curves, title=f"rate {rate:g}, noise {noise:g}, delta {delta:g}")
    values = {"epochs": at, "epsilon": curves, "valid": {name: name not in accounting.NOT_VALID for name in curves}}
    lines = [f"epsilon after {at[-1]} epochs at delta {rounded_up(delta, 6)}:"]
    for name, curve in curves.items():
        lines.append(
            f"  {name:<13}{rounded_up(curve[-1])}"
            + ("" if name not in accounting.NOT_VALID else "  (not a valid bound)")
        )
    _show(values | {"plot": str(plot) if plot else None}, "\n".join(lines), as_json)


def run_event(*, rate: float, noise: float, steps: int, sampling: str) -> Event:
    """The event of a run of Gaussian lots; epochs, where sampling is by epochs, are charged whole when begun."""
    within("steps", steps, 0, MOST_STEPS)
    within("noise", noise, LEAST_NOISE, 1e6)
    within("rate", rate, 0, 1)
    if sampling not in _LEAST_RATE:
        raise ValueError(f"sampling must be poisson, allocated or shuffled, got {sampling!r}")
    if 0 < rate < _LEAST_RATE[sampling]:
        raise ValueError(f"rate must be 0 or at least {_LEAST_RATE[sampling]:g} for {sampling} lots, got {rate:g}")
    return _event(rate, noise, steps, sampling)


def _event(rate: float, noise: float, steps: int, sampling: str) -> Event:
    mechanism = Gaussian(noise)
    if sampling == "poisson":
        return PoissonSampled(rate, mechanism) * steps
    lots = _lots_per_epoch(rate)
    epoch: Event = Allocated(lots, mechanism) if sampling == "allocated" else Shuffled(lots, mechanism)
    return epoch * -(-steps // lots)


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


def _epsilon(event: Event, delta: float, accountant: Accountant) -> Bounds:
    """Epsilon, by an accountant that can be waited for: Renyi answers at once, and says which plans protect nobody."""
    with _answering(accountant):
        if accountant in ("pld", "renyi"):
            about = accounting.epsilon(event, delta=delta, accountant="renyi")
            if not about.upper <= _TOO_DEAR:
                raise ValueError(
                    f"expected a plan that protects somebody; came one that costs about epsilon {about.upper:.3g}; add "
                    "noise, or take fewer or smaller lots"
                )
            if accountant == "renyi":
                return about
        return accounting.epsilon(event, delta=delta, accountant=accountant)


@contextmanager
def _answering(accountant: Accountant) -> Iterator[None]:
    """Where numbers leave what a float can hold there is no answer, and that is said."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            yield
    except (ArithmeticError, ValueError) as error:
        if isinstance(error, ValueError) and not str(error).startswith("math "):  # of Python's own functions
            raise
        raise ValueError(
            f"accountant {accountant} has no answer for these numbers ({error}); choose less extreme ones, or another "
            "accountant"
        ) from error


def _searched(
    search: Callable[..., T], planned: Callable[[T], Event], budget: Budget, accountant: Accountant
) -> tuple[T, Accountant]:
    """What the search finds, and by which accountant: where it takes long Renyi's answer, which holds as well."""
    until = time.monotonic() + _PATIENCE

    def patiently(candidate: T) -> Event:
        if time.monotonic() > until:
            raise _TooLong
        return planned(candidate)

    try:
        return search(patiently, budget, accountant=accountant), accountant
    except _TooLong:
        warnings.warn(f"a search by {accountant} takes too long: this is Renyi's answer", UserWarning, stacklevel=2)
        return search(planned, budget, accountant="renyi"), "renyi"


class _TooLong(Exception):
    """The search has used up its time."""


def _searchable(rate: float) -> None:
    within("rate", rate, 0, 1)
    if 0 < rate < _LEAST_RATE_TO_SEARCH:
        raise ValueError(f"rate must be 0 or at least {_LEAST_RATE_TO_SEARCH:g} here, got {rate:g}; see hush epsilon")


def _known(accountant: str) -> Accountant:
    if accountant not in accounting.ACCOUNTANTS:
        raise ValueError(f"accountant must be one of {', '.join(accounting.ACCOUNTANTS)}, got {accountant!r}")
    return cast(Accountant, accountant)


def _show(values: Mapping[str, object], text: str, as_json: bool) -> None:
    print(json.dumps(values) if as_json else text)
