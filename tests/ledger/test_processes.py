"""Many processes, and processes that die."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hush.ledger import Ledger

HERE = Path(__file__).parent


def test_eight_processes_pass_no_cap_and_lose_no_charge(tmp_path):
    done = subprocess.run(
        [sys.executable, HERE / "concurrent_runs.py", tmp_path], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    granted: dict[str, int] = {}
    for path in tmp_path.glob("granted-*"):
        granted |= json.loads(path.read_text())
    with Ledger(tmp_path / "data.hush") as ledger:
        pages = {page.name: page.spent for page in ledger.accounts()}
        assert pages == granted, "a charge was lost or invented"
        assert len(pages) == 30, "slices of 0.1 under a cap of 3: thirty, not one more or less"
        assert ledger.spent(delta=1e-5).upper == 3.0
        assert len({name.split("-")[0] for name in pages}) > 1, "the processes did not run at the same time"


def test_hazard_21_kills_at_any_moment_leave_no_release_without_its_charge():
    counts = kill_test(kills=40, seed=1)
    assert counts["kills"] == 40 and counts["released"] > 200


@pytest.mark.long
def test_two_hundred_kills():
    assert kill_test(kills=250, seed=2)["kills"] == 250


@pytest.mark.long
def test_two_hundred_kills_of_a_network_in_training():
    counts = kill_test("--training", kills=200, seed=3)
    assert counts["kills"] == 200 and counts["released"] > 500


def kill_test(*options: str, kills: int, seed: int) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, HERE / "kill_test.py", "--kills", str(kills), "--seed", str(seed), *options],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return {name: int(count) for name, count in (pair.split("=") for pair in done.stdout.split())}
