"""Tuning from outside: one charge, the same drawn number of trials, nothing of the losers left."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hush import accounting
from hush.accounting import Budget, Gaussian, Selected
from hush.commands.tune import OwnTrials
from hush.ledger import BudgetExhausted, Ledger
from hush.ledger.owned import FolderInUse, held
from hush.tuning import PAY_FOR_EACH, Trial, Tuned, tune

BUDGET = Budget(epsilon=2.0, delta=1e-5)
SCRIPT = """
import os, time
from pathlib import Path
import hush
from hush.accounting import Laplace
from hush.tuning import Trial

def trial(settings):
    lots = hush.PoissonLots(examples=1000, lot_size=1000)
    plan = hush.Plan(lots=lots, steps=1, clip=hush.FlatClip(1.0), noise_multiplier=1.0)

    def train(plan, folder):
        with open(Path(__file__).with_name("log"), "a") as log:
            log.write(f"{settings['name']} {plan.noise_multiplier!r}\\n")
        time.sleep(settings.get("seconds", 0))
        if settings["name"] == "raises":
            raise RuntimeError("record 7 is ill")
        if settings["name"] == "dies":
            os.kill(os.getpid(), 9)
        (folder / "model").write_text(settings["name"])
        return settings.get("score", 0.5)

    return Trial(plan=plan, train=train)
"""


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "mine.py"
    path.write_text(SCRIPT)
    (tmp_path / "log").touch()
    yield path


def run(script: Path, settings: list[dict[str, Any]], **options: Any) -> Tuned:
    options = {
        "budget": BUDGET,
        "rule": "binomial",
        "mean": 5.9,
        "shape": 6.0,
        "folder": script.parent / "out",
    } | options
    return tune(OwnTrials(f"{script}:trial"), settings, **options)


def log_of(script: Path) -> list[str]:
    return [line.split()[0] for line in (script.parent / "log").read_text().splitlines()]


def test_the_best_trial_is_released_and_nothing_else_is_left(script: Path) -> None:
    settings = [{"name": "a", "score": 0.3}, {"name": "b", "score": 0.8}, {"name": "raises", "score": 0.9}]
    tuned = run(script, settings, jobs=3, rule="negative-binomial", mean=12.0, shape=20.0)
    ran = log_of(script)
    best = "b" if "b" in ran else "a"
    assert tuned.settings == next(one for one in settings if one["name"] == best)
    assert tuned.score == tuned.settings["score"]  # type: ignore[index]
    assert tuned.folder is not None and (tuned.folder / "model").read_text() == best
    left = {str(path.relative_to(script.parent / "out")) for path in (script.parent / "out").rglob("*")}
    assert left == {"tuning.json", "winner", "winner/model", "winner/score.json"}
    kept = (script.parent / "out" / "tuning.json").read_text()
    assert json.loads(kept)["order"] == json.loads(kept)["done"] == []  # how many trials ran is a secret
    assert "ill" not in kept and os.stat(script.parent / "out" / "tuning.json").st_mode & 0o77 == 0


def test_what_is_charged_is_what_was_done(script: Path) -> None:
    tuned = run(script, [{"name": "a"}, {"name": "b"}])
    noise = tuned.noise_multiplier
    assert tuned.event == Selected(accounting.PoissonSampled(1.0, Gaussian(noise)) * 1, "binomial", 5.9, 6.0)
    assert tuned.epsilon.upper <= BUDGET.epsilon < 1.01 * tuned.epsilon.upper
    used = {float(line.split()[1]) for line in (script.parent / "log").read_text().splitlines()}
    assert used == {noise}  # every trial was given the noise that is paid for


def test_a_trial_that_fails_counts_and_wins_nothing(script: Path) -> None:
    tuned = run(script, [{"name": "raises"}, {"name": "dies"}, {"name": "nan", "score": float("inf")}], jobs=3)
    state = json.loads((script.parent / "out" / "tuning.json").read_text())
    assert tuned.settings is tuned.score is tuned.folder is None and state["ended"]
    assert 0 < len(log_of(script)) <= 6  # none was tried again
    assert not list((script.parent / "out").glob("winner*")) and not list((script.parent / "out").rglob("failed*"))


def test_the_number_of_trials_follows_the_rule_and_not_the_scores(script: Path) -> None:
    run(script, [{"name": "a"}], rule="binomial", mean=2.9999999, shape=3.0)  # all but surely 3
    assert log_of(script) == ["a"] * 3


def test_no_trial_may_be_drawn_and_is_paid_for_all_the_same(script: Path) -> None:
    ledger = script.with_name("data.hush")
    tuned = run(script, [{"name": "a"}], rule="poisson", mean=1e-6, ledger=ledger, create_ledger=True)
    assert tuned.settings is None and log_of(script) == []
    with Ledger(ledger) as book:
        assert len(book.accounts()) == 1


def test_pay_for_each_keeps_everything_and_costs_the_sum(script: Path) -> None:
    settings = [{"name": "a", "score": 0.3}, {"name": "b", "score": 0.8}, {"name": "c", "score": 0.1}]
    tuned = run(script, settings, rule=PAY_FOR_EACH)
    assert sorted(log_of(script)) == ["a", "b", "c"]
    assert [(script.parent / "out" / "trials" / f"{n:05d}" / "model").read_text() for n in range(3)] == ["a", "b", "c"]
    assert tuned.settings == settings[1] and tuned.folder is not None and (tuned.folder / "model").read_text() == "b"
    each = accounting.PoissonSampled(1.0, Gaussian(tuned.noise_multiplier))  # type: ignore[arg-type]
    assert tuned.event == each * 3
    assert tuned.epsilon.upper == pytest.approx(accounting.epsilon(each * 3, delta=1e-5).upper)


def child(script: Path, ledger: Path, *, resume: bool = False) -> subprocess.Popen[bytes]:
    toml = script.with_name("settings.toml")
    toml.write_text('[[settings]]\nname = "a"\nseconds = 0.3\n[[settings]]\nname = "b"\nseconds = 0.3\nscore = 0.7\n')
    words = ["tune", f"{script}:trial", "--settings", str(toml), "--epsilon", "2", "--delta", "1e-5", "--json"]
    words += ["--rule", "binomial", "--mean", "5.99999", "--shape", "6", "--out", str(script.parent / "out")]
    words += ["--ledger", str(ledger), *(["--resume"] if resume else [])]
    return subprocess.Popen(
        [sys.executable, "-m", "hush.commands.app", *words],
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_a_killed_tuning_goes_on_with_the_number_it_drew_and_is_charged_once(script: Path) -> None:
    ledger = script.with_name("data.hush")
    with Ledger(ledger, budget=Budget(epsilon=5.0, delta=1e-4)):
        pass
    first = child(script, ledger)
    state = script.parent / "out" / "tuning.json"
    deadline = time.monotonic() + 120
    while len(log_of(script)) < 4 and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    drawn = json.loads(state.read_text())
    assert not drawn["ended"] and len(drawn["order"]) == 6 and len(drawn["done"]) < 6
    ended = {int(path.parent.name) for path in (script.parent / "out").glob("trials/*/score.json")}
    assert ended & set(drawn["done"]) <= {drawn["best"]["trial"]}  # those that had lost were deleted
    with Ledger(ledger) as book:
        assert [page.name for page in book.accounts()] == [drawn["account"]]  # charged before the first trial
    same = {"mean": 5.99999, "ledger": ledger}
    settings = [{"name": "a", "seconds": 0.3}, {"name": "b", "seconds": 0.3, "score": 0.7}]
    with pytest.raises(ValueError, match="--resume"):
        run(script, settings, **same)
    assert json.loads(state.read_text()) == drawn
    second = child(script, ledger, resume=True)
    out, err = second.communicate(timeout=200)
    assert second.returncode == 0, err
    again = len(log_of(script)) - 6  # the trial in hand when it was killed was begun anew, no other
    assert again in (0, 1)
    third = run(script, settings, resume=True, **same)  # ended: the same answer, no trial, no charge
    assert third.settings == json.loads(out)["settings"]
    assert third.score == json.loads(out)["score"] == (0.7 if "b" in log_of(script) else 0.5)
    assert len(log_of(script)) == 6 + again
    with Ledger(ledger) as book:
        (page,) = book.accounts()
        assert page.name == drawn["account"] and page.closed
        remaining = book.remaining()
    assert remaining is not None and remaining.epsilon == 3.0


def test_two_tunings_on_one_ledger_and_no_third(script: Path) -> None:
    ledger = script.with_name("data.hush")
    with Ledger(ledger, budget=Budget(epsilon=4.5, delta=1e-4)):
        pass
    for name in ("one", "two"):
        run(script, [{"name": "a"}], ledger=ledger, folder=script.parent / name)
    ran = len(log_of(script))
    with pytest.raises(BudgetExhausted):
        run(script, [{"name": "a"}], ledger=ledger, folder=script.parent / "three")
    assert len(log_of(script)) == ran  # not one trial
    with Ledger(ledger) as book:
        assert len(book.accounts()) == 2 and book.remaining() == Budget(epsilon=0.5, delta=8e-5)


def test_a_crash_between_state_and_charge_is_charged_when_it_goes_on(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = script.with_name("data.hush")
    with Ledger(ledger, budget=Budget(epsilon=5.0, delta=1e-4)):
        pass

    def fails(*_: object, **__: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as broken:
        broken.setattr("hush.tuning.charge.charge", fails)
        with pytest.raises(OSError, match="disk full"):
            run(script, [{"name": "a"}], ledger=ledger)
    assert log_of(script) == []
    drawn = json.loads((script.parent / "out" / "tuning.json").read_text())  # drawn and kept before the charge
    run(script, [{"name": "a"}], ledger=ledger, resume=True)
    assert len(log_of(script)) == len(drawn["order"])
    with Ledger(ledger) as book:
        assert [page.name for page in book.accounts()] == [drawn["account"]] and book.remaining() == Budget(
            epsilon=3.0, delta=9e-5
        )


def test_another_tuning_in_the_folder_is_refused(script: Path) -> None:
    run(script, [{"name": "a"}])
    for changed in ({"rule": "poisson", "mean": 3.0}, {"budget": Budget(epsilon=1.0, delta=1e-5)}):
        with pytest.raises(ValueError, match="other settings, rule or budget"):
            run(script, [{"name": "a"}], resume=True, **changed)
    (script.parent / "out" / "tuning.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be read"):
        run(script, [{"name": "a"}], resume=True)


def test_only_one_process_tunes_in_a_folder(script: Path) -> None:
    with held(script.parent / "out"), pytest.raises(FolderInUse):
        run(script, [{"name": "a"}])


def test_what_makes_no_sense_is_refused_before_anything_is_drawn(script: Path) -> None:
    for settings, options, words in (
        ([], {}, "at least one setting"),
        ([{"name": "a"}], {"rule": "gupta"}, "millions of runs"),
        ([{"name": "a"}], {"rule": "best"}, "one of"),
        ([{"name": "a"}], {"mean": 0.0}, "mean"),
    ):
        with pytest.raises(ValueError, match=words):
            run(script, settings, **options)
    with pytest.raises(TypeError, match="Trial"):
        tune(dict, [{"a": 1}], budget=BUDGET, rule="geometric", mean=2.0, folder=script.parent / "out")  # type: ignore[arg-type]
    assert not (script.parent / "out" / "tuning.json").exists() and log_of(script) == []


def test_a_private_score_is_part_of_the_trial() -> None:
    import hush

    plan = hush.Plan(
        lots=hush.PoissonLots(examples=100, lot_size=100), steps=1, clip=hush.FlatClip(1.0), noise_multiplier=1.0
    )
    trial = Trial(plan=plan, train=lambda plan, folder: 0.0, score_event=Gaussian(9.0))
    assert trial.event(2.0) == accounting.PoissonSampled(1.0, Gaussian(2.0)) + Gaussian(9.0)
    with pytest.raises(TypeError, match="Plan"):
        Trial(plan="plan", train=lambda plan, folder: 0.0)  # type: ignore[arg-type]
    schedule = hush.Plan(lots=plan.lots, steps=2, clip=plan.clip, noise_multiplier=(1.0, 2.0))
    with pytest.raises(ValueError, match="schedule"):
        Trial(plan=schedule, train=lambda plan, folder: 0.0)
