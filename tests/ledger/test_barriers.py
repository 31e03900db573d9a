"""Power cuts: after each release, a disk that forgets what was not synced still states it."""

import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from ledger.kill_test import CAP, SLICE, UNIT
from support.forgetful import forgetful_disk, watched

from hush.ledger import Ledger, LedgerDamaged, LedgerUnwritable, checkpoints, ledger_file

UNITS = 400


def test_power_cut_after_each_release_loses_no_charge(tmp_path):
    chance = random.Random(5)
    images = 0
    with forgetful_disk() as disk, Ledger(tmp_path / "data.hush", budget=CAP) as ledger:
        account = ledger.open_account("run", budget=SLICE, units=[(UNIT, UNITS)])
        for unit in range(1, UNITS + 1):
            before = disk.syncs
            account.take()  # and now the unit is released
            if unit % 7 == 0:
                account.settle()
            if disk.syncs != before:  # the file changed; in between the image is the same
                for parts in (None, chance, chance):
                    _state_at_least(unit, disk, tmp_path / f"image{images}", chance=parts)
                    images += 1
        account.close()
        _state_at_least(UNITS, disk, tmp_path / "last", chance=None)
    assert images >= 100, "the test saw too few states of the disk"


def _state_at_least(units: int, disk, folder: Path, *, chance) -> None:
    disk.image(folder.parent, folder, chance=chance)
    (folder / "data.hush-head").unlink(missing_ok=True)  # it may not have reached the disk: it never vouches for less
    with Ledger(folder / "data.hush") as ledger:
        (record,) = ledger.accounts()
        assert record.spent >= units, f"{units} units were released, the ledger states {record.spent}"
        if not record.closed and record.spent < UNITS:
            assert ledger.resume_account("run").take() >= units, "also where a torn entry lies behind the last one"
    with Ledger(folder / "data.hush") as ledger:
        assert ledger.accounts()[0].spent >= record.spent
    shutil.rmtree(folder)


def test_a_power_cut_while_an_entry_is_written_leaves_what_was_there_before(tmp_path):
    """Each write of one charge is torn at each of its bytes: the charge before it stands, and the ledger goes on."""
    with forgetful_disk() as disk, Ledger(tmp_path / "data.hush", budget=CAP) as ledger:
        account = ledger.open_account("run", budget=SLICE, units=[(UNIT, UNITS)])
        account.take()
        before = (tmp_path / "data.hush").read_bytes()
        account.spend_up_to(100)
        after = (tmp_path / "data.hush").read_bytes()
    written = after[len(before) :]
    for length in range(len(written)):
        (tmp_path / "cut").write_bytes(before + written[:length] + (b"" if length % 2 else b"\0" * 40))
        with Ledger(tmp_path / "cut") as ledger:
            assert ledger.accounts()[0].spent == 16
            assert ledger.resume_account("run").take() == 16
        with Ledger(tmp_path / "cut") as ledger:
            assert 17 <= ledger.accounts()[0].spent <= 32 and len(ledger.entries()) == 5
        (tmp_path / "cut-head").unlink()
    assert disk.syncs


@pytest.mark.parametrize("how", ["opened", "read on"])
def test_what_is_shown_to_anybody_is_durable(tmp_path, monkeypatch, how):
    """A process dies between the write and the sync of an entry; whoever sees the entry makes it durable first."""

    def dies(descriptor):
        raise KeyboardInterrupt

    with forgetful_disk() as disk, Ledger(tmp_path / "data.hush", budget=CAP) as ledger:
        account = ledger.open_account("run", budget=SLICE, units=[(UNIT, UNITS)])
        other = Ledger(tmp_path / "data.hush")
        with monkeypatch.context() as patch:
            patch.setattr(ledger_file, "_sync", dies)
            with pytest.raises(KeyboardInterrupt):
                account.spend_up_to(100)
        if how == "opened":
            other = Ledger(tmp_path / "data.hush")
        assert other.accounts()[0].spent >= 100
        disk.image(tmp_path, tmp_path / "image", chance=None)
    (tmp_path / "image" / "data.hush-head").unlink()
    Ledger(tmp_path / "image" / "data.hush", seen=other.head()).close()


def test_a_head_that_a_power_cut_lost_is_written_again_at_the_opening(tmp_path):
    """Or a later cut through the last entry would look like an entry that never counted."""
    with forgetful_disk() as disk, Ledger(tmp_path / "data.hush", budget=CAP) as ledger:
        ledger.open_account("run", budget=SLICE, units=[(UNIT, UNITS)]).take()
        disk.image(tmp_path, tmp_path / "image", chance=None)
    path = tmp_path / "image" / "data.hush"
    path.with_name("data.hush-head").unlink()
    with Ledger(path) as ledger:
        assert ledger.accounts()[0].spent == 16
    os.truncate(path, path.stat().st_size - 9)
    with pytest.raises(LedgerDamaged, match="breaks off, or was changed, after entry 2"):
        Ledger(path)


def test_new_ledger_is_durable_before_it_is_used(tmp_path, monkeypatch):
    """The file is complete on disk when it gets its name, and the name is durable when it is first used."""
    happened = []
    link = os.link
    monkeypatch.setattr(os, "link", lambda *names: happened.append("named") or link(*names))
    with watched(lambda event: happened.append(event[0])):
        Ledger(tmp_path / "data.hush", budget=CAP).close()
    assert happened[:4] == ["write", "sync", "named", "sync"]
    assert [path.name for path in tmp_path.iterdir()] == ["data.hush"]


@pytest.mark.parametrize("room", [0, 1, 70, 130, 240, 360, 500, 700, 900])
def test_full_disk_at_any_write_is_said_and_nothing_more_is_granted(tmp_path, room):
    with forgetful_disk() as disk, Ledger(tmp_path / "data.hush", budget=CAP) as ledger:
        account = ledger.open_account("run", budget=SLICE, units=[(UNIT, UNITS)])
        disk.room = room
        granted = 0
        with pytest.raises(LedgerUnwritable, match=r"expected .* room on the disk; came No space left on device; mend"):
            for _ in range(UNITS):
                account.take()
                granted += 1
                account.settle()
        assert granted < UNITS
        with Ledger(tmp_path / "data.hush") as other:
            assert other.accounts()[0].spent >= granted
        disk.room = None
        assert account.take() == granted  # there is room again: the run goes on
    with Ledger(tmp_path / "data.hush") as ledger:
        assert ledger.accounts()[0].spent >= granted + 1


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
