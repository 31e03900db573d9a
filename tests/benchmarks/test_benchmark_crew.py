"""The processes of a benchmark: order, room, being alone, and that none is left behind."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")
WORKER = """
import json, os, pathlib, sys, time
sys.path.insert(0, {benchmarks!r})
from crew import end_with_parent
end_with_parent()
file, log = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
def save(**found):
    whole = file.with_suffix(".whole"); whole.write_text(json.dumps(found)); whole.replace(file)
if "broken" in file.name:
    raise RuntimeError("no luck")
save(stages=["ready"], pid=os.getpid())
if "busy" in file.name:
    while True:
        log.open("a").write("b")
        time.sleep(0.005)
for order in sys.stdin:
    before = log.stat().st_size if log.exists() else 0
    time.sleep(0.3)
    grown = log.stat().st_size - before if log.exists() else 0
    save(stages=["ready", "timed"], pid=os.getpid(), order=order.strip(), grown=grown)
"""


@pytest.fixture
def crew_room(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import crew

    yield crew
    sys.modules.pop("crew")


@pytest.fixture
def start(crew_room, tmp_path: Path) -> Callable:  # type: ignore[no-untyped-def]
    def begin(job):  # type: ignore[no-untyped-def]
        file = tmp_path / f"{job.case}-{job.part}.json"
        code = WORKER.format(benchmarks=BENCHMARKS)
        command = [sys.executable, "-c", code, str(file), str(tmp_path / "beats")]
        return crew_room.Child(command, file, dict(os.environ), job.listens)

    return begin


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


def runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_jobs_wait_for_others_and_for_room(crew_room, start) -> None:  # type: ignore[no-untyped-def]
    job = crew_room.Job
    small, large, late = job("a", "x", gib=4), job("b", "x", gib=8, listens=True), job("c", "x", gib=1)
    with crew_room.Crew(start, most=2, gib=9) as crew:
        crew.add([small, large])
        crew.add([late], after=[small])
        crew.tend()
        started = [one for one, *_ in crew.found()]
        assert started == [small], "together they need more than there is"
        assert crew.wait(soon(), lambda: crew.at(large, "ready"))
        assert crew.wait(soon(), lambda: crew.over(late))
        assert crew.over(small) and not crew.over(large)
        assert not crew.wait(soon(0.1), lambda: crew.over(large)), "it waits for an order"


def test_what_waits_for_room_is_not_overtaken(crew_room, start) -> None:  # type: ignore[no-untyped-def]
    job = crew_room.Job
    first, large, small = job("a", "x", gib=4, listens=True), job("b", "x", gib=8), job("c", "x", gib=1)
    with crew_room.Crew(start, most=3, gib=9) as crew:
        crew.add([first, large, small])
        crew.tend()
        crew.tend()
        assert [one for one, *_ in crew.found()] == [first]
        crew.end(first)
        assert crew.wait(soon(), lambda: crew.over(large) and crew.over(small))


def test_others_stand_still_while_one_is_timed(crew_room, start, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    job = crew_room.Job
    busy, timed = job("busy", "x"), job("timed", "x", listens=True)
    beats = tmp_path / "beats"
    with crew_room.Crew(start, most=4, gib=100) as crew:
        crew.add([busy, timed])
        assert crew.wait(soon(), lambda: crew.at(timed, "ready") and beats.exists())
        with crew.alone(timed) as child:
            child.tell("go")
            assert crew.wait(soon(), lambda: crew.at(timed, "timed"))
        found = {one.case: known for one, known, _ in crew.found()}
        assert found["timed"]["order"] == "go"
        assert found["timed"]["grown"] == 0, "another process worked meanwhile"
        before = beats.stat().st_size
        assert crew.wait(soon(), lambda: beats.stat().st_size > before), "it goes on afterwards"
        pids = [known["pid"] for known in found.values()]
    assert not any(map(runs, pids)), "all end with the crew"


def test_a_process_that_fails_says_why_and_blocks_nobody(crew_room, start) -> None:  # type: ignore[no-untyped-def]
    broken, after = crew_room.Job("broken", "x"), crew_room.Job("b", "x")
    with crew_room.Crew(start, most=4, gib=100) as crew:
        crew.add([broken])
        crew.add([after], after=[broken])
        assert crew.wait(soon(), lambda: crew.over(after))
        found = {one: (known, trouble) for one, known, trouble in crew.found()}
    assert "no luck" in found[broken][1] and found[broken][0] == {}
    assert found[after][1] == ""


def test_processes_end_with_the_one_that_started_them(crew_room, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    import signal
    import subprocess

    parent = f"""
import sys, time, os, pathlib
sys.path.insert(0, {BENCHMARKS!r})
from crew import Child
file = pathlib.Path({str(tmp_path / "busy.json")!r})
child = Child([sys.executable, "-c", {WORKER.format(benchmarks=BENCHMARKS)!r}, str(file), str(file.with_name("beats"))],
              file, dict(os.environ), False)
while not child.found(): time.sleep(0.02)
child.signal({signal.SIGSTOP})
print(child.found()["pid"], flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert runs(pid)
        process.kill()
    until = soon()
    while runs(pid) and time.monotonic() < until:
        time.sleep(0.02)
    assert not runs(pid)
