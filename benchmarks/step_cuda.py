"""The step benchmark on a GPU: a process for each thing to find out, many at a time; what is timed has the GPU alone.

1. Every compiled way of every case is built in a fresh process, which reads its memory and leaves compiled code in the
   cache that all share.
2. A process for each case builds all its ways from there. Beside that, sums are compared with float64.
3. All other processes are stopped, and one case after another is timed, all its ways in turns in one process.
4. The memory of the other ways, and time and memory of Opacus and jax-privacy, each in a fresh process, as long as
   there is time: what would take longer than `--limit` is ended and reported as missing.

What is known is written after each step; what fails loses only itself. Memory is what PyTorch's allocator reserved
while the steps ran, its cache emptied before: for a CUDA graph that is the pool that the graph keeps, for other ways
the largest need; workspaces of cuBLAS are part of it on both sides. What the allocator gave out at once is not
compared: the memory of a graph counts as free between replays, although nobody else can have it. For JAX it is the
most that its allocator gave out at once, without what that keeps in reserve: a reading in favour of JAX.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from cases import cases
from crew import Child, Crew, Job
from forms import PEERS, SELDOM, forms
from measure import machine
from table import show, summary

CASES = ("mlp60", "cnn24", "wrn16-4", "gpt2-512", "gpt2-2048", "gpt2-lora")
SLOWEST = ("wrn16-4", "gpt2-512", "gpt2-2048", "gpt2-lora", "cnn24", "mlp60")
"""Those that compile longest come first: they decide how long all of it takes."""
GIB = 128.0
"""Of the GPU's memory, for all processes together."""


def measure_all(options: argparse.Namespace) -> None:
    """The whole benchmark; prints a table for each case and writes everything to `options.json`."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no process stays behind
    end = time.monotonic() + options.limit - 5
    chosen = options.case or list(CASES)
    results = {
        "machine": machine("cuda"),
        "date": time.strftime("%Y-%m-%d"),
        "clock": "wall",
        "memory": "MiB reserved by PyTorch's allocator in a process for each way, pools of graphs included; "
        "for JAX the most that its allocator gave out",
        "padding": "lots of rate 1 in one batch of fixed shape with a mask: no padding rows in the timed steps",
        "cases": {},
    }
    print(", ".join(f"{key} {value}" for key, value in results["machine"].items()), flush=True)
    with tempfile.TemporaryDirectory() as folder:

        def start(job: Job) -> Child:
            return begin(job, Path(folder), options)

        with Crew(start, most=max(2, os.cpu_count() or 2), gib=GIB) as crew:

            def write() -> None:
                results["cases"] = gathered(crew, chosen)
                if options.json:
                    options.json.parent.mkdir(parents=True, exist_ok=True)
                    options.json.write_text(json.dumps(results, indent=1) + "\n")

            timed = ask(crew, sorted(chosen, key=SLOWEST.index))
            crew.wait(time.monotonic() + 0.6 * options.limit, lambda: all(crew.at(job, "ready") for job in timed))
            print(f"prepared, {end - time.monotonic():.0f} s left", flush=True)
            write()
            for job in sorted(timed, key=lambda job: not crew.at(job, "ready")):
                crew.wait(end, lambda job=job: crew.at(job, "ready"))
                take(crew, job, end)
                crew.end(job)
                write()
            summary(results["cases"])
            rest(crew, options, results["cases"], end, write)
            write()
        for name in chosen:
            show(name, results["cases"][name])
    summary(results["cases"])
    took = options.limit - 5 - end + time.monotonic()
    print(f"{took:.0f} s in all" + (f", written to {options.json}" * bool(options.json)))


def ask(crew: Crew, chosen: list[str]) -> list[Job]:
    """Asks for what the main figures need, and returns the jobs that time it."""
    known, timed = cases("cuda"), []
    built = {name: [way(name, form) for form in forms("cuda", known[name]) if "compiled+" in form] for name in chosen}
    # All hush ways first, then all others: hush compiles longest.
    crew.add(job for name in chosen for job in built[name] if job.part.startswith("hush"))
    crew.add(job for name in chosen for job in built[name] if not job.part.startswith("hush"))
    for name in chosen:
        timed.append(Job(name, "time", gib=22.0 if name.startswith("gpt2") else 4.0, listens=True))
        crew.add([timed[-1]], after=built[name])
    for kind in ("fp32", "bf16"):  # small models first: where time ends, as much as possible is known
        compared = [name for name in reversed(chosen) if known[name].autocast or kind == "fp32"]
        crew.add(comparison(name, kind) for name in compared)
    return timed


def comparison(case: str, kind: str) -> Job:
    return Job(case, "exact", kind, gib=34.0 if case == "gpt2-2048" else 20.0 if case.startswith("gpt2") else 3.0)


def way(case: str, form: str, listens: bool = False) -> Job:
    large = case.startswith("gpt2")
    if form.startswith(PEERS):
        gib = 30.0 if large or case == "cnn24" else 6.0  # gradients of every example
        return Job(case, "way", form, gib=1.5 * gib if form == "jax-privacy" else gib, listens=listens)
    return Job(case, "way", form, gib=14.0 if large else 3.0, listens=listens)


def rest(crew: Crew, options: argparse.Namespace, found: dict, end: float, write) -> None:
    """Everything but the main figures: peers, graphs of large models that are not compiled, memory of other ways."""
    known, jobs = cases("cuda"), []
    for name in found:
        memory, times = found[name]["reserved_mib"], found[name].get("timings", {})
        others = [form for form in forms("cuda", known[name]) if form not in memory]
        for form in others if options.peers else [form for form in others if not form.startswith(PEERS)]:
            jobs.append(way(name, form, listens=form.startswith(PEERS) or form not in times))

    def order(job: Job) -> tuple:
        best = found[job.case].get("ratio", {})
        return job.part not in (best.get("plain"), best.get("hush")), not job.part.startswith(PEERS), job.part in SELDOM

    jobs.sort(key=order)
    crew.add(jobs)  # after the comparisons, which matter more than peers
    left = list(jobs)
    while left and time.monotonic() < end - 4:
        crew.wait(end - 4, lambda: any(crew.at(job, "memory") for job in left))
        for job in [job for job in left if crew.at(job, "memory")]:
            left.remove(job)
            if job.listens:
                take(crew, job, end)
            crew.end(job)
            write()
    # Comparisons that are not done yet may use what time is left.
    compared = [job for job, *_ in crew.found() if job.phase == "exact"]
    crew.wait(end, lambda: all(crew.over(job) for job in compared))


def take(crew: Crew, job: Job, end: float) -> None:
    """Let it be timed, alone on the machine."""
    if crew.at(job, "memory" if job.phase == "way" else "ready") and not crew.over(job) and time.monotonic() < end - 4:
        with crew.alone(job) as child:
            child.tell("time")
            until = min(end, time.monotonic() + 40)
            while not child.at("timed") and time.monotonic() < until:
                time.sleep(0.05)


def begin(job: Job, folder: Path, options: argparse.Namespace) -> Child:
    file = folder / f"{job.case}-{job.phase}-{job.part.replace(' ', '-').replace(',', '')}.json"
    command = [sys.executable, str(Path(__file__).with_name("step.py")), "--device", "cuda", "--case", job.case]
    command += ["--phase", job.phase, "--part", job.part, "--json", str(file), "--rounds", str(options.rounds)]
    cache = Path(tempfile.gettempdir(), "hush-benchmark-inductor")
    # Many processes at once: none of them may take all cores.
    shared = {"TORCHINDUCTOR_COMPILE_THREADS": "2", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(cache)} | os.environ | shared
    return Child(command, file, environment, job.listens)


def gathered(crew: Crew, chosen: list[str]) -> dict[str, dict]:
    """What all processes know, by case."""
    found: dict[str, dict] = {name: {"reserved_mib": {}, "unavailable": {}, "exactness": {}} for name in chosen}
    for job, known, trouble in crew.found():
        case = found[job.case]
        for key, value in known.items():
            if key == "stages":
                continue
            if isinstance(value, dict):
                case.setdefault(key, {}).update(value)
            else:
                case[key] = value
        if trouble:
            name = job.part if job.phase == "way" else f"{job.phase} {job.part}".strip()
            case["unavailable"][name] = trouble
    return found
