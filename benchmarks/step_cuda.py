"""The step benchmark on a GPU: every case in a process of its own; all are prepared side by side, then timed alone.

All cases build and compile their ways at once and read the memory of each; in further processes sums are compared with
float64. Nothing of that is timed. Then one case after another has the GPU for itself, all its ways in turns. When all
cases are timed, ways that are seldom the fastest and Opacus follow, as long as there is time: what would take longer
than `--limit` is ended and reported as missing. What is known is written after each step; a case that fails loses only
itself.

Memory is what PyTorch's allocator reserved while the steps ran, its cache emptied before: for a CUDA graph that is the
pool that the graph keeps, for other ways the largest need. What the allocator gave out at once is not compared: the
memory of a graph counts as free between replays, although nobody else can have it.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from measure import machine
from table import show, summary

CASES = ("mlp60", "cnn24", "wrn16-4", "gpt2-512", "gpt2-2048", "gpt2-lora")
JAX = f"not measured: {'no way is written for it' if find_spec('jax_privacy') else 'jax_privacy is not installed here'}"


def measure_all(options: argparse.Namespace) -> None:
    """The whole benchmark; prints a table for each case and writes everything to `options.json`."""
    end = time.monotonic() + options.limit
    chosen = options.case or list(CASES)
    results = {
        "machine": machine("cuda"),
        "date": time.strftime("%Y-%m-%d"),
        "clock": "wall",
        "memory": "MiB reserved by PyTorch's allocator during the steps, pools of graphs included on both sides",
        "padding": "lots of rate 1 in one batch of fixed shape with a mask: no padding rows in the timed steps",
        "jax-privacy": JAX,
        "cases": {},
    }
    print(", ".join(f"{key} {value}" for key, value in results["machine"].items()), flush=True)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        # The longest first: they decide how long all of it takes.
        timed = {name: stack.enter_context(Child(name, "time", folder, options)) for name in reversed(chosen)}
        exact = {name: stack.enter_context(Child(name, "exact", folder, options)) for name in reversed(chosen)}
        early = time.monotonic() + 0.5 * options.limit
        for name in reversed(chosen):
            timed[name].wait_for("ready", early)
        for name in reversed(chosen):
            exact[name].wait_for("done", early)
            exact[name].end()
        print(f"prepared, {end - time.monotonic():.0f} s left", flush=True)

        def known(name: str) -> dict:
            return timed[name].found() | exact[name].found()

        def write() -> None:
            results["cases"] = {name: known(name) for name in chosen}
            if options.json:
                options.json.parent.mkdir(parents=True, exist_ok=True)
                options.json.write_text(json.dumps(results, indent=1) + "\n")

        ready = sorted(chosen, key=lambda name: "ready" not in timed[name].found().get("stages", ()))
        for order in ("main", "rest"):
            for name in ready:
                if end - time.monotonic() > 8:
                    timed[name].wait_for("ready", end)
                    timed[name].tell(order)
                    timed[name].wait_for(order, end)
                write()
            if order == "main":
                summary(results["cases"])
        for child in timed.values():
            child.end()
        for name in chosen:
            show(name, results["cases"][name])
    print(f"jax-privacy {JAX}")
    summary(results["cases"])
    print(
        f"{options.limit - end + time.monotonic():.0f} s in all" + (f", written to {options.json}" * bool(options.json))
    )


class Child:
    """A process for one case; it writes what it knows, and how far it is, to a file."""

    def __init__(self, case: str, phase: str, folder: str, options: argparse.Namespace) -> None:
        self._file = Path(folder, f"{case}-{phase}.json")
        command = [sys.executable, str(Path(__file__).with_name("step.py")), "--device", "cuda", "--case", case]
        command += ["--phase", phase, "--json", str(self._file), "--rounds", str(options.rounds)]
        command += ["--peers"] if options.peers else []
        cache = Path(tempfile.gettempdir(), "hush-benchmark-inductor")
        # Many processes at once: none of them may take all cores.
        shared = {"TORCHINDUCTOR_COMPILE_THREADS": "2", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        environment = {"TORCHINDUCTOR_CACHE_DIR": str(cache)} | os.environ | shared
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=sys.stdout, stderr=sys.stderr, text=True
        )

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def found(self) -> dict:
        return json.loads(self._file.read_text()) if self._file.exists() else {}

    def tell(self, order: str) -> None:
        with contextlib.suppress(OSError):
            self._process.stdin.write(order + "\n")
            self._process.stdin.flush()

    def wait_for(self, stage: str, until: float) -> None:
        """Until it has come so far, has ended, or it is too late."""
        while time.monotonic() < until and self._process.poll() is None:
            if stage in self.found().get("stages", ()):
                return
            time.sleep(0.1)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(OSError):
            self._process.stdin.close()
