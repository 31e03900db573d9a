"""The statement as text."""

import textwrap
from typing import TYPE_CHECKING

from hush.accounting import rounded_up
from hush.ledger.plain import plain

if TYPE_CHECKING:
    from hush.report.statement import Statement

_WIDTH, _LABEL = 100, 30


def text_of(statement: "Statement") -> str:
    """The whole statement, wrapped for a terminal."""
    lines = [*textwrap.wrap(plain(statement.headline), _WIDTH)]
    for note in statement.facts["notes"]:
        lines += ["", *textwrap.wrap(plain(f"Warning: {note}"), _WIDTH)]
    for title, rows in statement.sections()[:3]:
        lines += ["", title, *(line for label, words in rows for line in _row(label, words))]
    lines += ["", "Accesses that this run charged"]
    for access in statement.accesses:
        lines += _row(f"{access.share:.1%}", f"{access.name}: {access.times} x {access.mechanism}")
    if statement.answers:
        lines += ["", "Accountants side by side"]
    for answer in statement.answers:
        value = "no answer" if answer.epsilon is None else f"epsilon {rounded_up(answer.epsilon)}"
        remark = f" ({answer.why})" if answer.why else " (this statement's)" if answer.chosen else ""
        lines += _row(answer.accountant, value + remark)
    for title, sentences in (("Not covered", statement.not_covered), ("Assumed public", statement.assumed_public)):
        lines += ["", title, *(line for sentence in sentences for line in _item(sentence))]
    for title, rows in statement.sections()[3:]:
        lines += ["", title, *(line for label, words in rows for line in _row(label, words))]
    return "\n".join(lines)


def _row(label: str, words: str) -> list[str]:
    head = f"  {plain(label):<{_LABEL}}"
    return textwrap.wrap(plain(words), _WIDTH, initial_indent=head, subsequent_indent=" " * len(head)) or [head]


def _item(sentence: str) -> list[str]:
    return textwrap.wrap(plain(sentence), _WIDTH, initial_indent="  - ", subsequent_indent="    ")
