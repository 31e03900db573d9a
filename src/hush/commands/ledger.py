"""hush ledger: make a ledger, look at it, check it, close or link what needs a person's word. Imports no torch."""

import json
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import typer

from hush.accounting.bounds import Bounds, rounded_up
from hush.commands.ranges import count, path, proper_budget, proper_delta
from hush.ledger import AccountRecord, BudgetExhausted, Head, Ledger, LedgerError
from hush.ledger.plain import plain

app = typer.Typer(name="ledger", no_args_is_help=True, help="The durable account of a dataset.")

File = Annotated[Path, typer.Argument(parser=path, metavar="FILE", help="The ledger's file.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def mount(application: typer.Typer) -> None:
    """Add `ledger` with its commands to the application."""
    application.add_typer(app)


@app.command("open")
def open_(
    file: File,
    epsilon: Annotated[float | None, typer.Option(help="Cap over all runs.")] = None,
    delta: Annotated[float | None, typer.Option(help="Cap over all runs.")] = None,
    rule: Annotated[str, typer.Option(help="slices, renyi or odometer; fixed from here on.")] = "slices",
    as_json: Json = False,
) -> None:
    """Make a ledger, with or without a cap.

    Example: hush ledger open patients.hush --epsilon 3 --delta 1e-6
    """
    if (epsilon is None) != (delta is None):
        raise LedgerError("--epsilon and --delta together", "one of them", "give both, or none for no cap")
    if file.exists() or file.is_symlink():
        raise LedgerError("a file that does not exist yet", str(file), "look at it with: hush ledger show")
    budget = None if epsilon is None or delta is None else proper_budget(epsilon, delta)
    with Ledger(file, budget=budget, rule=rule) as ledger:  # type: ignore[arg-type]  # checked there
        _print(_summary(ledger, None), as_json)


@app.command()
def show(
    file: File,
    delta: Annotated[
        float | None, typer.Option(help="Delta of the printed epsilon; the cap's, or the accounts' together.")
    ] = None,
    as_json: Json = False,
) -> None:
    """What was spent, by which runs, and what the cap leaves.

    Example: hush ledger show patients.hush --delta 1e-6
    """
    with _existing(file) as ledger:
        if delta is None:
            delta = _usual_delta(ledger)
        _print(_summary(ledger, None if delta is None else proper_delta(delta)), as_json)


@app.command()
def check(
    file: File,
    checkpoint: Annotated[
        Path | None, typer.Option(parser=path, metavar="FOLDER", help="A checkpoint that has seen this ledger.")
    ] = None,
    head: Annotated[str | None, typer.Option(help="SEQUENCE:HASH as a report states it.")] = None,
    as_json: Json = False,
) -> None:
    """Check the chain of entries, and that it holds what a checkpoint or a report has seen.

    Example: hush ledger check patients.hush --checkpoint runs/mine/checkpoint
    """
    with _existing(file) as ledger:
        seen = [] if head is None else [_parse(head)]
        if checkpoint is not None:
            seen.append(_seen_by(checkpoint))
        for one in seen:
            ledger.must_include(one)
        _print({"intact": True, "head": ledger.head().to_dict(), "witnesses": len(seen)}, as_json)


@app.command()
def close(
    file: File, account: Annotated[str, typer.Argument(help="The account's name.")], as_json: Json = False
) -> None:
    """Close an account whose run is gone; all units on record stay spent.

    Example: hush ledger close patients.hush "mine 2026-01-31T12:00:00-1f2e3d4c"
    """
    with _existing(file) as ledger:
        ledger.close_account(account)
        _print(_summary(ledger, None), as_json)


@app.command()
def link(
    file: File,
    refusal: Annotated[
        int, typer.Argument(parser=count, metavar="NUMBER", help="The number that the refused run has named.")
    ],
    reason: Annotated[str, typer.Option(help="Why this is the same people's data, for the record.")],
    as_json: Json = False,
) -> None:
    """Let data that grew or changed share this ledger; the refused run has named the number.

    Example: hush ledger link patients.hush 17 --reason 'January added'
    """
    with _existing(file) as ledger:
        ledger.link(refusal=refusal, reason=reason)
        _print({"linked": refusal, "reason": reason}, as_json)


def _existing(file: Path) -> Ledger:
    if not file.exists():
        raise LedgerError("a ledger", f"no file {file}", f"make it first: hush ledger open {file}")
    if not file.is_file():  # a device or a pipe would be read for ever
        raise LedgerError("a ledger", f"{file}, which is no file", "give the ledger's file")
    return Ledger(file)


def _usual_delta(ledger: Ledger) -> float | None:
    """The cap's; without one the sum over the accounts, at which slices add up; None where nothing is known of it."""
    if ledger.budget is not None:
        return ledger.budget.delta
    declared = sum(Decimal(repr(record.budget.delta)) for record in ledger.accounts() if record.budget is not None)
    return float(declared) if 0 < declared < 1 else None


def _summary(ledger: Ledger, delta: float | None) -> dict[str, Any]:
    cap = ledger.budget
    summary: dict[str, Any] = {
        "ledger": str(ledger.path),
        "rule": ledger.rule_name,
        "cap": None if cap is None else {"epsilon": cap.epsilon, "delta": cap.delta},
        "accounts": [_account(record) for record in ledger.accounts()],
        "head": ledger.head().to_dict(),
    }
    if delta is not None:
        bounds = ledger.spent(delta=delta)
        summary["spent"] = {"epsilon": bounds.upper, "epsilon_lower": bounds.lower, "delta": delta}
    try:
        left = ledger.remaining()
    except BudgetExhausted:
        summary["left"] = {"epsilon": 0.0, "delta": 0.0}
    else:
        if left is not None:
            summary["left"] = {"epsilon": left.epsilon, "delta": left.delta}
    return summary


def _account(record: AccountRecord) -> dict[str, Any]:
    budget = record.budget
    return {
        "name": record.name,
        "opened_at": record.opened_at,
        "closed": record.closed,
        "units": record.total,
        "units_spent": record.spent,
        "epsilon": None if budget is None else budget.epsilon,
        "delta": None if budget is None else budget.delta,
        "data_known": record.data is not None,
    }


def _seen_by(folder: Path) -> Head:
    from hush.ledger import checkpoints

    found = checkpoints.load(folder).seen
    if found is None:
        raise LedgerError("a checkpoint of a run with a ledger", "one without", "give another checkpoint")
    return found


def _parse(head: str) -> Head:
    sequence, _, digest = head.partition(":")
    if not (sequence.isdecimal() and len(sequence) < 20 and len(digest) == 64):
        raise ValueError(f"--head must be SEQUENCE:HASH, as a report states it, got {head[:100]!r}")
    return Head.from_dict({"sequence": int(sequence), "hash": digest})


def _print(summary: dict[str, Any], as_json: bool) -> None:
    print(json.dumps(summary) if as_json else "\n".join(_line(key, value) for key, value in summary.items()))


def _line(key: str, value: Any) -> str:
    match key, value:
        case "accounts", rows:
            return "\n".join([f"accounts: {len(rows)}", *(f"  {_row(row)}" for row in rows)])
        case "spent", {"epsilon": upper, "epsilon_lower": lower, "delta": delta}:
            return f"spent: epsilon {Bounds(lower, upper)} at delta {rounded_up(delta, 6)}"
        case _, {"epsilon": epsilon, "delta": delta}:
            return f"{key}: epsilon {epsilon:.15g} at delta {delta:.15g}"
        case _, {"sequence": sequence, "hash": digest}:
            return f"{key}: {sequence}:{digest}"  # as check --head takes it
    return f"{key}: {'none' if value is None else plain(value)}"


def _row(row: dict[str, Any]) -> str:
    state = "closed" if row["closed"] else "open"
    declared = "" if row["epsilon"] is None else f", epsilon {row['epsilon']:g} at delta {row['delta']:g}"
    return f"{plain(row['name'])}: {row['units_spent']} of {row['units']} units, {state}{declared}"
