"""What the library refuses is a user's matter: the application prints it in one line, without a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def one_line() -> Iterator[None]:
    """Turn refusals of the ledger, of checkpoints and of data files into what the application prints."""
    from hush.ledger import LedgerError
    from hush.ledger.checkpoints import CheckpointError
    from hush.recipes.data import DataError

    try:
        yield
    except (LedgerError, CheckpointError, DataError, TypeError, RuntimeError) as error:
        raise ValueError(str(error)) from error
