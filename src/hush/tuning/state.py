"""What a tuning keeps on disk while it runs: what was drawn before the first trial, and the best trial so far.

How many trials were drawn is as secret as the losing results: whoever knows it knows more than the charge pays for.
The file is its owner's, and once the tuning has ended the number and the order are gone from it.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hush.ledger.owned import sync, write_whole

FILE, FORMAT = "tuning.json", 1


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
        """Whole or not at all, for its owner alone, and on the disk when this returns."""
        write_whole(folder / FILE, json.dumps(asdict(self)).encode(), durable=True)
        sync(folder)


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
