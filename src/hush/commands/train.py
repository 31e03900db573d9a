"""hush train: train to a budget, with a recipe of the package or a job of one's own. Torch is imported when it runs."""

import json
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from hush.accounting import Budget
from hush.commands.errors import one_line
from hush.commands.own_job import load_job
from hush.ledger import Ledger

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
    model: Annotated[str, typer.Option(help="paper or best; for the data sets that have recipes.")] = "paper",
    lot: Annotated[int | None, typer.Option(min=1, help="Expected lot size L.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs to plan for.")] = None,
    clip: Annotated[float | None, typer.Option(help="Bound C on a record's gradient.")] = None,
    noise: Annotated[float | None, typer.Option(help="Noise multiplier; found for the budget by default.")] = None,
    sampling: Annotated[str, typer.Option(help="How lots are drawn: poisson, allocated or shuffled.")] = "poisson",
    reserve: Annotated[int, typer.Option(min=0, help="Steps kept for what a crash may lose.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for checkpoints, model and report.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in --out.")] = False,
    ledger: Annotated[Path | None, typer.Option(help="Ledger of the dataset; made if it does not exist.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...; a GPU where there is one.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Physical batch size; found by default.")] = None,
    seed: Annotated[int | None, typer.Option(help="Reproducible, and NOT PRIVATE.")] = None,
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
    with one_line():
        from hush import training as fitting

        conduct = fitting.Conduct(
            budget=Budget(epsilon=epsilon, delta=delta),
            noise_multiplier=noise,
            sampling=cast(Any, sampling),
            reserve=reserve,
            out=out,
            resume=resume,
            ledger=ledger,
            device=_device(device),
            seed=seed,
            unsafe_diagnostics=unsafe_diagnostics,
            tensorboard=tensorboard,
        )
        if what in RECIPES:
            from hush.commands.recipe_job import choose, recipe_job

            found = choose(what, model=model, epsilon=epsilon, lot=lot, epochs=epochs, clip=clip)
            job = recipe_job(what, found=found, device=str(conduct.device), seed=seed)
        else:
            job = _changed(load_job(what), lot=lot, epochs=epochs, clip=clip)
        if batch is not None:
            job = replace(job, batch_size=batch)
        if ledger is not None and not resume:
            with Ledger(ledger, create=True) as book:
                if book.created:
                    print(f"created {book.path}", file=sys.stderr)
        with warnings.catch_warnings():
            warnings.simplefilter("always", fitting.PrivacyWarning)
            warnings.showwarning = _say_warning  # type: ignore[assignment]
            try:
                result = fitting.train(job, conduct)
            except KeyboardInterrupt:
                raise ValueError("stopped" + ("" if out is None else "; go on with --resume")) from None
    _print(result, as_json)


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

    return str(usable(named or ("cuda" if torch.cuda.is_available() else "cpu")))


def _print(result: "Result", as_json: bool) -> None:
    statement = result.statement
    if not as_json:
        if result.measured is not None:
            held_out = statement.facts["held_out"]
            print(f"{held_out['label']} {result.measured:.4f} on {held_out['name']}, {result.seconds:.0f} s\n")
        print(statement)
        if result.report is not None:
            print(f"\nreport: {result.report.html}")
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


def _say_warning(message: Any, *_: Any) -> None:
    print(f"hush: warning: {message}", file=sys.stderr)
