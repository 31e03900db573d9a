"""What the ledger and checkpoints cost: per charged step, per write, per opening, per checkpoint.

    python benchmarks/ledger.py [--folder DIR] [--json FILE]

The folder decides the disk that is measured. A step is simulated by sleeping; only the time inside the ledger counts.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from hush.accounting import Budget, Gaussian, PoissonSampled
from hush.ledger import Account, Ledger, checkpoints

BUDGET = Budget(epsilon=2.0, delta=1e-5)
UNIT = PoissonSampled(0.01, Gaussian(8.0))


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


def charge_per_step(folder: Path, *, step_seconds: float, steps: int) -> dict[str, float]:
    """The time in `reserve`, block by block as a run of 6000 steps would choose them, spread over the steps."""
    with Ledger(folder / f"steps-{step_seconds}.hush") as ledger:
        account = ledger.open_account("run", budget=BUDGET, units=[(UNIT, 6000)])
        times = []
        for step in range(1, steps + 1):
            times.append(timed(lambda step=step: account.reserve(step)))
            time.sleep(step_seconds)
    mean = statistics.fmean(times)
    return {
        "step_ms": 1e3 * step_seconds,
        "mean_us": 1e6 * mean,
        "median_us": 1e6 * statistics.median(times),
        "percent_of_step": 100 * mean / step_seconds,
        "steps": steps,
    }


def writes(account: Account, count: int) -> list[float]:
    """One durable entry each: settle what is used, reserve the next block."""
    times = []
    for unit in range(1, count + 1):
        times.append(timed(lambda unit=unit: account.reserve(unit)))
        account.settle(unit)
    return times


def checkpoint(folder: Path, parameters: int, count: int) -> list[float]:
    state = {"model": {"weight": torch.randn(parameters)}, "optimizer": {"momentum": torch.randn(parameters)}}
    return [
        timed(
            lambda step=step: checkpoints.save(folder / str(parameters), checkpoints.Checkpoint(state, {"step": step}))
        )
        for step in range(count)
    ]


def measure(folder: Path) -> dict[str, object]:
    results: dict[str, object] = {}
    results["charge"] = [charge_per_step(folder, step_seconds=s, steps=n) for s, n in ((0.005, 2000), (0.05, 200))]
    with Ledger(folder / "writes.hush") as ledger:
        account = ledger.open_account("run", budget=BUDGET, units=[(UNIT, 6000)])
        results["one_write_ms"] = milliseconds(writes(account, 200))
        entries = len(ledger.entries())
    results["open_file_ms"] = milliseconds([timed(lambda: Ledger(folder / "writes.hush").close()) for _ in range(20)])
    results["entries_in_that_file"] = entries
    results["checkpoint_ms"] = {
        "60 thousand parameters": milliseconds(checkpoint(folder, 60_000, 20)),
        "10 million parameters": milliseconds(checkpoint(folder, 10_000_000, 5)),
    }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        results = measure(Path(folder))
    text = json.dumps(results, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
