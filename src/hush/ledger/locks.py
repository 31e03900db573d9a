"""Locks between processes, on an open file: nobody else reads while one writes.

flock, because it belongs to the opening of the file and not to the process: closing another descriptor of the same
file, as every copy, upload or second opening in the process does, drops POSIX record locks and leaves these alone.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hush.ledger.errors import LedgerUnwritable

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

WAIT_SECONDS = 60.0
_USE_LOCAL = "keep the ledger on a disk of this machine, or on a share whose locks work"
# Options of shared file systems with which one machine's locks do not stop another machine.
_ALONE = {"nolock", "nobrl", "local_lock=all", "local_lock=flock"}
_NEVER_SHARED = {"fuse.sshfs"}


@contextmanager
def held(descriptor: int, path: Path, *, alone: bool) -> Iterator[None]:
    """The lock on the open file, for this opening of it alone or shared with other readers."""
    if fcntl is None:
        raise LedgerUnwritable(
            "a system with flock (Linux, macOS)", os.name, "run there; no ledger works without locks"
        )
    _wait(descriptor, path, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
    try:
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def require_working(descriptor: int, path: Path) -> None:
    """Refuse a file system whose locks exclude nobody. The lock on `descriptor` is held alone by the caller."""
    second = os.open(path, os.O_RDONLY)
    try:
        if not os.path.samestat(os.fstat(second), os.fstat(descriptor)):
            return  # replaced a moment ago: the next charge finds out
        fcntl.flock(second, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _require_shared(os.fstat(descriptor).st_dev, path)
    finally:
        os.close(second)
    raise LedgerUnwritable(f"locks that work for {path}", "a lock given to two at once", _USE_LOCAL)


def _require_shared(device: int, path: Path, mounts: str = "/proc/self/mountinfo") -> None:
    """Refuse a share that keeps locks on this machine; where the system lists no mounts there is nothing to see."""
    try:
        with open(mounts, encoding="utf-8", errors="replace") as file:
            lines = file.readlines()
    except OSError:
        return
    for line in lines:
        own, _, kind = line.partition(" - ")
        if own.split()[2:3] != [f"{os.major(device)}:{os.minor(device)}"]:
            continue
        words = kind.split()
        options = {option for group in words[2:] for option in group.split(",")} & _ALONE
        if options or words[0] in _NEVER_SHARED:
            raise LedgerUnwritable(
                f"locks on {path} that other machines see",
                f"a share that keeps them on this machine ({', '.join([words[0], *sorted(options)])})",
                _USE_LOCAL,
            )


def _wait(descriptor: int, path: Path, kind: int) -> None:
    until, pause = time.monotonic() + WAIT_SECONDS, 0.0005
    while True:
        try:
            return fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise LedgerUnwritable(
                    f"a turn at {path} within {WAIT_SECONDS:.0f} s",
                    "a lock that is not given back",
                    "end the process that holds it",
                ) from None
        except OSError as error:  # a file system without locks
            raise LedgerUnwritable(f"locks that work for {path}", error.strerror or str(error), _USE_LOCAL) from error
        time.sleep(pause)
        pause = min(2 * pause, 0.02)
