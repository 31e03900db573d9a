"""The acceptance on a GPU, in its tiny form on the CPU: every part runs and is judged; a second run repeats nothing."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_acceptance.py"


def accept(file: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--tiny", "--json", str(file), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_every_part_runs_and_is_judged_once(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    done = accept(file)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads(file.read_text())["parts"]
    assert set(parts) == {"noise", "tests", "step"}
    (tests,) = parts["tests"]["lines"]
    assert tests["holds"] is True and "passed" in tests["measured"]
    assert parts["step"]["lines"][0]["measured"].endswith("x")
    before = file.read_bytes()
    assert "step ..." not in accept(file).stdout and file.read_bytes() == before


def test_a_part_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    done = accept(tmp_path / "found.json", "--parts", "nosie")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not (tmp_path / "found.json").exists()
