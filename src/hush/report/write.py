"""Report files in a run's folder: report.txt, report.json, report.html."""

import json
from dataclasses import dataclass
from pathlib import Path

from hush.ledger import owned
from hush.report.page import page_of
from hush.report.statement import Statement


@dataclass(frozen=True)
class Report:
    """Where the three forms of a report lie."""

    text: Path
    json: Path
    html: Path


def write_report(folder: Path, statement: Statement) -> Report:
    """Write all three, each whole or not at all, for their owner alone; `chmod` shares them, and stays."""
    owned.make_folder(folder)
    report = Report(folder / "report.txt", folder / "report.json", folder / "report.html")
    owned.write_whole(report.text, f"{statement}\n".encode())
    owned.write_whole(report.json, (json.dumps(statement.to_dict(), indent=1) + "\n").encode())
    owned.write_whole(report.html, page_of(statement).encode())
    return report
