"""The file of a ledger: one SQLite database (WAL, full sync) that holds the chain, and a witness file beside it.

A transaction returns only when its entry is durable. The witness (`<ledger>-head`) is written after that, so it can
lag behind the ledger but never run ahead: a ledger that is behind its witness has lost entries.
"""

import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hush.ledger import witness
from hush.ledger.books import Books
from hush.ledger.chain import Entry, Head, write
from hush.ledger.errors import LedgerDamaged, LedgerError, LedgerUnwritable

_TABLES = {
    "entries": "CREATE TABLE entries (sequence INTEGER PRIMARY KEY, body TEXT NOT NULL, hash TEXT NOT NULL)",
    "head": "CREATE TABLE head (sequence INTEGER NOT NULL, hash TEXT NOT NULL)",
}
_APPLICATION = 0x68757368  # "hush", in the header of the file
_WAIT_SECONDS = 60.0
_DO_RESTORE = "restore the file from a copy; do not train on this data until its balance is known"
_FULL = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR}
_NO_ACCESS = {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH}
_BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL}


class Store:
    """An open ledger file and the books it adds up to; every transaction first reads what other processes wrote."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.books = Books()
        self._pid = os.getpid()
        _must_be_database(path)
        with _said_clearly(path):
            self._connection = _connect(path)
            try:
                self._must_be_ledger()
                with self._begun("BEGIN"):  # one snapshot: entries and head of the same moment
                    self._read_on()
                witness.check(path, self.books.head, self.hash_at)
            except BaseException:
                self._connection.close()
                raise

    def append(self, decide: Callable[[Books], Mapping[str, Any] | None]) -> Entry | None:
        """Record the fact that `decide` returns on the newest books, durably; None records nothing."""
        self.own_process()
        with _said_clearly(self.path):
            with self._begun("BEGIN IMMEDIATE"):
                self._read_on()
                fact = decide(self.books)
                if fact is None:
                    return None
                entry = write(fact, after=self.books.head)
                books = self.books.copy()
                books.apply(entry)  # before the commit: an entry that makes no sense must never reach the file
                row = (entry.sequence, entry.body, entry.hash)
                self._connection.execute("INSERT INTO entries VALUES (?, ?, ?)", row)
                self._connection.execute("UPDATE head SET sequence = ?, hash = ?", (entry.sequence, entry.hash))
            self.books = books  # after the commit: the books never know more than the disk
            witness.advance(self.path, entry.head)
        return entry

    def refresh(self) -> Books:
        """The books with everything that other processes have written since."""
        self.own_process()
        with _said_clearly(self.path), self._begun("BEGIN"):
            self._read_on()
        return self.books

    def hash_at(self, sequence: int) -> str | None:
        """The hash of one entry, None where there is no such entry."""
        self.own_process()
        with _said_clearly(self.path):
            row = self._connection.execute("SELECT hash FROM entries WHERE sequence = ?", (sequence,)).fetchone()
        return None if row is None else row[0]

    def entries(self) -> list[Entry]:
        self.own_process()
        with _said_clearly(self.path):
            rows = self._connection.execute("SELECT sequence, body, hash FROM entries ORDER BY sequence").fetchall()
        return [Entry(*row) for row in rows]

    def own_process(self) -> None:
        if os.getpid() != self._pid:
            raise LedgerError(
                "the process that opened the ledger", "a forked copy of it", "open the ledger again in the new process"
            )

    def close(self) -> None:
        if os.getpid() == self._pid:  # a forked copy must not touch the locks of its parent
            with suppress(sqlite3.Error):
                self._connection.close()

    def _read_on(self) -> None:
        """Apply the entries after the books' head, and hold the result against the stored head."""
        known = self.books.head
        rows = self._connection.execute(
            "SELECT sequence, body, hash FROM entries WHERE sequence >= ? ORDER BY sequence", (known.sequence,)
        ).fetchall()
        if known.sequence:
            if not rows or rows[0][0] != known.sequence or rows[0][2] != known.hash:
                raise LedgerDamaged(f"entry {known.sequence} still to be there", "a file that lost it", _DO_RESTORE)
            rows = rows[1:]
        for row in rows:
            self.books.apply(Entry(*row))
        heads = self._connection.execute("SELECT sequence, hash FROM head").fetchall()
        if heads != [(self.books.head.sequence, self.books.head.hash)] or self.books.head.sequence < 1:
            raise LedgerDamaged(
                "as many entries as the stored head says", "a file with entries missing or added", _DO_RESTORE
            )

    def _must_be_ledger(self) -> None:
        ask = self._connection.execute
        schema = dict(ask("SELECT name, sql FROM sqlite_master").fetchall())
        if ask("PRAGMA application_id").fetchone()[0] != _APPLICATION or schema != _TABLES:
            raise LedgerDamaged(f"{self.path} to be a hush ledger", "another or an altered database", _DO_RESTORE)
        if ask("PRAGMA quick_check(1)").fetchone()[0] != "ok":
            raise LedgerDamaged("an intact database", "pages that contradict one another", _DO_RESTORE)

    @contextmanager
    def _begun(self, begin: str) -> Iterator[None]:
        self._connection.execute(begin)
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")
            raise


def create(path: Path, fact: Mapping[str, Any]) -> None:
    """Make the file with its first entry, whole or not at all; a file made by another process meanwhile is kept."""
    with _said_clearly(path), witness.locked(path):
        if path.exists():
            return
        witness.must_be_new(path)
        fresh = path.with_name(f"{path.name}.new-{os.getpid()}")
        try:
            _write_first(fresh, fact)
            os.rename(fresh, path)
            _sync_folder(path.parent)
        finally:
            for leftover in (fresh, _beside(fresh, "-wal"), _beside(fresh, "-shm")):
                leftover.unlink(missing_ok=True)


def _write_first(path: Path, fact: Mapping[str, Any]) -> None:
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))  # the salt is in it: its owner's eyes only
    connection = _connect(path)
    try:
        entry = write(fact, after=Head(0, "0" * 64))
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(f"PRAGMA application_id = {_APPLICATION}")
        for table in _TABLES.values():
            connection.execute(table)
        connection.execute("INSERT INTO entries VALUES (?, ?, ?)", (entry.sequence, entry.body, entry.hash))
        connection.execute("INSERT INTO head VALUES (?, ?)", (entry.sequence, entry.hash))
        connection.execute("COMMIT")
    finally:
        connection.close()  # moves the journal into the file
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _connect(path: Path) -> sqlite3.Connection:
    uri = path.absolute().as_uri() + "?mode=rw"  # never creates: an empty ledger would be a fresh budget
    connection = sqlite3.connect(
        uri, uri=True, isolation_level=None, timeout=_WAIT_SECONDS, check_same_thread=False, cached_statements=16
    )
    try:
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA cell_size_check = ON")
        connection.execute("PRAGMA fullfsync = ON")  # macOS: through the disk's own cache
        connection.execute("PRAGMA synchronous = FULL")
        mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            raise LedgerUnwritable(
                "a file system with shared memory for SQLite's journal", f"journal mode {mode}", "use a local disk"
            )
    except BaseException:
        connection.close()
        raise
    return connection


def _must_be_database(path: Path) -> None:
    """SQLite takes an empty file for a new database: here it is a ledger that lost everything."""
    with _said_clearly(path), open(path, "rb") as file:
        start = file.read(16)
    if start != b"SQLite format 3\0":
        came = "an empty file" if not start else "something else"
        raise LedgerDamaged(f"{path} to be a hush ledger", came, _DO_RESTORE)


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _said_clearly(path: Path) -> Iterator[None]:
    """What the disk and SQLite refuse, in the words of the ledger."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", None)
        primary = code & 0xFF if code is not None else None
        if primary in _FULL:
            raise LedgerUnwritable(
                f"room and a sound disk for {path}", str(error), "free some space; nothing was released"
            ) from error
        if primary in _NO_ACCESS:
            raise LedgerUnwritable(
                f"{path} and its folder to be writable", str(error), "change the permissions or copy it elsewhere"
            ) from error
        if primary in _BUSY:
            raise LedgerUnwritable(
                f"a turn at {path} within {_WAIT_SECONDS:.0f} s", str(error), "end the process that holds the lock"
            ) from error
        raise LedgerDamaged(f"{path} to be an intact hush ledger", str(error), _DO_RESTORE) from error
    except UnicodeError as error:  # Python could not even read SQLite's complaint, which quotes the damage
        raise LedgerDamaged(f"{path} to be an intact hush ledger", "bytes that are no text", _DO_RESTORE) from error
    except OSError as error:
        raise LedgerUnwritable(
            f"{path} and its folder to be readable and writable",
            error.strerror or str(error),
            "mend that and try again",
        ) from error
