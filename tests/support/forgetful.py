"""A disk that forgets what was not synced, and one that fills up: between the ledger and the operating system.

SIGKILL does not test fsync, because the operating system keeps what a dead process wrote. Here every write, truncation
and sync of the ledger is seen. `after_power_cut` is a file as a power cut could leave it: what was synced, and any part
of what was not, in pieces.
"""

import errno
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hush.ledger import ledger_file, witness

Event = tuple[str, int, int, bytes]
"""What happened (write, truncate, sync), to which inode, at which offset, with which bytes."""


@dataclass
class Content:
    """One file: what is safe, and the writes and truncations since."""

    safe: bytes = b""
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)

    def note(self, kind: str, offset: int, data: bytes) -> None:
        if kind == "sync":
            self.safe, self.pending = _applied(self.safe, self.pending), []
        else:
            self.pending.append((offset, data if kind == "write" else None))

    def after_power_cut(self, chance: random.Random | None) -> bytes:
        """Only what was synced, or with `chance` also parts of what was not."""
        kept = (
            [] if chance is None else [(at, _torn(data, chance)) for at, data in self.pending if chance.random() < 0.5]
        )
        return _applied(self.safe, kept)

    def at_some_moment(self, chance: random.Random) -> bytes:
        """As it was after one of its writes, for a file of one sector."""
        return _applied(self.safe, self.pending[: chance.randrange(len(self.pending) + 1)])


@dataclass
class Disk:
    """All files that were written, by inode. `room`: bytes until the disk is full, None for an endless one."""

    files: dict[int, Content] = field(default_factory=dict)
    syncs: int = 0
    room: int | None = None

    def note(self, event: Event) -> None:
        kind, inode, offset, data = event
        self.files.setdefault(inode, Content()).note(kind, offset, data)
        self.syncs += kind == "sync"

    def image(self, source: Path, target: Path, *, chance: random.Random | None) -> None:
        """A folder after a power cut."""
        target.mkdir()
        for path in source.iterdir():
            if path.is_file() and path.stat().st_ino in self.files:
                (target / path.name).write_bytes(self.files[path.stat().st_ino].after_power_cut(chance))


@contextmanager
def forgetful_disk() -> Iterator[Disk]:
    """Every ledger used inside goes through the layer."""
    disk = Disk()
    with watched(disk.note, room=disk):
        yield disk


@contextmanager
def watched(note: Callable[[Event], None], *, room: Disk | None = None) -> Iterator[None]:
    """The ledger's calls of the system are noted: writes before they happen, syncs after."""

    def pwrite(descriptor: int, data: bytes, offset: int) -> int:
        if room is not None and room.room is not None and len(data) > room.room:
            data = data[: room.room]  # a full disk takes what fits, then nothing
            if not data:
                raise OSError(errno.ENOSPC, "No space left on device")
        if room is not None and room.room is not None:
            room.room -= len(data)
        note(("write", os.fstat(descriptor).st_ino, offset, bytes(data)))
        return os.pwrite(descriptor, data, offset)

    def ftruncate(descriptor: int, size: int) -> None:
        note(("truncate", os.fstat(descriptor).st_ino, size, b""))
        os.ftruncate(descriptor, size)

    def fsync(descriptor: int) -> None:
        os.fsync(descriptor)
        note(("sync", os.fstat(descriptor).st_ino, 0, b""))

    ours: dict[str, Any] = {name: getattr(os, name) for name in dir(os) if not name.startswith("__")}
    layer = SimpleNamespace(**ours | {"pwrite": pwrite, "ftruncate": ftruncate, "fsync": fsync})
    modules: list[Any] = [ledger_file, witness]
    for module in modules:
        module.os = layer
    try:
        yield
    finally:
        for module in modules:
            module.os = os


def _applied(safe: bytes, changes: list[tuple[int, bytes | None]]) -> bytes:
    content = bytearray(safe)
    for offset, data in changes:
        if data is None:
            del content[offset:]
        content.extend(bytes(max(0, offset - len(content))))
        if data is not None:
            content[offset : offset + len(data)] = data
    return bytes(content)


def _torn(data: bytes | None, chance: random.Random) -> bytes | None:
    """A write can stop anywhere."""
    return data if data is None or chance.random() < 0.5 else data[: chance.randrange(len(data) + 1)]
