"""The step benchmark on a GPU, its processes replaced by ones that need none: what is asked for, in time, and kept."""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")
ROOMS = ("step_cuda", "crew", "forms", "jax_forms", "cases", "measure", "table", "exactness", "oracle")
WORKER = """
import json, pathlib, sys, time
file, case, phase, part = pathlib.Path(sys.argv[1]), *sys.argv[2:5]
def save(**found):
    whole = file.with_suffix(".whole"); whole.write_text(json.dumps(found)); whole.replace(file)
began = time.time()
if (case, part) == ("cnn24", "opacus ghost"):
    raise RuntimeError("no luck")
if (case, phase) == ("gpt2-lora", "exact"):
    time.sleep(100)
timing = dict(milliseconds=2.0, ratio=1.5, low=1.4, high=1.6)
if phase == "way":
    memory = {part: 130.0 if part.startswith("hush") else 100.0}
    save(stages=["memory"], reserved_mib=memory, began={f"way {part}": began})
    for _ in sys.stdin:
        save(stages=["memory", "timed"], reserved_mib=memory, more={part: timing}, began={f"way {part}": began})
elif phase == "time":
    save(stages=["ready"], began={"time": began})
    for _ in sys.stdin:
        names = {"plain": "plain compiled+captured", "hush": "hush compiled+captured"}
        ratio = names | {"of": {"plain": 2.0, "hush": 2.0}} | timing
        times = {name: timing for name in ("plain", "hush", "hush compiled+captured", "plain compiled+captured")}
        save(stages=["ready", "timed"], timings=times, ratio=ratio, began={"time": began})
else:
    errors = dict(examples=4, padding=2, norms=1e-8, plain=1e-7, ways={})
    save(stages=["done"], exactness={part: errors})
"""


@pytest.fixture
def step_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import step_cuda

    def begin(job, folder: Path, options: argparse.Namespace):  # type: ignore[no-untyped-def]
        file = folder / f"{job.case}-{job.phase}-{job.part.replace(' ', '')}.json"
        command = [sys.executable, "-c", WORKER, str(file), job.case, job.phase, job.part]
        return step_cuda.Child(command, file, dict(os.environ), job.listens)

    monkeypatch.setattr(step_cuda, "begin", begin)
    monkeypatch.setattr(step_cuda, "machine", lambda device: {"gpu": "none"})
    monkeypatch.setattr(step_cuda.signal, "signal", lambda *_: None)
    monkeypatch.setattr(step_cuda.os, "cpu_count", lambda: 8)
    yield step_cuda
    for name in ROOMS:
        sys.modules.pop(name, None)


def test_every_way_is_read_in_a_process_of_its_own(
    step_cuda: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "results" / "step.json"
    options = argparse.Namespace(case=["mlp60", "cnn24"], json=file, rounds=2, peers=True, limit=120.0)
    step_cuda.measure_all(options)
    found = json.loads(file.read_text())["cases"]
    ways = {name: set(step_cuda.forms("cuda", step_cuda.cases("cuda")[name])) for name in options.case}
    assert set(found["mlp60"]["reserved_mib"]) == ways["mlp60"]
    assert set(found["cnn24"]["reserved_mib"]) == ways["cnn24"] - {"opacus ghost"}
    assert "no luck" in found["cnn24"]["unavailable"]["opacus ghost"]
    peers = {"opacus hooks", "opacus ghost", "jax-privacy", "jax, not private"}
    assert set(found["mlp60"]["more"]) >= peers
    assert set(found["mlp60"]["exactness"]) == {"fp32"} and set(found["cnn24"]["exactness"]) == {"bf16", "fp32"}
    times = found["cnn24"]["began"]
    compiled = [began for way, began in times.items() if "compiled+" in way]
    assert len(compiled) == 3 and max(compiled) < times["time"], "compiled code is there when all ways are built"
    told = capsys.readouterr().out
    assert "100 -> 130, 1.30x" in told and "not measured: process ended" in told


def test_without_the_peers_they_are_not_started(step_cuda: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    step_cuda.measure_all(argparse.Namespace(case=["mlp60"], json=file, rounds=2, peers=False, limit=120.0))
    found = json.loads(file.read_text())["cases"]["mlp60"]
    assert not [way for way in found["reserved_mib"] if way.startswith(("opacus", "jax"))]
    assert found["ratio"]["ratio"] == 1.5


def test_what_hangs_is_ended_at_the_limit(step_cuda: ModuleType, tmp_path: Path) -> None:
    file, began = tmp_path / "step.json", time.monotonic()
    step_cuda.measure_all(argparse.Namespace(case=["gpt2-lora"], json=file, rounds=2, peers=False, limit=9.0))
    assert time.monotonic() - began < 20
    assert not json.loads(file.read_text())["cases"]["gpt2-lora"]["exactness"]
