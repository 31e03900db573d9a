"""The witness beside a ledger: the last head it has shown, so that a lost journal or an old copy is noticed.

It is no second ledger: whoever can write the one can write the other. It catches what happens by accident, such as a
deleted `-wal` file, a restored backup, or a ledger that was removed to be made anew.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hush.ledger.chain import Head
from hush.ledger.errors import LedgerDamaged, LedgerRolledBack

_MARK = "hush-head-1"
_LENGTH = len(f"{_MARK} {0:020d} {'0' * 64}\n")


def check(path: Path, head: Head, hash_at: Callable[[int], str | None]) -> None:
    """Refuse a ledger that lacks the entry its witness has seen; a missing or empty witness says nothing."""
    seen = _read(path)
    if seen is not None:
        must_hold(path, seen, head, hash_at, who="its witness file")


def must_hold(path: Path, seen: Head, head: Head, hash_at: Callable[[int], str | None], *, who: str) -> None:
    """Refuse a ledger in whose chain a head that was seen before does not occur."""
    if hash_at(seen.sequence) != seen.hash:
        raise LedgerRolledBack(
            f"entry {seen.sequence}, which {who} has seen, in {path}",
            f"a file with {head.sequence} entries that is older or another one",
            "put back the newest copy; an older one does not know all that was spent",
        )


def advance(path: Path, head: Head) -> None:
    """Move the witness to a head that is durable in the ledger; it never moves back."""
    with locked(path) as descriptor:
        seen = _parse(os.pread(descriptor, _LENGTH + 1, 0), path)
        if seen is None or seen.sequence < head.sequence:
            os.pwrite(descriptor, f"{_MARK} {head.sequence:020d} {head.hash}\n".encode(), 0)


def must_be_new(path: Path) -> None:
    """Refuse to begin a ledger where the traces of an older one lie."""
    journal = path.with_name(path.name + "-wal")
    if journal.exists() or _read(path) is not None:
        raise LedgerRolledBack(
            f"no traces of an older ledger beside {path}",
            f"{journal.name if journal.exists() else _file(path).name} without its ledger",
            "put the ledger back; or remove these files too, knowing that what was spent is then forgotten",
        )


@contextmanager
def locked(path: Path) -> Iterator[int]:
    """The witness file, held alone."""
    descriptor = os.open(_file(path), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            import fcntl
        except ImportError:  # Windows: a race can then leave the witness one entry behind, never ahead
            pass
        else:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def _file(path: Path) -> Path:
    return path.with_name(path.name + "-head")


def _read(path: Path) -> Head | None:
    try:
        raw = _file(path).read_bytes()
    except FileNotFoundError:
        return None
    return _parse(raw, path)


def _parse(raw: bytes, path: Path) -> Head | None:
    if not raw:
        return None
    words = raw.decode("ascii", "replace").split(" ")
    if len(raw) == _LENGTH and len(words) == 3 and words[0] == _MARK and words[1].isdecimal() and words[2][-1] == "\n":
        return Head(int(words[1]), words[2][:64])
    raise LedgerDamaged(
        f"{_file(path).name} to hold the last head seen",
        "something else",
        "restore it; or remove it, if you are sure that the ledger is the newest copy",
    )
