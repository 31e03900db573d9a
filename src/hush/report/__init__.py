"""The privacy statement of a run: text, JSON, and one HTML page that needs nothing else."""

from hush.report.about import About
from hush.report.runs import read_statement
from hush.report.statement import Statement, statement_of
from hush.report.write import Report, write_report

__all__ = ["About", "Report", "Statement", "read_statement", "statement_of", "write_report"]
