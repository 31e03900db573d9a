"""One private training step against one non-private step: time ratio and peak memory, for the cases of `cases.py`.

    python benchmarks/step.py                          all CPU cases, hush beside the non-private step
    python benchmarks/step.py --case cnn24 --peers     and Opacus and jax-privacy, if installed
    python benchmarks/step.py --device cuda --json results/step-cuda.json

All ways of a case run in one process in turns; the ratio is the median over rounds. Rounds during which other programs
used the CPUs are dropped, and counted. Peak memory is the median of three processes of their own for each way.
`step_cuda.py` says how cases are run on a GPU.
"""

import argparse
import contextlib
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from cases import Case, cases
from forms import PEERS, Unavailable, forms
from measure import Rounds, interleaved, machine, peak_mib


def main() -> None:
    options = arguments()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    known = cases(options.device)
    chosen = options.case or list(known)
    if unknown := [name for name in chosen if name not in known]:
        sys.exit(f"unknown case {', '.join(unknown)}; there are {', '.join(known)}")
    if options.device == "cuda":
        if options.phase:
            from step_child import one_phase as run
        else:
            from step_cuda import measure_all as run
        run(options)
        return
    if options.peak:
        if options.peak.startswith("jax"):
            import jax_forms

            jax_forms.need_jax()  # a second framework is no part of a step
        print(json.dumps(peak_mib(lambda: forms("cpu")[options.peak](known[chosen[0]], "cpu"))))
        return
    if options.cpu_time:
        torch.set_num_threads(1)
        print("CPU time of one thread, not the time on the clock")
    results = {
        "clock": "cpu" if options.cpu_time else "wall",
        "machine": machine(options.device),
        "date": time.strftime("%Y-%m-%d"),
        "cases": {},
    }
    print(", ".join(f"{key} {value}" for key, value in results["machine"].items()))
    for name in chosen:
        results["cases"][name] = report(known[name], options)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1) + "\n")
        print(f"written to {options.json}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", help="may be given several times; default: all")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--tolerated", type=float, default=0.04, help="part of the CPUs that others may use in a round")
    parser.add_argument(
        "--cpu-time", action="store_true", help="CPU time of one thread: for a machine that is not quiet"
    )
    parser.add_argument("--peers", action="store_true", help="time Opacus and jax-privacy as well")
    parser.add_argument("--no-memory", action="store_true", help="do not start the processes that measure memory")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for all cases together (GPU only)")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    parser.add_argument("--phase", choices=("exact", "time", "way"), help=argparse.SUPPRESS)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    return parser.parse_args()


def report(case: Case, options: argparse.Namespace) -> dict:
    """Measure one case and print its lines."""
    steps, notes = {}, {}
    for name, build in forms("cpu").items():
        if name.startswith(PEERS) and not options.peers:
            continue
        try:
            steps[name] = build(case, "cpu")
            steps[name]()
        except Unavailable as reason:
            notes[name] = str(reason)
        except Exception as error:  # a way that fails on a case is a result, not the end of the benchmark
            notes[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:150]}" if str(error) else repr(error)
        if name in notes:
            steps.pop(name, None)
    with progress(case.name, options.rounds) as tell:
        rounds = interleaved(
            steps,
            base="plain",
            rounds=options.rounds,
            device="cpu",
            tolerated=options.tolerated,
            cpu_time=options.cpu_time,
            tell=tell,
        )
    names = list(steps)
    del steps
    gc.collect()
    memory = {} if options.no_memory else {name: peak(case, name) for name in names}
    show(case, rounds, memory, notes)
    timings = {name: asdict(timing) for name, timing in rounds.timings.items()}
    return {
        "rounds": rounds.kept,
        "dropped": rounds.dropped,
        "timings": timings,
        "peak_mib": memory,
        "unavailable": notes,
    }


def peak(case: Case, form: str) -> float | None:
    """Peak memory in MiB, the median of three fresh processes: what stays resident differs from one to the next."""
    command = [sys.executable, __file__, "--case", case.name, "--peak", form]
    done = [subprocess.run(command, capture_output=True, text=True, check=False) for _ in range(3)]
    found = [float(one.stdout.splitlines()[-1]) for one in done if one.returncode == 0]
    return statistics.median(found) if len(found) == len(done) else None


def show(case: Case, rounds: Rounds, memory: dict[str, float | None], notes: dict[str, str]) -> None:
    print(f"\n{case.name}: {rounds.kept} rounds, {rounds.dropped} dropped because other programs were busy")
    if not rounds.timings:
        print("  no undisturbed round: nothing is reported")
    base = memory.get("plain")
    for name, timing in rounds.timings.items():
        spread = f"({timing.low:.2f} to {timing.high:.2f})"
        line = f"  {name:24s} {timing.milliseconds:9.2f} ms  {timing.ratio:6.2f}x {spread:18s}"
        if (used := memory.get(name)) and base:
            line += f"  peak {used:7.0f} MiB  {used / base:5.2f}x"
        print(line)
    for name, note in notes.items():
        print(f"  {name:24s} not measured: {note}")
    best = {side: fastest(rounds, side) for side in ("plain", "hush")}
    if len(rounds.timings) > 2 and all(best.values()):
        print(f"  fastest hush against fastest plain: {best['hush'] / best['plain']:.2f}x")


def fastest(rounds: Rounds, side: str) -> float | None:
    times = [timing.milliseconds for name, timing in rounds.timings.items() if name.startswith(side)]
    return min(times, default=None)


@contextlib.contextmanager
def progress(title: str, total: int) -> Iterator:
    """A progress bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.advance(task)


if __name__ == "__main__":
    main()
