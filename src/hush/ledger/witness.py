"""The witness beside a ledger: the last head it has shown, so that an older copy in its place is noticed.

It is no second ledger and holds no charge: whoever can write the one can write the other. It catches what happens by
accident, such as a restored backup, or a ledger that was removed to be made anew.
"""

import os
from collections.abc import Callable
from pathlib import Path

from hush.ledger import file_format, locks
from hush.ledger.chain import Head, is_digest
from hush.ledger.errors import LedgerDamaged, LedgerRolledBack

ENDING = "-head"
_MARK = b"hush witness 2 "
_BEGIN = len(_MARK) + 65  # the mark, which ledger it is, and two heads in turn: a write that is torn spares the other
_LENGTH = _BEGIN + 2 * file_format.HEAD_LENGTH


def check(path: Path, ledger: str, head: Head, hash_at: Callable[[int], str | None]) -> None:
    """Refuse a ledger that lacks the entry its witness has seen; a missing or empty witness says nothing.

    `ledger` is the hash of the first entry, by which a ledger is known whatever its place.
    """
    seen = _read(path)
    if seen is None:
        return
    if seen[0] != ledger:
        raise LedgerRolledBack(
            f"{path} to be the ledger that {_file(path).name} beside it belongs to",
            "another ledger",
            f"put the right one back; or remove {_file(path).name}, if this one was moved here on purpose",
        )
    must_hold(path, seen[1], head, hash_at, who="its witness file")


def must_hold(path: Path, seen: Head, head: Head, hash_at: Callable[[int], str | None], *, who: str) -> None:
    """Refuse a ledger in whose chain a head that was seen before does not occur."""
    if hash_at(seen.sequence) != seen.hash:
        raise LedgerRolledBack(
            f"entry {seen.sequence}, which {who} has seen, in {path}",
            f"a file with {head.sequence} entries that is older or another one",
            "put back the newest copy; an older one does not know all that was spent",
        )


def advance(path: Path, ledger: str, head: Head) -> None:
    """Move the witness to a head that is durable in the ledger; it never moves back, nor to another ledger."""
    descriptor = _writable(path)
    try:
        with locks.held(descriptor, _file(path), alone=True):
            raw = os.pread(descriptor, _LENGTH + 1, 0)
            seen, line = _parse(raw, path), file_format.head_line(head)
            if seen is None:
                os.pwrite(descriptor, _MARK + ledger.encode("ascii") + b"\n" + 2 * line, 0)
            elif seen[0] == ledger and seen[1].sequence < head.sequence:
                newest = file_format.head_line(seen[1])
                spare = 1 if raw[_BEGIN : _BEGIN + len(newest)] == newest else 0
                os.pwrite(descriptor, line, _BEGIN + spare * len(line))
    finally:
        os.close(descriptor)


def must_be_writable(path: Path) -> None:
    """An OSError where the witness could not be moved, before anything is charged."""
    os.close(_writable(path))


def must_be_new(path: Path) -> None:
    """Refuse to begin a ledger where the trace of an older one lies."""
    if _read(path) is not None:
        raise LedgerRolledBack(
            f"no trace of an older ledger beside {path}",
            f"{_file(path).name} without its ledger",
            "put the ledger back; or remove this file too, knowing that what was spent is then forgotten",
        )


def _writable(path: Path) -> int:
    return os.open(_file(path), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)


def _file(path: Path) -> Path:
    return path.with_name(path.name + ENDING)


def _read(path: Path) -> tuple[str, Head] | None:
    try:
        descriptor = os.open(_file(path), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        return _parse(os.pread(descriptor, _LENGTH + 1, 0), path)
    finally:
        os.close(descriptor)


def _parse(raw: bytes, path: Path) -> tuple[str, Head] | None:
    if not raw:
        return None
    ledger = raw[len(_MARK) : _BEGIN - 1].decode("ascii", "replace")
    found = [raw[at : at + file_format.HEAD_LENGTH] for at in (_BEGIN, _BEGIN + file_format.HEAD_LENGTH)]
    heads = [head for head in map(file_format.parsed_head, found) if head is not None]
    if len(raw) == _LENGTH and raw.startswith(_MARK) and is_digest(ledger) and heads:
        return ledger, max(heads)
    raise LedgerDamaged(
        f"{_file(path).name} to hold the last head seen",
        "something else",
        "restore it; or remove it, if you are sure that the ledger is the newest copy",
    )
