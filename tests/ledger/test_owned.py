"""Files and folders of a run: whose they are, that they are whole, that one run works there, that nothing else goes."""

import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from hush.ledger import checkpoints
from hush.ledger.checkpoints import Checkpoint
from hush.ledger.owned import FolderInUse, held, make_folder, write_whole
from hush.ledger.plain import plain, short


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(params=[0o022, 0o000, 0o077], ids=lambda value: f"umask {value:03o}")
def umask(request: pytest.FixtureRequest):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.usefixtures("umask")
def test_files_and_folders_are_readable_by_their_owner_alone(tmp_path: Path) -> None:
    checkpoints.save(tmp_path / "runs" / "mine" / "checkpoint", Checkpoint({"x": torch.ones(2)}, {}))
    write_whole(tmp_path / "runs" / "mine" / "report.txt", b"words")
    made = [tmp_path / "runs" / "mine" / "checkpoint", *(tmp_path / "runs" / "mine" / "checkpoint").rglob("*")]
    assert len(made) == 4
    for path in [*made, tmp_path / "runs" / "mine" / "report.txt"]:
        assert mode(path) == (0o700 if path.is_dir() else 0o600), path


def test_a_mode_that_somebody_gave_is_kept(tmp_path: Path) -> None:
    for content in (b"one", b"two"):
        write_whole(tmp_path / "report.html", content)
        assert mode(tmp_path / "report.html") == (0o600 if content == b"one" else 0o644)
        (tmp_path / "report.html").chmod(0o644)
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o750)
    make_folder(shared)
    assert mode(shared) == 0o750 and (tmp_path / "report.html").read_bytes() == b"two"


def test_a_file_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_whole(tmp_path / "x", b"before")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        write_whole(tmp_path / "x", b"after")
    assert [path.name for path in tmp_path.iterdir()] == ["x"] and (tmp_path / "x").read_bytes() == b"before"


def test_saving_removes_nothing_but_what_saving_made(tmp_path: Path) -> None:
    """`save("runs", ...)` used to remove runs/new-experiment with everything in it."""
    others = ["new-experiment/data.txt", "new-123/state.pt", "1/facts.json", "2024/facts.json", "generation-x/state.pt",
              ".hush-new-mine/state.pt", "generation-1/notes.txt"]  # fmt: skip
    for name in others:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "state.pt").write_text("mine")
    (tmp_path / ".hush-new-0123456789abcdef").symlink_to(elsewhere)
    for step in range(3):
        checkpoints.save(tmp_path, Checkpoint({}, {"step": step}))
    assert checkpoints.load(tmp_path).facts == {"step": 2}
    assert all((tmp_path / name).read_text() == "mine" for name in others)
    assert (elsewhere / "state.pt").read_text() == "mine"


def test_two_that_save_at_once_wait_for_each_other(tmp_path: Path) -> None:
    def many(first: int) -> None:
        for step in range(first, first + 15):
            checkpoints.save(tmp_path / "c", Checkpoint({"x": torch.tensor(step)}, {"step": step}))

    threads = [threading.Thread(target=many, args=(first,)) for first in (0, 100)]
    for thread in threads:
        thread.start()
    seen = set()
    while any(thread.is_alive() for thread in threads):
        if checkpoints.exists(tmp_path / "c"):
            found = checkpoints.load(tmp_path / "c")  # a reader never falls between two generations
            assert int(found.state["x"]) == found.facts["step"]
            seen.add(found.facts["step"])
    assert checkpoints.load(tmp_path / "c").facts["step"] in (14, 114)
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["generation-30"]


def test_a_folder_is_held_by_one_and_left_as_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    with held(folder):
        with pytest.raises(FolderInUse, match="another run is at work"), held(folder):
            pass
        assert folder.is_dir() and mode(folder) == 0o700
    assert not (tmp_path / "a").exists(), "nothing was put there, so nothing stays"
    with held(folder):
        (folder / "result").write_text("x")
    assert [path.name for path in folder.iterdir()] == ["result"]
    with held(folder):
        pass


def test_a_killed_run_gives_its_folder_back(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from hush.ledger.owned import held\n"
        "with held(Path(sys.argv[1])): print('held', flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        with pytest.raises(FolderInUse), held(tmp_path / "run"):
            pass
        process.kill()
    with held(tmp_path / "run"):
        pass


def test_many_want_one_folder_and_one_at_a_time_has_it(tmp_path: Path) -> None:
    """Also while the lock's own file comes and goes with its holders."""
    inside, most = [0], [0]

    def work() -> None:
        for _ in range(50):
            with held(tmp_path, wait=True):
                inside[0] += 1
                time.sleep(0.0005)
                most[0] = max(most[0], inside[0])
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most[0] == 1 and not list(tmp_path.iterdir())


CODES = (range(0x20), range(0x7F, 0xA0), range(0x200B, 0x2010), range(0x2028, 0x202F), range(0x2066, 0x206A),
         [0xFEFF, 0xAD, 0xE0001, 0xDCFF, 0x10FFFF, 0x61C])  # fmt: skip


@pytest.mark.parametrize("codes", CODES)
def test_what_moves_hides_or_turns_is_shown_as_an_escape(codes) -> None:
    for code in codes:
        shown = plain(f"a{chr(code)}b")
        assert shown.isascii() and shown.isprintable() and shown.startswith("a\\") and shown.endswith("b"), hex(code)


def test_ordinary_names_stay_as_they_are() -> None:
    for name in ("Münchner Klinik", "患者データ", "a/b [c] <d>", "ελ\u00a0x"):
        assert plain(name) == name
    assert len(short("x" * 10_000)) == 200
