"""What the ledger and checkpoints cost: per charged step, per append, per opening, per checkpoint.

    python benchmarks/ledger.py [--folder DIR] [--entries 1000000] [--json FILE]

The folder decides the disk that is measured; its file system is named. A step is simulated by sleeping; only the time
inside the ledger counts, in the blocks that a run of that length reserves.
"""

import argparse
import json
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.long_ledger import write_long_ledger

from hush.accounting import Budget, Gaussian, PoissonSampled
from hush.ledger import Account, Ledger, checkpoints

BUDGET = Budget(epsilon=2.0, delta=1e-5)
UNIT = PoissonSampled(0.01, Gaussian(8.0))
PLAN = [(UNIT, 6000)]


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def milliseconds(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {
        "median": 1e3 * statistics.median(ordered),
        "p90": 1e3 * ordered[int(0.9 * (len(ordered) - 1))],
        "largest": 1e3 * ordered[-1],
        "count": len(ordered),
    }


def charge_per_step(folder: Path, *, step_seconds: float, steps: int, units: int) -> dict[str, float]:
    """The time in `take`, block by block as a run over so many units chooses them, spread over the steps."""
    with Ledger(folder / f"steps-{step_seconds}-{units}.hush", create=True) as ledger:
        account = ledger.open_account("run", budget=BUDGET, units=[(UNIT, units)])
        times = []
        for _ in range(steps):
            times.append(timed(account.take))
            time.sleep(step_seconds)
        entries = len(ledger.entries())
    mean = statistics.fmean(times)
    return {
        "step_ms": 1e3 * step_seconds,
        "units_in_plan": units,
        "mean_us": 1e6 * mean,
        "median_us": 1e6 * statistics.median(times),
        "percent_of_step": 100 * mean / step_seconds,
        "steps": steps,
        "appends": entries - 2,
    }


def appends(account: Account, count: int) -> list[float]:
    """One durable entry each: reserve a block, or settle what was not used of it."""
    times = []
    for _ in range(count):
        account.settle()
        times.append(timed(account.take))
    return times


def bare_appends(path: Path, count: int) -> list[float]:
    """What the disk alone takes: 150 bytes at the end of a file, and fsync."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

    def append() -> None:
        os.write(descriptor, b"." * 150)
        os.fsync(descriptor)

    times = [timed(append) for _ in range(count)]
    os.close(descriptor)
    return times


def database_commits(path: Path, count: int, journal: str) -> list[float]:
    """The same entry as a row of an SQLite database with a rollback journal or a write-ahead log."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute(f"PRAGMA journal_mode = {journal}")
    connection.execute(f"PRAGMA synchronous = {'FULL' if journal == 'WAL' else 'EXTRA'}")
    connection.execute("CREATE TABLE entries (body TEXT)")
    times = [timed(lambda: connection.execute("INSERT INTO entries VALUES (?)", ("." * 150,))) for _ in range(count)]
    connection.close()
    return times


def opening(path: Path) -> dict[str, float]:
    """A process of its own opens the ledger: seconds, and memory beside that of the imports."""
    code = (
        "import pathlib, re, sys, time; from hush.ledger import Ledger;"
        "memory = lambda: int(re.search(r'VmHWM:\\s+(\\d+)', pathlib.Path('/proc/self/status').read_text())[1]);"
        "before, began, used = memory(), time.perf_counter(), time.process_time(); ledger = Ledger(sys.argv[1]);"
        "print(time.perf_counter() - began, time.process_time() - used, (memory() - before) / 1024,"
        " ledger.head().sequence)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    seconds, processor, megabytes, entries = map(float, done.stdout.split())
    return {"entries": entries, "seconds": seconds, "processor_seconds": processor, "megabytes": megabytes}


def checkpoint(folder: Path, parameters: int, count: int) -> list[float]:
    state = {"model": {"weight": torch.randn(parameters)}, "optimizer": {"momentum": torch.randn(parameters)}}
    return [
        timed(
            lambda step=step: checkpoints.save(folder / str(parameters), checkpoints.Checkpoint(state, {"step": step}))
        )
        for step in range(count)
    ]


def measure(folder: Path, entries: int) -> dict[str, object]:
    results: dict[str, object] = {"file_system": file_system(folder)}
    results["charge"] = [
        charge_per_step(folder, step_seconds=seconds, steps=steps, units=units)
        for seconds, steps, units in ((0.005, 3000, 6000), (0.005, 1000, 1000), (0.05, 200, 6000))
    ]
    with Ledger(folder / "appends.hush", create=True) as ledger:
        results["one_append_ms"] = milliseconds(appends(ledger.open_account("a", budget=BUDGET, units=PLAN), 200))
    results["bare_append_ms"] = milliseconds(bare_appends(folder / "bare", 200))
    for journal in ("TRUNCATE", "PERSIST", "WAL"):
        results[f"sqlite_{journal.lower()}_ms"] = milliseconds(database_commits(folder / journal, 100, journal))
    results["open_file_ms"] = milliseconds([timed(lambda: Ledger(folder / "appends.hush").close()) for _ in range(20)])
    write_long_ledger(folder / "long.hush", accounts=20, entries=entries)
    results["open_long_file"] = opening(folder / "long.hush")
    write_long_ledger(folder / "accounts.hush", accounts=2000, entries=2001, alike=False)
    with Ledger(folder / "accounts.hush") as ledger:
        results["spent_of_2000_accounts_s"] = [timed(lambda d=d: ledger.spent(delta=d)) for d in (1e-4, 1e-12)]
    results["checkpoint_ms"] = {
        "60 thousand parameters": milliseconds(checkpoint(folder, 60_000, 20)),
        "10 million parameters": milliseconds(checkpoint(folder, 10_000_000, 5)),
    }
    return results


def file_system(folder: Path) -> str:
    asked = ["findmnt", "--noheadings", "--output", "FSTYPE,SOURCE", "--target", str(folder)]
    return " ".join(subprocess.run(asked, capture_output=True, text=True, check=False).stdout.split())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--entries", type=int, default=10**6, help="of the long ledger that is opened")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        results = measure(Path(folder), options.entries)
    text = json.dumps(results, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
