"""A run's folder -> its statement, from the last checkpoint and the ledger as it is now."""

from pathlib import Path

from hush.ledger import Ledger, checkpoints
from hush.ledger.checkpoints import CheckpointError
from hush.report.statement import Statement, statement_of

OWN_LEDGER = "ledger.hush"


def read_statement(folder: Path) -> Statement:
    """The statement of a run, ended or not; a ledger that was rolled back behind the checkpoint is refused."""
    saved = checkpoints.load(folder / "checkpoint")
    try:
        account = saved.facts["account"]
        path = folder / OWN_LEDGER if account["own_ledger"] else Path(account["ledger"] or "")
        if account["ledger"] is None or not path.is_file():
            return statement_of(saved.facts)
        with Ledger(path, seen=saved.seen) as ledger:
            return statement_of(saved.facts, ledger=ledger)
    except (KeyError, IndexError, TypeError, AttributeError, AssertionError) as error:
        raise CheckpointError(
            f"the facts of a run in {folder}", f"others ({type(error).__name__}: {error})", "use the hush that wrote it"
        ) from error
