"""hush ledger as a person types it: what was spent, what is left, at which delta."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.command_line import call

from hush.accounting import Budget, Gaussian, epsilon
from hush.ledger import Ledger

SLICE = Budget(epsilon=1.0, delta=1e-6)


def spend(ledger: Ledger, *names: str) -> None:
    for name in names:
        ledger.open_account(name, budget=SLICE, units=[(Gaussian(100.0), 10)]).close()


def shown(capfd: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    code, out, err = call(capfd, "ledger", "show", *arguments, "--json")
    assert code == 0, err
    return dict(json.loads(out))


def test_show_says_what_is_left_of_a_cap(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with Ledger(tmp_path / "x.hush", budget=Budget(epsilon=3.0, delta=1e-5)) as ledger:
        spend(ledger, "a", "b")
        now = shown(capfd, tmp_path / "x.hush")
        assert now["spent"]["epsilon"] == 2.0 and now["spent"]["delta"] == 1e-5
        assert now["left"] == {"epsilon": 1.0, "delta": 8e-6}
        spend(ledger, "c")
        assert shown(capfd, tmp_path / "x.hush")["left"] == {"epsilon": 0.0, "delta": 0.0}, "epsilon is used up"


def test_without_a_cap_slices_are_shown_where_they_add_up(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with Ledger(tmp_path / "x.hush", create=True) as ledger:
        assert "spent" not in shown(capfd, tmp_path / "x.hush")
        spend(ledger, *"abcdefg")
        now = shown(capfd, tmp_path / "x.hush")
        assert now["spent"]["epsilon"] == 7.0 and now["spent"]["delta"] == 7e-6 and "left" not in now
        asked = shown(capfd, tmp_path / "x.hush", "--delta", 1e-7)["spent"]
        assert asked["epsilon"] >= epsilon(Gaussian(100.0) * 70, delta=1e-7).lower
    _, out, _ = call(capfd, "ledger", "show", tmp_path / "x.hush")
    assert "accounts: 7" in out and "spent: epsilon 7 (at least " in out and "cap: none" in out
    (head,) = [line.removeprefix("head: ") for line in out.splitlines() if line.startswith("head: ")]
    code, out, _ = call(capfd, "ledger", "check", tmp_path / "x.hush", "--head", head)
    assert code == 0 and "intact: True" in out, "the head as it is shown can be given back"
