"""What a tuning keeps on disk while it runs: what was drawn before the first trial, and the best trial so far.

How many trials were drawn is as secret as the losing results: whoever knows it knows more than the charge pays for.
The file is its owner's, and once the tuning has ended the number and the order are gone from it.
"""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FILE, LOCK, FORMAT = "tuning.json", "tuning.lock", 1


@dataclass
class State:
    """One tuning. `asked` is what must be the same when it is resumed; `order` has the setting of every trial."""

    asked: dict[str, Any]
    account: str
    noise: list[float]
    event: dict[str, Any]
    epsilon: float
    order: list[int]
    done: list[int] = field(default_factory=list)
    best: dict[str, Any] | None = None  # {"trial", "setting", "score"}
    ended: bool = False
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        """Whole or not at all, and on the disk when this returns."""
        partial = folder / (FILE + ".part")
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(asdict(self), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, folder / FILE)
        directory = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def read(folder: Path) -> State | None:
    """The tuning in this folder; None where none was begun."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        values: Mapping[str, Any] = json.loads(path.read_text())
        if values["format"] != FORMAT:
            raise ValueError("another format")
        return State(**values)
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"{path} cannot be read as a tuning's state: restore it, or tune in another folder") from None


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Only one process tunes in a folder."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(folder / LOCK, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"another process is tuning in {folder}: wait for it, or choose another folder") from None
        yield
