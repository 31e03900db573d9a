"""The ledger under random attack by real processes (ledger_machine.py): short here, an hour by `make attack-test`."""

import subprocess
import sys
from pathlib import Path

import pytest

from attacks.ledger_worker import FAULTS

MACHINE = Path(__file__).with_name("ledger_machine.py")


def machine(*options: str) -> str:
    done = subprocess.run([sys.executable, MACHINE, *options], capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_random_steps_find_nothing():
    said = machine("--histories", "5", "--steps", "40", "--seed", "1000")
    assert "histories=5 steps=200" in said and "violations=0" in said


@pytest.mark.parametrize("fault", ["refund", "lost_witness"])
def test_a_planted_fault_is_found(fault):
    assert machine("--faults", fault, "--steps", "60", "--histories", "20").startswith(f"{fault}: history")


@pytest.mark.long
def test_every_planted_fault_is_found():
    found = machine("--faults", "--steps", "60", "--histories", "40").splitlines()
    assert [line.split(":")[0] for line in found] == list(FAULTS) and len(found) >= 10


@pytest.mark.long
def test_ten_thousand_random_steps_find_nothing():
    said = machine("--histories", "200", "--steps", "50")
    assert "histories=200 steps=10000" in said and "violations=0" in said
