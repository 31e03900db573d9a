"""hush report: the statement of a run as text, JSON and one HTML page."""

import json
import warnings
from pathlib import Path
from typing import Annotated

import typer

from hush.commands.ranges import path
from hush.ledger.plain import plain


def mount(app: typer.Typer) -> None:
    """Add `report` to the application."""
    app.command()(report)


def report(
    run: Annotated[Path, typer.Argument(parser=path, metavar="FOLDER", help="The folder of a run (its --out).")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the statement as one JSON object.")] = False,
) -> None:
    """The privacy statement of a run, ended or not; writes report.txt, report.json and report.html into its folder.

    Example: hush report runs/mnist
    """
    if not run.is_dir():
        raise ValueError(f"no folder {run}; give the --out of a run")
    from hush.report import read_statement, write_report

    statement = read_statement(run)
    print(json.dumps(statement.to_dict()) if as_json else statement)
    try:
        written = write_report(run, statement)
    except (OSError, ValueError) as error:
        warnings.warn(f"the report was not written: {error}", UserWarning, stacklevel=1)
        return
    if not as_json:
        print(f"\npage: {plain(written.html)}")
