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
    from hush.clipping.clips import Clip
    from hush.training import Result

RECIPES = ("mnist", "fashion-mnist", "cifar10")


def mount(app: typer.Typer) -> None:
    """Add `train` to the application."""
    app.command()(train)


def train(
    what: Annotated[
        str, typer.Argument(help="mnist, fashion-mnist, cifar10, or path/to/script.py:function (module:function).")
    ],
    epsilon: Annotated[float, typer.Option(help="Epsilon not to be exceeded.")] = 2.0,
    delta: Annotated[float, typer.Option(help="Delta not to be exceeded; well below 1 / records.")] = 1e-5,
    model: Annotated[str | None, typer.Option(help="paper (the default) or best; for mnist and fashion-mnist.")] = None,
    tier: Annotated[
        str | None, typer.Option(help="What is public: public (the default), synthetic or scratch; for cifar10.")
    ] = None,
    lot_size: Annotated[int | None, typer.Option(parser=count, metavar="N", help="Expected lot size L.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Epochs to plan for.")] = None,
    steps: Annotated[
        int | None, typer.Option(parser=count, metavar="N", help="Steps to plan for, instead of epochs.")
    ] = None,
    clip: Annotated[
        str | None, typer.Option(help="Bound C on a record's gradient, or by layer: 'conv*=2,*=1'.")
    ] = None,
    noise_multiplier: Annotated[float | None, typer.Option(help="Found for the budget by default.")] = None,
    noise_schedule: Annotated[
        Path | None,
        typer.Option(parser=path, metavar="FILE", help="JSON list: the shape of the noise, step by step."),
    ] = None,
    noise: Annotated[str, typer.Option(help="gaussian, or float_safe: integers on a grid.")] = "gaussian",
    sampling: Annotated[str, typer.Option(help="How lots are drawn: poisson, allocated or shuffled.")] = "poisson",
    accountant: Annotated[str, typer.Option(help="pld, renyi, moments or strong.")] = "pld",
    reserve: Annotated[int, typer.Option(parser=count, metavar="N", help="Steps kept for what a crash may lose.")] = 0,
    out: Annotated[
        Path | None, typer.Option(parser=path, metavar="FOLDER", help="Folder for checkpoints, model and report.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in --out.")] = False,
    ledger: Annotated[
        Path | None, typer.Option(parser=path, metavar="FILE", help="Ledger of the dataset; made if it does not exist.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...; a GPU where there is one.")] = None,
    batch_size: Annotated[
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

    Example: hush train cifar10 --tier public --epsilon 2 --out runs/cifar10

    Example: hush train my_project/train.py:job --epsilon 3 --delta 1e-6 --out runs/mine --resume

    A function of one's own takes nothing and returns a hush.Job.
    """
    budget = proper_budget(epsilon, delta)
    for name, value in (
        ("--lot-size", lot_size),
        ("--epochs", epochs),
        ("--steps", steps),
        ("--batch-size", batch_size),
    ):
        if value is not None:
            within(name, value, 1, MOST_STEPS)
    if noise_multiplier is not None:
        within("--noise-multiplier", noise_multiplier, 0.01, 1e6)
    settings = _settings(lot_size=lot_size, epochs=epochs, steps=steps, clip=clip, noise_multiplier=noise_multiplier)
    shape = None if noise_schedule is None else _schedule(noise_schedule)
    if out is not None and out.exists() and not out.is_dir():
        raise ValueError(f"--out must be a folder, got {out}")
    if ledger is not None:
        must_be_or_become_a_file("--ledger", ledger)
    from hush import training
    from hush.machine import Machine

    machine = Machine(device=_device(device), batch_size=batch_size)
    if what in RECIPES:
        from hush.commands.recipe_job import recipe_job
        from hush.recipes import recipe

        found = recipe(what, _kind(what, model, tier), epsilon=epsilon)
        taken = {name: value for name, value in settings.items() if name in ("lot_size", "epochs")}
        job = recipe_job(what, found=replace(found, **taken), device=str(machine.device), seed=seed)
    else:
        if model is not None or tier is not None:
            raise ValueError(f"--model and --tier are for {', '.join(RECIPES)}; the job {what!r} brings its own")
        job = load_job(what)
    plan = job.plan(
        budget,
        **settings,
        noise=cast(Any, noise),
        noise_schedule=shape,
        sampling=cast(Any, sampling),
        accountant=cast(Any, accountant),
        reserve=reserve,
    )
    given = {"--lot-size": lot_size, "--epochs": epochs, "--steps": steps, "--clip": clip, "--sampling": sampling,
             "--noise-multiplier": noise_multiplier, "--noise-schedule": noise_schedule, "--noise": noise}  # fmt: skip
    given = {name: value for name, value in given.items() if value not in (None, "poisson", "gaussian")}
    run = training.Run(
        out,
        about=replace(job.about, settings_from=_chosen(job.about.settings_from, given)),
        ledger=ledger,
        create_ledger=not resume,
        resume=resume,
        seed=seed,
        callbacks=[*job.callbacks, *([training.TensorBoard()] if tensorboard else [])],
        unsafe_diagnostics=unsafe_diagnostics,
    )
    warnings.simplefilter("always", training.PrivacyWarning)
    try:
        result = training.fit(
            job.model, job.data, job.losses_of, job.optimizer, plan, held_out=job.held_out, run=run, machine=machine
        )
    except KeyboardInterrupt:
        how = "" if out is None else "; go on with --resume"
        raise Stopped(f"stopped; what was charged stays charged{how}") from None
    _print(result, as_json)
    if out is not None and result.report is None:
        raise ValueError(f"not everything was written into {out}: see the warnings above")


def _kind(what: str, model: str | None, tier: str | None) -> str:
    """Which of a data set's recipes: the model of the MNISTs, the tier of CIFAR-10."""
    if what == "cifar10":
        wanted, other, name, default = tier, model, "--tier", "public"
    else:
        wanted, other, name, default = model, tier, "--model", "paper"
    if other is not None:
        raise ValueError(f"recipes for {what} are told apart by {name}; leave the other option out")
    return wanted or default


def must_be_or_become_a_file(name: str, file: Path) -> None:
    if not (file.is_file() if file.exists() or file.is_symlink() else file.parent.is_dir()):
        raise ValueError(
            f"{name} must be a file, or a new name in a folder that exists; came {file} (a folder, a broken link, or a "
            "place that is not there)"
        )


class Stopped(Exception):
    """Stopped by hand (Ctrl-C)."""


def _chosen(chosen: str, given: dict[str, Any]) -> str:
    """Where the settings come from: what was typed was chosen by whoever typed it."""
    if not given:
        return chosen
    typed = ", ".join(f"{name} {value}" for name, value in given.items())
    rest = f"; the rest: {chosen}" if chosen else ""
    return f"{typed} by whoever ran it, who may have looked at this data{rest}"


def _settings(**given: Any) -> dict[str, Any]:
    """What was asked for on the command line, as arguments of a plan."""
    settings = {name: value for name, value in given.items() if value is not None}
    if "clip" in settings:
        settings["clip"] = _clip(settings["clip"])
    return settings


def _clip(text: str) -> "Clip":
    """A number, or patterns of layers with a number each.

    >>> _clip("conv*=2,*=1")
    PerLayerClip(bounds={'conv*': 2.0, '*': 1.0})
    """
    from hush.clipping.clips import FlatClip, PerLayerClip

    try:
        if "=" not in text:
            return FlatClip(within("--clip", float(text), 1e-12, 1e12))
        pairs = [part.rsplit("=", 1) for part in text.split(",")]
        bounds = {pattern.strip(): within("--clip", float(bound), 1e-12, 1e12) for pattern, bound in pairs}
        return PerLayerClip(bounds)
    except ValueError:
        raise ValueError(
            f"--clip must be a number from 1e-12 to 1e12, or like 'conv*=2,*=1', got {text[:50]!r}"
        ) from None


def _schedule(path: Path) -> Any:
    try:
        values = json.loads(path.read_text())
        shape = [float(value) for value in values]
    except (OSError, ValueError, TypeError):
        raise ValueError(f"--noise-schedule must name a file with a JSON list of numbers, got {path}") from None

    def at(step: int) -> float:
        if step >= len(shape):
            raise ValueError(f"{path} has {len(shape)} values, and the plan has more steps (its reserve included)")
        return shape[step]

    return at


def _device(named: str | None) -> str:
    import torch

    from hush.machine import usable

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
        "epsilon": result.epsilon.upper if statement.private else None,
        "epsilon_lower": result.epsilon.lower if statement.private else None,
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
