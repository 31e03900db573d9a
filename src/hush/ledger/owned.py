"""Files and folders of a run: readable by their owner alone, written whole or not at all, one run at a time.

Whoever may read a checkpoint or a report is decided by the owner, with `chmod`: files are made with mode 0600 and
folders with 0700, and the umask may take more away. What was there before keeps the mode that somebody gave it.
"""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PARTIAL = ".hush-partial-"
_LOCK = ".hush-lock"


class FolderInUse(ValueError):
    """Another run works in the folder."""


def make_folder(folder: Path) -> list[Path]:
    """Make the folder for its owner alone, and what it lies in as usual; gives back what was made, outermost first."""
    made: list[Path] = []
    for place in [*reversed(folder.parents), folder]:
        with suppress(FileExistsError):
            place.mkdir(mode=0o700 if place == folder else 0o777)
            made.append(place)
    if not folder.is_dir():
        raise NotADirectoryError(20, "a file is in the way of the folder", str(folder))
    return made


def write_whole(path: Path, content: bytes | memoryview, *, durable: bool = False) -> None:
    """Put the content in the place of the file, at once; a mode that somebody gave to the file before is kept."""
    partial = path.with_name(f"{_PARTIAL}{secrets.token_hex(8)}")
    try:
        write_new(partial, content, durable=durable)
        with suppress(FileNotFoundError):
            os.chmod(partial, path.stat().st_mode & 0o777)
        os.replace(partial, path)
    except OSError as error:  # in the name that was asked for, not in that of the partial file
        raise type(error)(error.errno, error.strerror, str(path)) from error
    finally:
        partial.unlink(missing_ok=True)


def write_new(path: Path, content: bytes | memoryview, *, durable: bool) -> None:
    """A file that did not exist, for its owner alone; if `durable`, on the disk when this returns."""
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_BINARY", 0), 0o600)
    with open(descriptor, "wb") as file:
        file.write(content)
        if durable:
            file.flush()
            os.fsync(file.fileno())


def sync(folder: Path) -> None:
    """Make the names in the folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def held(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """The folder for this run alone, made if it is not there; FolderInUse where another holds it (or wait for it).

    A lock that the operating system gives back when the process ends, however it ends. Nothing is left behind: the
    lock's file goes with the lock, and a folder that was made here goes too if it is still empty.
    """
    made = make_folder(folder)
    try:
        descriptor = _taken(folder, wait=wait)
        try:
            yield
        finally:
            with suppress(OSError):
                (folder / _LOCK).unlink()  # before it is given back: whoever waits sees that the file is another
            os.close(descriptor)
    finally:
        for place in reversed(made):
            with suppress(OSError):  # not empty: somebody's work is in it
                place.rmdir()


def _taken(folder: Path, *, wait: bool) -> int:
    while True:
        descriptor = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            _lock(descriptor, folder, wait=wait)
            if _still_there(descriptor, folder / _LOCK):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _lock(descriptor: int, folder: Path, *, wait: bool) -> None:
    try:
        import fcntl
    except ImportError:  # Windows: nothing keeps two runs apart there; hush is not tested on it
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise FolderInUse(
            f"expected a folder that no other run is using; came {folder}, where another run is at work; wait for it, "
            "or choose another folder"
        ) from None


def _still_there(descriptor: int, path: Path) -> bool:
    """Whether the file that was locked is still the one of that name: its last holder may have removed it."""
    try:
        now = path.stat()
    except FileNotFoundError:
        return False
    mine = os.fstat(descriptor)
    return (mine.st_dev, mine.st_ino) == (now.st_dev, now.st_ino)
