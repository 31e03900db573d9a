"""Report files in a run's folder: report.txt, report.json, report.html."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from hush.report.page import page_of
from hush.report.statement import Statement


@dataclass(frozen=True)
class Report:
    """Where the three forms of a report lie."""

    text: Path
    json: Path
    html: Path


def write_report(folder: Path, statement: Statement) -> Report:
    """Write all three, each whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    report = Report(folder / "report.txt", folder / "report.json", folder / "report.html")
    _write(report.text, str(statement) + "\n")
    _write(report.json, json.dumps(statement.to_dict(), indent=1) + "\n")
    _write(report.html, page_of(statement))
    return report


def _write(path: Path, content: str) -> None:
    partial = path.with_name(path.name + ".part")
    partial.write_text(content, encoding="utf-8")
    os.replace(partial, path)
