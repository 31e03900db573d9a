"""A disk that forgets what was not synced, and one that fills up: a layer between SQLite and the operating system.

SIGKILL does not test fsync, because the operating system keeps what a dead process wrote. Here every write, truncation
and sync of SQLite is seen. `image` gives the files as a power cut could leave them: what was synced, and any part of
what was not, in pieces.
"""

import _sqlite3
import ctypes
import random
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import CFUNCTYPE, POINTER, Structure, c_char_p, c_int, c_int64, c_void_p, string_at
from dataclasses import dataclass, field
from pathlib import Path

OK, FULL = 0, 13
_library = ctypes.CDLL(_sqlite3.__file__)  # the very SQLite that Python uses
_library.sqlite3_vfs_find.restype = c_void_p

_Close = CFUNCTYPE(c_int, c_void_p)
_Write = CFUNCTYPE(c_int, c_void_p, c_void_p, c_int, c_int64)
_Truncate = CFUNCTYPE(c_int, c_void_p, c_int64)
_Sync = CFUNCTYPE(c_int, c_void_p, c_int)
_Open = CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p, c_int, POINTER(c_int))


class _Methods(Structure):
    _fields_ = (
        ("version", c_int),
        ("close", _Close),
        ("read", c_void_p),
        ("write", _Write),
        ("truncate", _Truncate),
        ("sync", _Sync),
        *[(f"other{i}", c_void_p) for i in range(13)],
    )


class _File(Structure):
    _fields_ = (("methods", POINTER(_Methods)),)


class _System(Structure):
    _fields_ = (
        ("version", c_int),
        ("file_size", c_int),
        ("longest_path", c_int),
        ("next", c_void_p),
        ("name", c_char_p),
        ("data", c_void_p),
        ("open", _Open),
        *[(f"other{i}", c_void_p) for i in range(15)],
    )


@dataclass
class Content:
    """One file: what is safe, and the writes and truncations since."""

    safe: bytes = b""
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)

    def now(self) -> bytes:
        return _applied(self.safe, self.pending)

    def after_power_cut(self, chance: random.Random) -> bytes:
        kept = [(offset, _torn(data, chance)) for offset, data in self.pending if chance.random() < 0.5]
        return _applied(self.safe, kept)


@dataclass
class Disk:
    """All files SQLite has open or had open, by path. `full_after`: writes until the disk is full, None for never."""

    files: dict[str, Content] = field(default_factory=dict)
    syncs: int = 0
    full_after: int | None = None

    def image(self, source: Path, target: Path, *, chance: random.Random | None) -> None:
        """A folder after a power cut: only what was synced, or with `chance` also parts of what was not."""
        target.mkdir()
        for path, content in self.files.items():
            if Path(path).parent == source:
                left = content.safe if chance is None else content.after_power_cut(chance)
                (target / Path(path).name).write_bytes(left)


@contextmanager
def forgetful_disk() -> Iterator[Disk]:
    """Every database opened inside goes through the layer."""
    disk = Disk()
    original_at = _library.sqlite3_vfs_find(None)
    original = ctypes.cast(original_at, POINTER(_System)).contents
    system = _System.from_buffer_copy(original)
    system.name = b"forgetful"
    tables: dict[int, tuple[_Methods, _Methods]] = {}  # SQLite's own, and ours that calls it
    paths: dict[int, str] = {}

    def open_(vfs: int, name: int | None, file: int, flags: int, out: object) -> int:
        result = original.open(original_at, name, file, flags, out)
        opened = ctypes.cast(file, POINTER(_File)).contents
        if result == OK and name:
            path = string_at(name).decode()
            paths[file] = path
            if path not in disk.files:
                disk.files[path] = Content(Path(path).read_bytes())
            at = ctypes.addressof(opened.methods.contents)
            if at not in tables:
                theirs = _Methods.from_address(at)
                ours = _Methods.from_buffer_copy(theirs)
                ours.write, ours.truncate, ours.sync = write, truncate, sync
                tables[at] = (theirs, ours)
                by_ours[ctypes.addressof(ours)] = theirs
            opened.methods = ctypes.pointer(tables[at][1])
        return result

    by_ours: dict[int, _Methods] = {}

    def theirs(file: int) -> _Methods:
        return by_ours[ctypes.addressof(ctypes.cast(file, POINTER(_File)).contents.methods.contents)]

    @_Write
    def write(file: int, data: int, size: int, offset: int) -> int:
        if disk.full_after is not None:
            if disk.full_after <= 0:
                return FULL
            disk.full_after -= 1
        disk.files[paths[file]].pending.append((offset, string_at(data, size)))
        return theirs(file).write(file, data, size, offset)

    @_Truncate
    def truncate(file: int, size: int) -> int:
        disk.files[paths[file]].pending.append((size, None))
        return theirs(file).truncate(file, size)

    @_Sync
    def sync(file: int, flags: int) -> int:
        result = theirs(file).sync(file, flags)
        if result == OK:
            content = disk.files[paths[file]]
            content.safe, content.pending = content.now(), []
            disk.syncs += 1
        return result

    system.open = _Open(open_)
    assert _library.sqlite3_vfs_register(ctypes.byref(system), 1) == OK
    try:
        yield disk
    finally:
        _library.sqlite3_vfs_unregister(ctypes.byref(system))
        _library.sqlite3_vfs_register(c_void_p(original_at), 1)


def _applied(safe: bytes, changes: list[tuple[int, bytes | None]]) -> bytes:
    content = bytearray(safe)
    for offset, data in changes:
        if data is None:
            del content[offset:]
            content.extend(bytes(max(0, offset - len(content))))
        else:
            content.extend(bytes(max(0, offset - len(content))))
            content[offset : offset + len(data)] = data
    return bytes(content)


def _torn(data: bytes | None, chance: random.Random) -> bytes | None:
    """A write can stop at any sector."""
    if data is None or chance.random() < 0.5:
        return data
    return data[: 512 * chance.randrange(len(data) // 512 + 1)]
