"""hush train: train to a budget, with a recipe of the package or a job of one's own. Torch is imported when it runs."""

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from hush.commands.own_job import load_job
from hush.commands.ranges import MOST_STEPS, count, path, proper_budget, within
from hush.ledger.plain import plain

if TYPE_CHECKING:
    from hush.training import Job, Result

RECIPES = ("mnist", "fashion-mnist")


def mount(app: typer.Typer) -> None:
    """Add `train` to the application."""
    app.command()(train)


def train(
    what: Annotated[str, typer.Argument(help="mnist, fashion-mnist, or path/to/script.py:function (module:function).")],
    epsilon: Annotated[float, typer.Option(help="Epsilon not to be exceeded.")] = 2.0,
    delta: Annotated[float, typer.Option(help="Delta not to be exceeded; well below 1 / records.")] = 1e-5,
    model: Annotated[
        str | None, typer.Option(help="paper (the default) or best; for the data sets that have recipes.")
    ] = None,
    lot: Annotated[int | None, typer.Option(parser=count, metavar="N", help="Expected lot size L.")] = None,
    epochs: Annotated[int | None, typer.Option(parser=count, metavar="N", help="Epochs to plan for.")] = None,
    clip: Annotated[float | None, typer.Option(help="Bound C on a record's gradient.")] = None,
    noise: Annotated[float | None, typer.Option(help="Noise multiplier; found for the budget by default.")] = None,
    sampling: Annotated[str, typer.Option(help="How lots are drawn: poisson, allocated or shuffled.")] = "poisson",
    reserve: Annotated[int, typer.Option(parser=count, metavar="N", help="Steps kept for what a crash may lose.")] = 0,
    out: Annotated[
        Path | None, typer.Option(parser=path, metavar="FOLDER", help="Folder for checkpoints, model and report.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in --out.")] = False,
    ledger: Annotated[
        Path | None, typer.Option(parser=path, metavar="FILE", help="Ledger of the dataset; made if it does not exist.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...; a GPU where there is one.")] = None,
    batch: Annotated[
        int | None, typer.Option(parser=count, metavar="N", help="Physical batch size; found by default.")
    ] = None,
    seed: Annotated[int | None, typer.Option(parser=count, metavar="N", help="Reproducible, and NOT PRIVATE.")] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Event files in --out.")] = False,
    unsafe_diagnostics: Annotated[
        bool, typer.Option("--unsafe-diagnostics", help="Show numbers of training records; the report will say so.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Last line: one JSON object.")] = False,
) -> None:
    """Train a model without ever spending more than the budget.

    Example: hush train mnist --epsilon 2 --delta 1e-5 --out runs/mnist

    Example: hush train mnist --model best --epsilon 2 --ledger mnist.hush

    Example: hush train my_project/train.py:job --epsilon 3 --delta 1e-6 --out runs/mine --resume

    A function of one's own takes nothing and returns a hush.Job.
    """
    budget = proper_budget(epsilon, delta)
    for name, value in (("--lot", lot), ("--epochs", epochs), ("--batch", batch)):
        if value is not None:
            within(name, value, 1, MOST_STEPS)
    if clip is not None:
        within("--clip", clip, 1e-12, 1e12)
    if out is not None and out.exists() and not out.is_dir():
        raise ValueError(f"--out must be a folder, got {out}")
    if ledger is not None:
        _must_be_or_become_a_file("--ledger", ledger)
    from hush import training as fitting

    conduct = fitting.Conduct(
        budget=budget,
        noise_multiplier=noise,
        sampling=cast(Any, sampling),
        reserve=reserve,
        out=out,
        resume=resume,
        ledger=ledger,
        create_ledger=not resume,
        device=_device(device),
        seed=seed,
        unsafe_diagnostics=unsafe_diagnostics,
        tensorboard=tensorboard,
    )
    given = {"--lot": lot, "--epochs": epochs, "--clip": clip, "--noise": noise, "--sampling": sampling}
    given = {name: value for name, value in given.items() if value not in (None, "poisson")}
    if what in RECIPES:
        from hush.commands.recipe_job import choose, recipe_job

        found = choose(
            what, model="paper" if model is None else model, epsilon=epsilon, lot=lot, epochs=epochs, clip=clip
        )
        job = recipe_job(what, found=found, device=str(conduct.device), seed=seed)
    else:
        if model is not None:
            raise ValueError(f"--model is for {' and '.join(RECIPES)}; the job {what!r} brings its own")
        job = _changed(load_job(what), lot=lot, epochs=epochs, clip=clip)
    job = replace(job, settings_from=_settings(job.settings_from, given))
    if batch is not None:
        job = replace(job, batch_size=batch)
    warnings.simplefilter("always", fitting.PrivacyWarning)
    try:
        result = fitting.train(job, conduct)
    except KeyboardInterrupt:
        how = "" if out is None else "; go on with --resume"
        raise Stopped(f"stopped; what was charged stays charged{how}") from None
    _print(result, as_json)
    if out is not None and result.report is None:
        raise ValueError(f"not everything was written into {out}: see the warnings above")


def _must_be_or_become_a_file(name: str, file: Path) -> None:
    if not (file.is_file() if file.exists() or file.is_symlink() else file.parent.is_dir()):
        raise ValueError(
            f"{name} must be a file, or a new name in a folder that exists; came {file} (a folder, a broken link, or a "
            "place that is not there)"
        )


class Stopped(Exception):
    """Stopped by hand (Ctrl-C)."""


def _settings(chosen: str, given: dict[str, Any]) -> str:
    """Where the settings come from: what was typed was chosen by whoever typed it."""
    if not given:
        return chosen
    typed = ", ".join(f"{name} {value}" for name, value in given.items())
    rest = f"; the rest: {chosen}" if chosen else ""
    return f"{typed} by whoever ran it, who may have looked at this data{rest}"


def _changed(job: "Job", *, lot: int | None, epochs: int | None, clip: float | None) -> "Job":
    from hush.clipping.clips import FlatClip

    changes: dict[str, Any] = {}
    if lot is not None:
        changes["lot_size"] = lot
    if epochs is not None:
        changes |= {"epochs": epochs, "steps": None}
    if clip is not None:
        changes["clip"] = FlatClip(clip)
    return replace(job, **changes)


def _device(named: str | None) -> str:
    import torch

    from hush.training.preflight import usable

    return str(usable(named if named is not None else "cuda" if torch.cuda.is_available() else "cpu"))


def _print(result: "Result", as_json: bool) -> None:
    statement = result.statement
    if not as_json:
        if result.measured is not None:
            held_out = statement.facts["held_out"]
            shown = f"{held_out['label']} {result.measured:.4f} on {held_out['name']}, about {result.seconds:g} s"
            print(plain(shown) + "\n")
        print(statement)
        if result.report is not None:
            print(f"\nreport: {plain(result.report.html)}")
        else:
            print("\nNothing was kept. With --out FOLDER the model, its checkpoints and this report are.")
        return
    label = (statement.facts["held_out"] or {}).get("label")
    summary = {
        "test_accuracy": result.measured if label == "accuracy" else None,
        "measured": {label: result.measured} if label is not None else {},
        "epsilon": result.epsilon.upper,
        "epsilon_lower": result.epsilon.lower,
        "delta": statement.delta,
        "accountant": statement.accountant,
        "private": statement.private,
        "noise_multiplier": statement.plan.noise_multiplier,
        "steps": result.steps,
        "ended": result.ended,
        "seconds": result.seconds,
        "report": None if result.report is None else str(result.report.html),
    }
    print(json.dumps(summary))
