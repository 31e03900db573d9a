"""The file of a ledger: one append-only text file, which holds everything that was ever charged.

An entry is durable (fsync) before `append` returns, and nothing else ever holds it: a copy made at any moment is a
true ledger. The two heads tell an entry that a power cut tore before it counted (it lies behind the newest head, and is
overwritten) from one that was cut off or changed later (a head has seen it, and the file is refused).
"""

import json
import os
import secrets
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hush.ledger import file_format, locks, witness
from hush.ledger.balances import Balances
from hush.ledger.chain import EMPTY, Entry, Head, digest, write
from hush.ledger.errors import LedgerDamaged, LedgerError, LedgerUnwritable

_DO_RESTORE = "restore the file from a copy; do not train on this data until its balance is known"


class LedgerFile:
    """An open ledger file and what it adds up to; every turn first reads what other processes wrote."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.balances = Balances()
        self._pid = os.getpid()
        self._last, self._end = file_format.BEGIN, file_format.BEGIN  # where the last entry begins, and where it ends
        self._digests = bytearray()
        self._torn = False  # something lies behind the last entry
        with _said_clearly(path):
            self._descriptor, self._writable = _opened(path)
            try:
                with self._turn(alone=self._writable):
                    self._read_on()
                    if self._writable:
                        locks.require_working(self._descriptor, path)
                    self._make_durable()
                    if self._writable and max(self._heads()) < self.balances.head:  # lost by a kill or a power cut
                        with suppress(OSError):  # a full disk: a ledger can still be looked at
                            self._write_head(self.balances.head)
                witness.check(path, self.name, self.balances.head, self.hash_at)
            except BaseException:
                self.close()
                raise

    @property
    def name(self) -> str:
        """The hash of the first entry: which ledger this is, whatever its place."""
        return self._digests[:32].hex()

    def append(self, decide: Callable[[Balances], Mapping[str, Any] | None]) -> Entry | None:
        """Record the fact that `decide` returns on the newest balances, durably; None records nothing."""
        with _said_clearly(self.path), self._turn(alone=True):
            self._must_be_writable()
            self._read_on()
            fact = decide(self.balances)
            if fact is None:
                return None
            entry = write(fact, after=self.balances.head)
            apply = self.balances.judge(json.loads(entry.body))  # what makes no sense must never reach the file
            self._write(entry)
            # Only now: the balances never know more than the disk.
            self._took(entry.hash, apply, len(file_format.line(entry)))
            self._show_head(entry.head)
        return entry

    def refresh(self) -> Balances:
        """The balances with everything that other processes have written since."""
        with _said_clearly(self.path), self._turn(alone=False):
            known = self._end
            self._read_on()
            if self._end != known:
                self._make_durable()
        return self.balances

    def hash_at(self, sequence: int) -> str | None:
        """The hash of one entry, None where there is no such entry."""
        found = self._digests[32 * (sequence - 1) : 32 * sequence] if sequence > 0 else b""
        return found.hex() or None

    def entries(self) -> list[Entry]:
        self.refresh()
        bodies = (line for line, _ in file_format.lines(self._descriptor, file_format.BEGIN, self._end))
        return [Entry(i, body[65:].decode("ascii"), body[:64].decode("ascii")) for i, body in enumerate(bodies, 1)]

    def own_process(self) -> None:
        if os.getpid() != self._pid:
            raise LedgerError(
                "the process that opened the ledger", "a forked copy of it", "open the ledger again in the new process"
            )

    def close(self) -> None:
        """Close the file; what is done with it afterwards is refused. A forked copy closes its own descriptor only."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with suppress(OSError):
                os.close(descriptor)

    @contextmanager
    def _turn(self, *, alone: bool) -> Iterator[None]:
        self.own_process()
        if self._descriptor < 0:
            raise LedgerError("an open ledger", "one that was closed", "open it again: Ledger(path)")
        with locks.held(self._descriptor, self.path, alone=alone):
            yield

    def _must_be_writable(self) -> None:
        if not self._writable:
            raise LedgerUnwritable(f"{self.path} to be writable", "a read-only file", "change its permissions")
        if not self._at_its_path():
            raise LedgerUnwritable(
                f"{self.path} to be the file that was opened",
                "a file that was moved, removed or replaced since",
                "put it back; all that this run was granted is on record in that file, and only there",
            )
        witness.must_be_writable(self.path)

    def _at_its_path(self) -> bool:
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._descriptor))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _read_on(self) -> None:
        """Take in the entries after the last one that is known, and hold the result against the heads."""
        known, size = self.balances.head, os.fstat(self._descriptor).st_size
        if known.sequence and (size < self._end or os.pread(self._descriptor, 64, self._last) != known.hash.encode()):
            raise LedgerDamaged(f"entry {known.sequence} still to be there", "a file that lost it", _DO_RESTORE)
        for line, whole in file_format.lines(self._descriptor, self._end, size):
            body = line[65:]
            if not whole or line[64:65] != b" " or digest(self.balances.head, body).encode() != line[:64]:
                break
            self._took(line[:64].decode(), self._judged(body), len(line) + 1)
        self._torn = size > self._end
        self._must_hold_heads()

    def _make_durable(self) -> None:
        """A process that was killed between write and sync left an entry that a power cut takes; now it is shown."""
        try:
            _sync(self._descriptor)
        except OSError:
            if self._writable:
                raise

    def _judged(self, body: bytes) -> Callable[[], None]:
        try:
            return self.balances.judge(json.loads(body.decode("ascii")))
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
            raise LedgerDamaged(
                f"entry {self.balances.head.sequence + 1} to make sense",
                f"{type(error).__name__}: {str(error)[:200]}",
                "open the file with the version of hush that wrote it, or restore it from a copy",
            ) from None

    def _took(self, hash_: str, apply: Callable[[], None], length: int) -> None:
        apply()
        self.balances.head = Head(self.balances.head.sequence + 1, hash_)
        self._digests += bytes.fromhex(hash_)
        self._last, self._end = self._end, self._end + length

    def _must_hold_heads(self) -> None:
        seen = self._heads()
        if not seen or any(self.hash_at(head.sequence) != head.hash for head in seen):
            raise LedgerDamaged(
                f"an unbroken chain of {max((head.sequence for head in seen), default=1)} entries or more",
                f"a file that breaks off, or was changed, after entry {self.balances.head.sequence}",
                _DO_RESTORE,
            )

    def _heads(self) -> list[Head]:
        raw = [os.pread(self._descriptor, file_format.HEAD_LENGTH, file_format.slot(number)) for number in (0, 1)]
        return [head for head in map(file_format.parsed_head, raw) if head is not None]

    def _write_head(self, head: Head) -> None:
        _write_all(self._descriptor, file_format.head_line(head), file_format.slot(head.sequence % 2))

    def _write(self, entry: Entry) -> None:
        if self._torn:
            os.ftruncate(self._descriptor, self._end)
        try:
            _write_all(self._descriptor, file_format.line(entry), self._end)
            _sync(self._descriptor)
        except OSError:
            with suppress(OSError):  # nobody was granted what could not be written
                os.ftruncate(self._descriptor, self._end)
            raise

    def _show_head(self, head: Head) -> None:
        """Into the file, and into the witness beside it."""
        self._write_head(head)
        if self._at_its_path():  # it was, a moment ago
            witness.advance(self.path, self.name, head)


def create(path: Path, fact: Mapping[str, Any]) -> bool:
    """Make the file with its first entry, whole or not at all; False where another process was faster."""
    with _said_clearly(path):
        try:
            witness.must_be_new(path)
        except LedgerDamaged:
            if os.path.lexists(path):  # another process has made it meanwhile, and charged to it
                return False
            raise
        fresh = path.with_name(f".hush-new-{secrets.token_hex(8)}")
        entry = write(fact, after=EMPTY)
        descriptor = os.open(fresh, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)  # the salt is in it: for its owner
        try:
            _write_all(descriptor, file_format.beginning(entry), 0)
            _sync(descriptor)
            _name_once(fresh, path)
            _sync_folder(path.parent)
        except FileExistsError:
            return False
        finally:
            os.close(descriptor)
            fresh.unlink(missing_ok=True)
    return True


def _name_once(fresh: Path, path: Path) -> None:
    """Give the file its name, unless somebody has taken it."""
    try:
        os.link(fresh, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        if os.path.lexists(path):
            raise FileExistsError(path) from None
        os.rename(fresh, path)


def _opened(path: Path) -> tuple[int, bool]:
    """A descriptor of the ledger, for writing where that is allowed. Nothing is written into what is no ledger."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise LedgerDamaged(f"{path} to be a hush ledger", "something that is no file", "give the ledger's file")
    try:
        descriptor, writable = os.open(path, os.O_RDWR | os.O_NONBLOCK), True
    except OSError:
        descriptor, writable = os.open(path, os.O_RDONLY | os.O_NONBLOCK), False
    start = os.pread(descriptor, len(file_format.MAGIC), 0)
    if start != file_format.MAGIC or os.fstat(descriptor).st_size < file_format.BEGIN:
        os.close(descriptor)
        came = "an empty file" if not start else "something else, or a file that was cut off"
        raise LedgerDamaged(f"{path} to be a hush ledger", came, _DO_RESTORE)
    return descriptor, writable


def _write_all(descriptor: int, data: bytes, at: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, at)
        data, at = data[written:], at + written


def _sync(descriptor: int) -> None:
    if sys.platform == "darwin":  # through the disk's own cache
        import fcntl

        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
    else:
        os.fsync(descriptor)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _said_clearly(path: Path) -> Iterator[None]:
    """What the system refuses, in the words of the ledger."""
    try:
        yield
    except OSError as error:
        raise LedgerUnwritable(
            f"{path} and its folder to be readable and writable, with room on the disk",
            error.strerror or str(error),
            "mend that and try again; nothing was released",
        ) from error
