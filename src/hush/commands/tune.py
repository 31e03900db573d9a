"""hush tune: many settings of a person's own training, one charge for all of them."""

import json
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hush.accounting import rounded_up
from hush.commands.own_job import load_function
from hush.commands.ranges import count, path, proper_budget, within
from hush.commands.train import Stopped, must_be_or_become_a_file
from hush.ledger.owned import held

if TYPE_CHECKING:
    from hush.tuning import Trial, Tuned


def mount(app: typer.Typer) -> None:
    """Add `tune` to the application."""
    app.command()(tune)


def tune(
    what: Annotated[str, typer.Argument(help="path/to/script.py:function: settings -> hush.tuning.Trial.")],
    settings: Annotated[
        Path, typer.Option(parser=path, metavar="FILE", help="TOML file: one [[settings]] table for each setting.")
    ],
    epsilon: Annotated[float, typer.Option(help="Epsilon of the whole tuning, the winner included.")],
    delta: Annotated[float, typer.Option(help="Delta of the whole tuning.")],
    out: Annotated[
        Path, typer.Option(parser=path, metavar="FOLDER", help="Folder for the winner, and for what --resume needs.")
    ],
    rule: Annotated[
        str,
        typer.Option(help="geometric, logarithmic, negative-binomial, poisson, binomial, or pay-for-each."),
    ] = "geometric",
    mean: Annotated[float | None, typer.Option(help="Mean number of trials; the number of settings.")] = None,
    shape: Annotated[float, typer.Option(help="Shape of negative-binomial; the most trials of binomial.")] = 1.0,
    jobs: Annotated[int, typer.Option(parser=count, metavar="N", help="Trials at a time.")] = 1,
    ledger: Annotated[
        Path | None, typer.Option(parser=path, metavar="FILE", help="Ledger of the dataset; made if it does not exist.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the tuning in --out.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Last line: one JSON object.")] = False,
) -> None:
    """Try many settings, release the best trial, and pay for all of it once.

    Example: hush tune my_project/tuning.py:trial --settings settings.toml --epsilon 2 --delta 1e-5 --out runs/tuned

    The number of trials is drawn before the first one and stays secret: losing trials are deleted as they lose. With
    --rule pay-for-each every setting is run once, kept, and paid for.
    """
    budget = proper_budget(epsilon, delta)
    within("--jobs", jobs, 1, 10_000)
    chosen = _settings(settings)
    _must_be_a_folder(out)
    from hush import tuning
    from hush.ledger import Ledger

    with ExitStack() as opened:
        book: Path | Ledger | None = ledger
        if ledger is not None:
            must_be_or_become_a_file("--ledger", ledger)
            book = opened.enter_context(Ledger(ledger)) if ledger.exists() else ledger
        progress = opened.enter_context(_bar())
        try:
            tuned = tuning.tune(
                OwnTrials(what),
                chosen,
                budget=budget,
                rule=rule,
                mean=mean,
                shape=shape,
                folder=out,
                ledger=book,
                create_ledger=not resume,
                resume=resume,
                jobs=jobs,
                progress=progress,
            )
        except KeyboardInterrupt:
            raise Stopped("stopped; what was charged stays charged; go on with --resume") from None
    _print(tuned, as_json)


@dataclass(frozen=True)
class OwnTrials:
    """The function that `path/to/script.py:function` names, importable from any process."""

    named: str

    def __call__(self, settings: Any) -> "Trial":
        from hush.tuning import Trial

        return load_function(self.named, Trial, settings)


def _settings(file: Path) -> list[dict[str, Any]]:
    try:
        values = tomllib.loads(file.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"--settings must be a TOML file, got {file}: {error}") from None
    found = values.get("settings")
    if set(values) != {"settings"} or not isinstance(found, list) or not found:
        raise ValueError(f"expected [[settings]] tables in {file} and nothing else: one for each setting to try")
    try:
        json.dumps(found)
    except TypeError:
        raise ValueError(f"expected numbers, text, lists and tables in {file}; dates are not supported") from None
    return found


def _must_be_a_folder(out: Path) -> None:
    try:
        with held(out):
            pass
    except OSError as error:
        raise ValueError(f"--out must be a folder, or a new name where one can be made; {out}: {error}") from None


@contextmanager
def _bar() -> Iterator[Any]:
    """How many trials have ended, on standard error; never how many there will be, which is a secret."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("finding the noise", total=None)
        yield lambda done: bar.update(task, description=f"{done} trials have ended")


def _print(tuned: "Tuned", as_json: bool) -> None:
    values = {
        "settings": tuned.settings,
        "score": tuned.score,
        "folder": None if tuned.folder is None else str(tuned.folder),
        "noise_multiplier": tuned.noise_multiplier,
        "epsilon": tuned.epsilon.upper,
        "delta": tuned.delta,
    }
    if as_json:
        print(json.dumps(values))
        return
    if tuned.folder is None:
        print("No trial ended well: nothing is released, and everything was charged.")
    else:
        print(f"the winner, score {tuned.score:g}: {json.dumps(tuned.settings)}\nkept in {tuned.folder}")
    print(f"epsilon {tuned.epsilon} at delta {rounded_up(tuned.delta, 6)} for the whole tuning, the winner included")
