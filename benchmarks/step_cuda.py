"""The step benchmark on a GPU: every case in processes of its own, which compile side by side and are timed alone.

First all cases are prepared at once: every way is built and run, which fills the compiler's cache on disk; its memory
is read; in another process sums are compared with float64. Nothing of that is timed. Then one case after another has
the GPU for itself, all its ways in turns in one process. What is known is written after each case; a case that fails
loses only itself. What would take longer than `--limit` is ended and reported as missing.

Memory is what PyTorch's allocator reserved while the steps ran, its cache emptied before: for a CUDA graph that is the
pool that the graph keeps, for other ways the largest need. What the allocator gave out at once is not compared: the
memory of a graph counts as free between replays, although nobody else can have it.
"""

import argparse
import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import torch
from cases import Case, cases
from exactness import exactness, lines
from forms import Step, Unavailable, captured, forms
from measure import Rounds, interleaved, machine, reserved_mib

CASES = ("mlp60", "cnn24", "wrn16-4", "gpt2-512", "gpt2-2048", "gpt2-lora")
ASKED = {"mlp60": 1.8, "cnn24": 1.4, "wrn16-4": 1.6, "gpt2-512": 1.35, "gpt2-2048": 1.4, "gpt2-lora": 1.2}
PEERS = "opacus"
PHASES = ("prepare", "exact", "time")
CAPTURED = {"plain captured": "plain", "plain compiled+captured": "plain compiled"}
"""Ways that are graphs of another: that one is captured, not built and compiled again."""
JAX = f"not measured: {'no way is written for it' if find_spec('jax_privacy') else 'jax_privacy is not installed here'}"


def measure_all(options: argparse.Namespace) -> None:
    """The whole benchmark; prints a table for each case and writes everything to `options.json`."""
    start = time.monotonic()
    chosen = options.case or list(CASES)
    results = {
        "machine": machine("cuda"),
        "date": time.strftime("%Y-%m-%d"),
        "clock": "wall",
        "memory": "MiB reserved by PyTorch's allocator during the steps, pools of graphs included on both sides",
        "padding": "lots of rate 1 in one batch of fixed shape with a mask: no padding rows in the timed steps",
        "jax-privacy": JAX,
        "cases": {name: {} for name in chosen},
    }
    print(", ".join(f"{key} {value}" for key, value in results["machine"].items()))
    with tempfile.TemporaryDirectory() as folder:
        parts = {(name, phase): Path(folder, f"{name}-{phase}.json") for name in chosen for phase in PHASES}
        # The longest first: they decide how long all of it takes.
        early = [(name, phase) for name in reversed(chosen) for phase in ("prepare", "exact")]
        running = [_child(name, phase, parts[name, phase], options) for name, phase in early]
        for process in running:
            _go(process)
        _all_at_once(running, 0.45 * options.limit)
        print(f"prepared in {time.monotonic() - start:.0f} s", flush=True)
        waiting = {name: _child(name, "time", parts[name, "time"], options) for name in chosen}
        for name in chosen:
            left = options.limit - (time.monotonic() - start)
            _go(waiting[name])
            _all_at_once([waiting[name]], max(0.0, left))
            found = results["cases"][name]
            for phase in PHASES:
                file = parts[name, phase]
                found |= json.loads(file.read_text()) if file.exists() else {f"{phase} failed": True}
            show(name, found)
            if options.json:
                options.json.parent.mkdir(parents=True, exist_ok=True)
                options.json.write_text(json.dumps(results, indent=1) + "\n")
    print(f"jax-privacy {JAX}")
    summary(results["cases"])
    print(f"{time.monotonic() - start:.0f} s in all" + (f", written to {options.json}" if options.json else ""))


def _child(name: str, phase: str, part: Path, options: argparse.Namespace) -> subprocess.Popen:
    command = [sys.executable, str(Path(__file__).with_name("step.py")), "--device", "cuda", "--case", name]
    command += ["--phase", phase, "--json", str(part), "--rounds", str(options.rounds)]
    command += ["--peers"] if options.peers else []
    cache = Path(tempfile.gettempdir(), "hush-benchmark-inductor")
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(cache), **os.environ}
    if phase != "time":  # many processes at once: none of them may take all cores
        environment |= {"TORCHINDUCTOR_COMPILE_THREADS": "2", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=sys.stdout, stderr=sys.stderr)


def _go(process: subprocess.Popen) -> None:
    """Let a child begin that has imported everything and waits for the GPU."""
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()


def _all_at_once(running: list[subprocess.Popen], seconds: float) -> None:
    """Wait for all of them, and end those that take longer than allowed; what they wrote so far is kept."""
    end = time.monotonic() + seconds
    for process in running:
        try:
            process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            print(f"ended after {seconds:.0f} s: {' '.join(process.args[3:])}", file=sys.stderr)


def one_phase(options: argparse.Namespace) -> None:
    """What a child process does."""
    case = cases("cuda")[options.case[0]]
    torch.ones(1, device="cuda")
    sys.stdin.read()  # until it is this process's turn
    found: dict = {}

    def save() -> None:
        whole = options.json.with_suffix(".whole")
        whole.write_text(json.dumps(found))
        whole.replace(options.json)  # a process that is ended leaves no half of a file

    {"prepare": prepare, "exact": compare, "time": measure}[options.phase](case, options, found, save)
    save()


def prepare(case: Case, options: argparse.Namespace, found: dict, save: Callable[[], None]) -> None:
    """Memory of every way, each alone in turn; what is compiled lands in the cache on disk."""
    found |= {"reserved_mib": {}, "unavailable": {}}
    for name, build in forms("cuda", case).items():
        if name.startswith(PEERS) and not options.peers:
            continue
        answer = _or_error(lambda build=build: reserved_mib(lambda: build(case, "cuda")))
        found["unavailable" if isinstance(answer, str) else "reserved_mib"][name] = answer
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
        save()


def compare(case: Case, options: argparse.Namespace, found: dict, save: Callable[[], None]) -> None:
    """The sums of every way against float64."""
    found["exactness"] = {}
    for kind in ("bf16", "fp32") if case.autocast else ("fp32",):

        def all_ways(kind: str = kind) -> None:
            for known in exactness(case, kind, "cuda"):
                found["exactness"][kind] = known
                save()

        if failed := _or_error(all_ways):
            found["exactness"].setdefault(kind, {"ways": {}})["failed"] = failed
        gc.collect()
        torch.cuda.empty_cache()


def measure(case: Case, options: argparse.Namespace, found: dict, save: Callable[[], None]) -> None:
    """Times, all ways in turns; Opacus afterwards beside the plain step, since it may take the process with it."""
    steps, notes = _build(case, [name for name in forms("cuda", case) if not name.startswith(PEERS)])
    rounds = interleaved(steps, base="plain", rounds=options.rounds, device="cuda", slot=0.1)
    found |= {"timings": {name: asdict(timing) for name, timing in rounds.timings.items()}, "not timed": notes}
    found["ratio"] = _fastest(rounds)
    save()
    if options.peers:
        steps = {name: step for name, step in steps.items() if name == "plain"}
        gc.collect()
        torch.cuda.empty_cache()
        more, failed = _build(case, [name for name in forms("cuda", case) if name.startswith(PEERS)])
        rounds = interleaved(steps | more, base="plain", rounds=3, device="cuda", slot=0.05)
        found["peers"] = {name: asdict(timing) for name, timing in rounds.timings.items()}
        notes |= failed


def _build(case: Case, names: list[str]) -> tuple[dict[str, Step], dict[str, str]]:
    steps: dict[str, Step] = {}
    notes: dict[str, str] = {}

    def build(name: str) -> Step:
        base = steps.get(CAPTURED.get(name, ""))
        step = captured(base) if base is not None else forms("cuda", case)[name](case, "cuda")
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        return step

    for name in names:
        step = _or_error(lambda name=name: build(name))
        if isinstance(step, str):
            notes[name] = step
        else:
            steps[name] = step
    return steps, notes


def _or_error(build: Callable):
    """What it gives, or the first line of what went wrong: a way that fails on a case is a result."""
    try:
        return build()
    except Unavailable as reason:
        return str(reason)
    except Exception as error:
        return f"{type(error).__name__}: {(str(error).strip() or repr(error)).splitlines()[0][:200]}"


def _fastest(rounds: Rounds) -> dict:
    """The fastest hush against the fastest plain way, in the same rounds."""
    best = {
        side: min((name for name in rounds.timings if name.startswith(side)), key=rounds.median, default=None)
        for side in ("plain", "hush")
    }
    if None in best.values():
        return {}
    timing = rounds.against(best["hush"], best["plain"])
    return {"plain": best["plain"], "hush": best["hush"], **asdict(timing)}


def show(name: str, found: dict) -> None:
    print(f"\n{name}: all rows count, no padding rows in the timed steps (0 %)")
    memory = found.get("reserved_mib", {})
    for way, timing in {**found.get("timings", {}), **found.get("peers", {})}.items():
        spread = f"({timing['low']:.2f} to {timing['high']:.2f})"
        line = f"  {way:40s} {timing['milliseconds']:9.3f} ms  {timing['ratio']:6.2f}x {spread:16s}"
        print(line + (f" {memory[way]:7.0f} MiB" if way in memory else ""))
    for way, note in {**found.get("unavailable", {}), **found.get("not timed", {})}.items():
        print(f"  {way:40s} not measured: {note}")
    for kind, errors in found.get("exactness", {}).items():
        for line in lines(kind, errors):
            print(f"  {line}")
    sys.stdout.flush()


def summary(found: dict[str, dict]) -> None:
    print(f"\n{'case':10s} {'fastest plain':>44s} {'fastest hush':>32s} {'ratio':>22s} asked  memory (MiB)")
    for name, case in found.items():
        if not case.get("ratio"):
            print(f"{name:10s} not measured")
            continue
        best, memory = case["ratio"], case.get("reserved_mib", {})
        plain, hush = (
            f"{best[side]} {case['timings'][best[side]]['milliseconds']:.3f} ms" for side in ("plain", "hush")
        )
        ratio = f"{best['ratio']:.2f} ({best['low']:.2f} to {best['high']:.2f})"
        used = [memory.get(best[side]) for side in ("plain", "hush")]
        told = f"{used[0]:.0f} -> {used[1]:.0f}, {used[1] / used[0]:.2f}x" if all(used) else ""
        print(f"{name:10s} {plain:>44s} {hush:>32s} {ratio:>22s} {ASKED.get(name, ''):>5}  {told}")
