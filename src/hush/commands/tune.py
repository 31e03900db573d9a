"""hush tune: many settings of a person's own training, one charge for all of them."""

import json
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hush.accounting import Budget
from hush.commands.errors import one_line
from hush.commands.own_job import load_function

if TYPE_CHECKING:
    from hush.tuning import Trial, Tuned


def mount(app: typer.Typer) -> None:
    """Add `tune` to the application."""
    app.command()(tune)


def tune(
    what: Annotated[str, typer.Argument(help="path/to/script.py:function: settings -> hush.tuning.Trial.")],
    settings: Annotated[Path, typer.Option(help="TOML file: one [[settings]] table for each setting.")],
    epsilon: Annotated[float, typer.Option(help="Epsilon of the whole tuning, the winner included.")],
    delta: Annotated[float, typer.Option(help="Delta of the whole tuning.")],
    out: Annotated[Path, typer.Option(help="Folder for the winner, and for what --resume needs.")],
    rule: Annotated[
        str,
        typer.Option(help="geometric, logarithmic, negative-binomial, poisson, binomial, or pay-for-each."),
    ] = "geometric",
    mean: Annotated[float | None, typer.Option(help="Mean number of trials; the number of settings.")] = None,
    shape: Annotated[float, typer.Option(help="Shape of negative-binomial; the most trials of binomial.")] = 1.0,
    jobs: Annotated[int, typer.Option(min=1, help="Trials at a time.")] = 1,
    ledger: Annotated[Path | None, typer.Option(help="Ledger of the dataset; made if it does not exist.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the tuning in --out.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Last line: one JSON object.")] = False,
) -> None:
    """Try many settings, release the best trial, and pay for all of it once.

    Example: hush tune my_project/tuning.py:trial --settings settings.toml --epsilon 2 --delta 1e-5 --out runs/tuned

    The number of trials is drawn before the first one and stays secret: losing trials are deleted as they lose. With
    --rule pay-for-each every setting is run once, kept, and paid for.
    """
    with one_line():
        from hush import tuning

        chosen = _settings(settings)
        with _bar() as progress:
            try:
                tuned = tuning.tune(
                    OwnTrials(what),
                    chosen,
                    budget=Budget(epsilon=epsilon, delta=delta),
                    rule=rule,
                    mean=mean,
                    shape=shape,
                    folder=out,
                    ledger=ledger,
                    resume=resume,
                    jobs=jobs,
                    progress=progress,
                )
            except KeyboardInterrupt:
                raise ValueError("stopped; go on with --resume") from None
    _print(tuned, as_json)


@dataclass(frozen=True)
class OwnTrials:
    """The function that `path/to/script.py:function` names, importable from any process."""

    named: str

    def __call__(self, settings: Any) -> "Trial":
        from hush.tuning import Trial

        return load_function(self.named, Trial, settings)


def _settings(path: Path) -> list[dict[str, Any]]:
    try:
        values = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    found = values.get("settings")
    if set(values) != {"settings"} or not isinstance(found, list) or not found:
        raise ValueError(f"expected [[settings]] tables in {path} and nothing else: one for each setting to try")
    try:
        json.dumps(found)
    except TypeError:
        raise ValueError(f"expected numbers, text, lists and tables in {path}; dates are not supported") from None
    return found


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
    print(f"epsilon {tuned.epsilon} at delta {tuned.delta:g} for the whole tuning, the winner included")
