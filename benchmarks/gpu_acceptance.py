"""What only a GPU can show, in parts of less than nine minutes, ending in a table: sentence, limit, measured, verdict.

    python benchmarks/gpu_acceptance.py                      every part that has no result yet for this commit
    python benchmarks/gpu_acceptance.py --parts tests,step   these, again
    python benchmarks/gpu_acceptance.py --device cpu --tiny  the same code on little, in a minute

Needs torch, numpy and scipy; the part `tests` also pytest, and says so where it is missing. What a part found lies
in `results/gpu-acceptance.json`, with the commit and the device; a stopped run goes on with the next part.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch

HOME = Path(__file__).resolve().parents[1]
GPU_TESTS = ("gradients", "kernels", "captured", "noise", "training/test_fit_cuda.py")
TINY_TESTS = ("kernels/test_noise_kernels.py", "-k", "keystream or chacha")
RATIO_LIMIT, MEMORY_LIMIT = 1.30, 1.25


class Line(NamedTuple):
    sentence: str
    limit: str
    measured: str
    holds: bool | None
    """None: not measured, with the reason in `measured`."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", help=f"of {', '.join(PARTS)}; default: those without a result")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="little of everything; its numbers mean nothing")
    parser.add_argument("--seconds", type=float, default=520.0, help="the most that one part may take")
    parser.add_argument("--json", type=Path, default=HOME / "results" / "gpu-acceptance.json")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpu_acceptance: this machine has no GPU that torch can use", file=sys.stderr)
        return 2
    wanted = (options.parts or ",".join(PARTS)).split(",")
    if wrong := [name for name in wanted if name not in PARTS]:
        print(f"gpu_acceptance: no part {', '.join(wrong)}; there are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    results = known(options)
    for name in wanted:
        if options.parts is None and name in results["parts"]:
            continue
        began = time.monotonic()
        print(f"{name} ...", flush=True)
        lines = PARTS[name](options)
        if options.tiny:
            lines = [line if line.limit == "all" else line._replace(holds=None) for line in lines]
        results["parts"][name] = {
            "seconds": round(time.monotonic() - began),
            "lines": [line._asdict() for line in lines],
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    table = [Line(**line) for part in results["parts"].values() for line in part["lines"]]
    show(results, table)
    return int(any(line.holds is False for line in table))


def known(options: argparse.Namespace) -> dict:
    """What was found before, if it was found on this commit and device."""
    about = {
        "commit": commit(),
        "device": device_name(options.device),
        "torch": torch.__version__,
        "tiny": options.tiny,
    }
    if options.json.exists():
        found = json.loads(options.json.read_text())
        if {key: found.get(key) for key in about} == about:
            return found
    return {**about, "date": time.strftime("%Y-%m-%d"), "parts": {}}


def tests(options: argparse.Namespace) -> list[Line]:
    """The tests that use the GPU where there is one: kernels against float64, captured steps against eager ones."""
    sentence = "every test of the rooms with GPU code passes on this device"
    if importlib.util.find_spec("pytest") is None:
        return [Line(sentence, "all", "pytest is not installed", None)]
    chosen = TINY_TESTS if options.tiny else GPU_TESTS
    paths = [str(HOME / "tests" / name) if "/" in name or (HOME / "tests" / name).exists() else name for name in chosen]
    done = run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not long and not timing", *paths],
        options,
    )
    last = (done.splitlines() or ["nothing was printed"])[-1].strip("= ")
    return [Line(sentence, "all", last, "passed" in last and "failed" not in last and "error" not in last)]


def noise(options: argparse.Namespace) -> list[Line]:
    """The law of the noise as it is released, and that two releases never repeat."""
    from scipy import stats

    from hush.clipping import BoundedSum
    from hush.clipping.bounded_sum import Group
    from hush.noise.gaussian import add_noise
    from hush.randomness.gaussian_samples import Normals
    from hush.randomness.streams import Key

    count = 10_000 if options.tiny else 10_000_000
    total = BoundedSum({"w": torch.zeros(count, device=options.device)}, (Group(("w",), 0.5),))
    normals = Normals(Key.from_seed(1))
    first, second = (
        add_noise(total, noise_multiplier=3.0, normals=normals, step=step)["w"].double().cpu().numpy() / 1.5
        for step in (0, 1)
    )
    p = float(stats.kstest(first[:1_000_000], "norm").pvalue)
    off = abs(float(first.var()) - 1) / (2 / count) ** 0.5
    both = abs(float((first * second).mean())) * count**0.5
    return [
        Line("released noise is normal (Kolmogorov-Smirnov)", "p > 1e-4", f"p = {p:.3f}", p > 1e-4),
        Line("its variance is (multiplier x bound)^2", "5 standard errors", f"{off:.1f}", off < 5),
        Line("noise of two steps is uncorrelated", "5 standard errors", f"{both:.1f}", both < 5),
    ]


def step(options: argparse.Namespace) -> list[Line]:
    """Time and memory beside non-private training: the fastest form of each."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "step.json"
        command = [
            sys.executable,
            str(HOME / "benchmarks" / "step.py"),
            "--device",
            options.device,
            "--json",
            str(file),
        ]
        if options.tiny:
            command += ["--case", "mlp60", "--rounds", "1", "--no-memory", "--tolerated", "1"]
        elif options.device == "cuda":
            command += ["--limit", str(options.seconds - 20)]
        said = run(command, options)
        if not file.exists():
            return [Line("the step benchmark runs", "it does", said[-200:] or "nothing was printed", False)]
        cases = json.loads(file.read_text())["cases"]
    return [line for name, case in cases.items() for line in step_lines(name, case)]


def step_lines(name: str, case: dict) -> list[Line]:
    best = case.get("ratio")
    if best is None:  # on a CPU the benchmark leaves the choice of the fastest to its reader
        times = {way: timing["milliseconds"] for way, timing in case.get("timings", {}).items()}
        sides = {
            side: min((t for way, t in times.items() if way.startswith(side)), default=None)
            for side in ("plain", "hush")
        }
        ratio = sides["hush"] / sides["plain"] if all(sides.values()) else None
        memory = {}
    else:
        ratio, memory = best["ratio"], case.get("reserved_mib", {})
    lines = [judged(f"{name}: a private step beside a plain one", ratio, RATIO_LIMIT)]
    if best and all(best[side] in memory for side in ("plain", "hush")):
        lines.append(
            judged(f"{name}: memory beside a plain step", memory[best["hush"]] / memory[best["plain"]], MEMORY_LIMIT)
        )
    return lines


def judged(sentence: str, ratio: float | None, limit: float) -> Line:
    if ratio is None:
        return Line(sentence, f"<= {limit:.2f}x", "not measured", None)
    return Line(sentence, f"<= {limit:.2f}x", f"{ratio:.2f}x", ratio <= limit)


PARTS = {"noise": noise, "tests": tests, "step": step}


def run(command: list[str], options: argparse.Namespace) -> str:
    """What it printed; a part that takes too long is stopped, and says so."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HOME / "src"), os.environ.get("PYTHONPATH", "")])}
    try:
        done = subprocess.run(
            command,
            cwd=HOME,
            env=environment,
            timeout=options.seconds,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except subprocess.TimeoutExpired:
        return f"failed: stopped after {options.seconds:.0f} s"
    if done.returncode:
        print(done.stdout[-6000:])
    return done.stdout.strip()


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=HOME, capture_output=True, text=True, check=False)
    return os.environ.get("HUSH_COMMIT") or done.stdout.strip() or "unknown"


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def show(results: dict, table: list[Line]) -> None:
    print(
        f"\n{results['device']}, torch {results['torch']}, commit {results['commit'][:9]}" + ", tiny" * results["tiny"]
    )
    print(f"{'sentence':62} {'limit':>18} {'measured':>18}  verdict")
    for line in table:
        verdict = {True: "holds", False: "DOES NOT HOLD", None: "open"}[line.holds]
        print(f"{line.sentence:62} {line.limit:>18} {line.measured[:60]:>18}  {verdict}")


if __name__ == "__main__":
    sys.exit(main())
