"""hush plan and hush tune from the command line."""

import json
import math
from pathlib import Path

import pytest

from hush import accounting
from hush.accounting import Budget, Gaussian, PoissonSampled, planner
from hush.commands.app import main


def hush(capsys: pytest.CaptureFixture[str], line: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    printed = capsys.readouterr()
    return int(ended.value.code or 0), printed.out, printed.err


def test_every_row_of_a_plan_keeps_its_budget_and_the_knee_is_the_first_with_nine_tenths() -> None:
    budget = Budget(epsilon=2.0, delta=1e-5)
    advice = planner.advise(60_000, budget, steps=1000, lots=[245, 600, 2400, 9600], seconds_per_record=1e-5)
    most = math.sqrt(1000) / accounting.calibrate.noise(lambda sigma: Gaussian(sigma) * 1000, budget)  # every record
    for row in advice.rows:
        event = PoissonSampled(row.lot_size / 60_000, Gaussian(row.noise_multiplier)) * 1000
        assert 1.99 < accounting.epsilon(event, delta=1e-5).upper <= 2.0
        assert row.noise_to_lot == row.noise_multiplier / row.lot_size
        assert row.epochs == pytest.approx(1000 * row.lot_size / 60_000)
        assert row.seconds == pytest.approx(0.01 * row.lot_size)
        full_batch = math.sqrt(1000) / (row.noise_to_lot * 60_000) / most
        assert row.share == pytest.approx(full_batch, rel=1e-3)
    shares = [row.share for row in advice.rows]
    assert shares == sorted(shares) and advice.knee is not None
    assert shares[advice.knee] >= 0.9 and all(share < 0.9 for share in shares[: advice.knee])
    assert advice.paper_lot == advice.paper_epochs == 245  # sqrt(60,000)
    assert 1.7 < advice.buys["twice the records"] <= 2.01 and 1.5 < advice.buys["twice the epsilon"] < 2.5
    assert 1.0 <= advice.buys["twice the lot"] < 1.12 and 1.0 <= advice.buys["twice the steps"] < 1.12


def test_plan_prints_a_table_json_and_a_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = "plan --records 2000 --epsilon 3 --delta 1e-5 --steps 100 --step-seconds 0.5"
    status, out, err = hush(capsys, f"{line} --plot {tmp_path / 'plan.png'}")
    assert (status, err) == (0, "") and "<- sqrt(N)" in out and "<- the knee" in out and "twice the records" in out
    assert (tmp_path / "plan.png").stat().st_size > 5000
    _, out, _ = hush(capsys, f"{line} --json")
    values = json.loads(out)
    assert values["rows"][values["knee"]]["share"] >= 0.9 and values["paper_lot"] == 45
    assert values["rows"][0]["seconds"] == pytest.approx(0.5e-3 * 100 * values["rows"][0]["lot_size"])


@pytest.mark.parametrize(
    "line",
    [
        "plan --records 1 --epsilon 2 --delta 1e-5",
        "plan --records 1000 --epsilon -2 --delta 1e-5",
        "plan --records 1000 --epsilon 2 --delta 1e-5 --steps 0",
        "plan --records 1000 --epsilon 2 --delta 1e-5 --step-seconds -1",
        "tune nowhere.py:trial --settings {good} --epsilon 2 --delta 1e-5 --out {out}",
        "tune nothing --settings {good} --epsilon 2 --delta 1e-5 --out {out}",
        "tune {script}:number --settings {good} --epsilon 2 --delta 1e-5 --out {out}",
        "tune {script}:trial --settings {bad} --epsilon 2 --delta 1e-5 --out {out}",
        "tune {script}:trial --settings {other} --epsilon 2 --delta 1e-5 --out {out}",
        "tune {script}:trial --settings nowhere.toml --epsilon 2 --delta 1e-5 --out {out}",
        "tune {script}:trial --settings {good} --epsilon 2 --delta 1e-5 --out {out} --rule best",
        "tune {script}:trial --settings {good} --epsilon 2 --delta 1e-5 --out {out} --mean nan",
    ],
)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, line: str) -> None:
    (tmp_path / "good.toml").write_text("[[settings]]\nrate = 0.1\n")
    (tmp_path / "bad.toml").write_text("[[settings")
    (tmp_path / "other.toml").write_text("rate = 0.1\n")
    (tmp_path / "mine.py").write_text("number = lambda settings: 3\n")
    names = {name: tmp_path / f"{name}.toml" for name in ("good", "bad", "other")}
    status, out, err = hush(capsys, line.format(script=tmp_path / "mine.py", out=tmp_path / "out", **names))
    assert (status, out) == (2, "") and err.startswith("hush: ") and err.count("\n") == 1
    assert not (tmp_path / "out" / "tuning.json").exists()


def test_a_tuning_that_releases_nothing_says_so_and_fails(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "settings.toml").write_text("[[settings]]\nclip = 1.0\n")
    (tmp_path / "tuned.py").write_text(FAILS)
    line = "tune tuned.py:trial --settings settings.toml --epsilon 2 --delta 1e-5 --out tuned --rule pay-for-each"
    status, out, err = hush(capsys, line)
    assert status == 1 and "no trial ended well" in err and "for the whole tuning" in out


FAILS = """
import hush
from hush.tuning import Trial

def trial(settings):
    lots, clip = hush.PoissonLots(examples=100, lot_size=10), hush.FlatClip(settings["clip"])
    plan = hush.Plan(lots=lots, steps=2, clip=clip, noise_multiplier=1.0)
    return Trial(plan=plan, train=lambda plan, folder: 1 / 0)
"""
