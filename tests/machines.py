"""The suite on machines that are not this one, as far as one machine can play another.

    python tests/machines.py                     every row, one after another
    python tests/machines.py --rows avx2,one-thread
    python tests/machines.py --rows commit       one processor that is not this one, chosen by the commit
    python tests/machines.py --list

A processor row asks PyTorch, oneDNN and OpenBLAS for the kernels of another processor. A torch row makes an
environment of its own, runs the suite there and deletes it (a minute's download, up to 6 GB of disk while it lasts).
Ends with a table, and with status 1 if a row failed.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

HOME = Path(__file__).parent.parent
SUITE = ["-m", "not long and not timing", "-p", "no:cacheprovider"]


@dataclass(frozen=True)
class Row:
    """One machine: environment variables, or the packages of an environment of its own."""

    variables: dict[str, str] = field(default_factory=dict)
    packages: tuple[str, ...] = ()
    python: str = sys.executable


def _processor(aten: str, onednn: str, openblas: str) -> Row:
    return Row({"ATEN_CPU_CAPABILITY": aten, "ONEDNN_MAX_CPU_ISA": onednn, "OPENBLAS_CORETYPE": openblas})


ROWS = {
    "native": Row(),
    "no-avx": _processor("default", "SSE41", "Nehalem"),
    "avx2": _processor("avx2", "AVX2", "Haswell"),
    "avx512": _processor("avx512", "AVX512_CORE", "SkylakeX"),
    "zen": _processor("avx2", "AVX2", "Zen"),
    "four-threads": Row({"OMP_NUM_THREADS": "4"}),
    "oldest-numpy-scipy": Row(packages=("torch==2.13.0", "numpy==2.0.2", "scipy==1.13.1")),
    # numpy 2.4 breaks the Triton interpreter that comes with torch 2.10
    "torch-2.10": Row(packages=("torch==2.10.0", "numpy<2.4")),
    "torch-2.11": Row(packages=("torch==2.11.0", "numpy<2.4")),
    "torch-2.12": Row(packages=("torch==2.12.0",)),
    "torch-2.13": Row(packages=("torch==2.13.0",)),
    "torch-2.14": Row(packages=("torch==2.14.0",)),
    "torch-newest": Row(packages=("torch",)),
}
WITHOUT_DOWNLOADS = [name for name, row in ROWS.items() if not row.packages]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS), help="names, or 'commit', or 'here' (no downloads)")
    parser.add_argument("--tests", nargs="*", default=["src", "tests"], help="which tests (default: all)")
    parser.add_argument("--json", type=Path, help="write the table there, too")
    parser.add_argument("--list", action="store_true", help="print the rows and stop")
    options = parser.parse_args()
    if options.list:
        print(
            *(f"{name:20} {row.variables or ' '.join(row.packages) or 'as it is'}" for name, row in ROWS.items()),
            sep="\n",
        )
        return 0
    table = [_try(name, ROWS[name], options.tests) for name in _chosen(options.rows)]
    print(f"\n{'machine':20} {'seconds':>8}  outcome")
    print(*(f"{line['machine']:20} {line['seconds']:8}  {line['outcome']}" for line in table), sep="\n")
    if options.json:
        options.json.write_text(json.dumps(table, indent=1) + "\n")
    return any(line["failed"] for line in table)


def _chosen(rows: str) -> list[str]:
    if rows == "here":
        return WITHOUT_DOWNLOADS
    if rows == "commit":
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=HOME, capture_output=True, text=True, check=True)
        others = WITHOUT_DOWNLOADS[1:]
        return [others[int(commit.stdout[:8], 16) % len(others)]]
    wrong = [name for name in rows.split(",") if name not in ROWS]
    if wrong:
        sys.exit(f"machines: no row is called {', '.join(wrong)}; there are {', '.join(ROWS)}")
    return rows.split(",")


def _try(name: str, row: Row, tests: list[str]) -> dict[str, object]:
    began = time.monotonic()
    print(f"\n=== {name}", flush=True)
    with tempfile.TemporaryDirectory(prefix="hush-machine-") as folder:
        try:
            python = _environment(row, Path(folder)) if row.packages else row.python
        except subprocess.CalledProcessError as broken:
            return {
                "machine": name,
                "seconds": round(time.monotonic() - began),
                "failed": True,
                "outcome": f"could not be built: {broken}",
            }
        variables = {"OMP_NUM_THREADS": "1", **os.environ, **row.variables}
        run = subprocess.run(
            [python, "-m", "pytest", "-n", "2", *SUITE, "--doctest-modules", *tests],
            cwd=HOME, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
    lines = run.stdout.strip().splitlines()
    print(*lines[-1 if run.returncode == 0 else -40 :], sep="\n", flush=True)
    outcome = lines[-1].strip("= ") if lines else f"status {run.returncode}"
    return {
        "machine": name,
        "seconds": round(time.monotonic() - began),
        "failed": run.returncode != 0,
        "outcome": outcome,
    }


def _environment(row: Row, folder: Path) -> str:
    """An environment with these packages, the package itself and what its tests need."""
    subprocess.run([row.python, "-m", "venv", folder], check=True)
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "setuptools>=77", "wheel", *row.packages], check=True)
    subprocess.run([*pip, "--no-build-isolation", "--editable", f"{HOME}[test]", *row.packages], check=True)
    shutil.rmtree(HOME / "build", ignore_errors=True)
    return python


if __name__ == "__main__":
    sys.exit(main())
