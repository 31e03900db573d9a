"""TensorBoard event files, as an option: the history of a run, written as it happens."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hush.ledger import owned


class Scribe:
    """Writes the numbers of a history entry to a writer; without one, nothing."""

    def __init__(self, writer: Any = None) -> None:
        self._writer = writer
        self._began = time.time() // 60 * 60  # one time for all entries: how long an epoch took is not ours to tell

    def write(self, entry: Mapping[str, Any]) -> None:
        """One entry; what was not measured in it is left out."""
        if self._writer is None:
            return
        for name, value in entry.items():
            if name not in ("step", "epoch") and isinstance(value, int | float):
                self._writer.add_scalar(name, value, entry["step"], walltime=self._began)


def require_tensorboard(folder: Path | None) -> Any:
    """The class that writes event files; a clear refusal, before anything is charged, where it cannot."""
    if folder is None:
        raise ValueError("tensorboard needs a folder to write into: give out=FOLDER (--out FOLDER)")
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError("tensorboard is not installed: pip install 'hush[tensorboard]', or leave it out") from None
    return SummaryWriter


@contextmanager
def open_scribe(folder: Path | None, wanted: bool) -> Iterator[Scribe]:
    """A scribe into FOLDER/tensorboard if one is wanted; its files are closed at the end."""
    if not wanted:
        yield Scribe()
        return
    assert folder is not None
    owned.make_folder(folder / "tensorboard")
    writer = require_tensorboard(folder)(f"{folder}/tensorboard")
    try:
        yield Scribe(writer)
    finally:
        writer.close()
