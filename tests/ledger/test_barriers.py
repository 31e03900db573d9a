"""Power cuts: after each release, a disk that forgets what was not synced still states it."""

import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from ledger.kill_test import CAP, SLICE, UNIT
from support.forgetful import forgetful_disk

from hush.ledger import Ledger, LedgerUnwritable, checkpoints, store

UNITS = 400


def test_power_cut_after_each_release_loses_no_charge(tmp_path):
    chance = random.Random(5)
    Ledger(tmp_path / "data.hush", budget=CAP).close()
    images = 0
    with forgetful_disk() as disk, Ledger(tmp_path / "data.hush") as ledger:
        account = ledger.open_account("run", budget=SLICE, units=[(UNIT, UNITS)])
        for unit in range(1, UNITS + 1):
            before = disk.syncs
            account.reserve(unit)  # and now the unit is released
            if unit % 50 == 0:
                account.settle(unit)
            if disk.syncs != before:  # the file changed; in between the image is the same
                for parts in (None, chance):
                    _state_at_least(unit, disk, tmp_path / f"image{images}", chance=parts)
                    images += 1
        account.close()
        _state_at_least(UNITS, disk, tmp_path / "last", chance=None)
    assert images >= 30, "the test saw too few states of the disk"


def _state_at_least(units: int, disk, folder: Path, *, chance) -> None:
    disk.image(folder.parent, folder, chance=chance)
    with Ledger(folder / "data.hush") as ledger:
        (page,) = ledger.pages()
        assert page.spent >= units, f"{units} units were released, the ledger states {page.spent}"
        if not page.closed:
            assert ledger.resume_account("run").reserved >= units


def test_new_ledger_is_durable_before_it_is_used(tmp_path, monkeypatch):
    """The file is complete on disk when it gets its name, and the name is durable when it is first used."""
    happened = []
    rename, fsync = os.rename, os.fsync

    def watched_rename(source, target):
        assert all(not content.pending for path, content in disk.files.items() if path == str(source))
        happened.append("rename")
        rename(source, target)

    def watched_fsync(descriptor):
        fsync(descriptor)
        happened.append("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file")

    monkeypatch.setattr(store.os, "rename", watched_rename)
    monkeypatch.setattr(store.os, "fsync", watched_fsync)
    with forgetful_disk() as disk:
        Ledger(tmp_path / "data.hush", budget=CAP).close()
    assert happened == ["file", "rename", "folder"]


@pytest.mark.parametrize("writes", range(12))
def test_full_disk_at_any_write_is_said_and_nothing_more_is_granted(tmp_path, writes):
    Ledger(tmp_path / "data.hush", budget=CAP).close()
    with forgetful_disk() as disk, Ledger(tmp_path / "data.hush") as ledger:
        account = ledger.open_account("run", budget=SLICE, units=[(UNIT, UNITS)])
        disk.full_after = writes
        granted = 0
        with pytest.raises(LedgerUnwritable, match=r"expected room .*; came .*full.*; free some space"):
            for unit in range(1, UNITS + 1):
                account.reserve(unit)
                granted = unit
        assert granted < UNITS
        disk.full_after = None
        account.reserve(granted + 1)  # there is room again: the run goes on
    with Ledger(tmp_path / "data.hush") as ledger:
        assert ledger.pages()[0].spent >= granted + 1


def test_checkpoint_survives_a_power_cut_at_any_moment(tmp_path, monkeypatch):
    """Old or new, whole: whether or not names reach the disk before their folder is synced."""
    forgetful = _ForgetfulFolder(tmp_path / "run")
    durable = 0
    for step in range(1, 4):
        forgetful.images.clear()
        saved = checkpoints.Checkpoint({"weight": torch.full((5,), float(step))}, {"step": step})
        with monkeypatch.context() as watching:
            for name in ("fsync", "rename", "rmdir", "unlink"):
                watching.setattr(os, name, forgetful.before(getattr(os, name)))
            checkpoints.save(tmp_path / "run", saved)
        forgetful.remember()
        for image in forgetful.images:
            shutil.rmtree(tmp_path / "image", ignore_errors=True)
            _write_tree(tmp_path / "image", image)
            if durable == 0 and not checkpoints.exists(tmp_path / "image"):
                continue
            found = checkpoints.load(tmp_path / "image")
            assert found.facts["step"] in (durable, step)
            assert torch.equal(found.state["weight"], torch.full((5,), float(found.facts["step"])))
        for image in forgetful.images[-2:]:  # `save` has returned
            shutil.rmtree(tmp_path / "image", ignore_errors=True)
            _write_tree(tmp_path / "image", image)
            assert checkpoints.load(tmp_path / "image").facts["step"] == step
        durable = step
        assert len(forgetful.images) >= 10


class _ForgetfulFolder:
    """Watches a folder through the calls of `os`: contents count when synced, names when their folder is synced."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.contents: dict[int, bytes] = {}  # by inode
        self.listings: dict[int, dict[str, int]] = {}
        self.images: list[dict] = []

    def before(self, call):
        def watched(*arguments, **options):
            self.remember()
            result = call(*arguments, **options)
            if call.__name__ == "fsync":
                self._synced(Path(os.readlink(f"/proc/self/fd/{arguments[0]}")))
            self.remember()
            return result

        return watched

    def remember(self) -> None:
        """The two extremes: names only when synced, and names at once; contents only when synced."""
        if self.root.exists():
            self.images.append(self._tree(self.root.stat().st_ino))
            self.images.append(self._present(self.root))

    def _synced(self, path: Path) -> None:
        inode = path.stat().st_ino
        if path.is_dir():
            self.listings[inode] = {child.name: child.stat().st_ino for child in path.iterdir()}
            for child in path.iterdir():  # an inode number used again belongs to a new file
                if child.is_dir():
                    self.listings.setdefault(child.stat().st_ino, {})
        else:
            self.contents[inode] = path.read_bytes()

    def _tree(self, inode: int) -> dict:
        return {
            name: self._tree(child) if child in self.listings else self.contents.get(child, b"")
            for name, child in self.listings.get(inode, {}).items()
        }

    def _present(self, folder: Path) -> dict:
        return {
            child.name: self._present(child) if child.is_dir() else self.contents.get(child.stat().st_ino, b"")
            for child in folder.iterdir()
        }


def _write_tree(folder: Path, tree: dict) -> None:
    folder.mkdir()
    for name, content in tree.items():
        if isinstance(content, dict):
            _write_tree(folder / name, content)
        else:
            (folder / name).write_bytes(content)
