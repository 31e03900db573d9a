"""What takes a while before the training begins, watched on standard error."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

_SILENT = 15.0  # seconds without a line where there is no terminal


def watched(what: str) -> Callable[[Sequence[Any]], Iterable[Any]]:
    """Goes through things one by one: with a bar on a terminal, elsewhere with a line now and then.

    >>> list(watched("counting")([1, 2, 3]))
    [1, 2, 3]
    """
    return lambda things: _with_a_bar(things, what) if sys.stderr.isatty() else _with_lines(things, what)


def _with_a_bar(things: Sequence[Any], what: str) -> Iterable[Any]:
    from rich.console import Console
    from rich.progress import track

    return track(things, description=what, console=Console(stderr=True), transient=True)


def _with_lines(things: Sequence[Any], what: str) -> Iterator[Any]:
    said = time.monotonic()
    for done, thing in enumerate(things):
        if time.monotonic() - said > _SILENT:
            said = time.monotonic()
            print(f"{what}: {done / len(things):.0%}", file=sys.stderr)
        yield thing
