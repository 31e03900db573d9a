"""hush report: the statement of a run as text, JSON and one HTML page."""

import json
from pathlib import Path
from typing import Annotated

import typer

from hush.commands.errors import one_line


def mount(app: typer.Typer) -> None:
    """Add `report` to the application."""
    app.command()(report)


def report(
    run: Annotated[Path, typer.Argument(help="The folder of a run (its --out).")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the statement as one JSON object.")] = False,
) -> None:
    """The privacy statement of a run, ended or not; writes report.txt, report.json and report.html into its folder.

    Example: hush report runs/mnist
    """
    with one_line():
        from hush.report import read_statement, write_report

        if not run.is_dir():
            raise ValueError(f"no folder {run}; give the --out of a run")
        statement = read_statement(run)
        written = write_report(run, statement)
    print(json.dumps(statement.to_dict()) if as_json else f"{statement}\n\npage: {written.html}")
