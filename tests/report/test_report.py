"""The statement: what the reporting lists ask for, numbers that are those of the plan, and its three forms."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from support.small_fit import BUDGET, blobs, run

from hush.accounting import Budget, Gaussian, PoissonSampled, compose, epsilon, grouped, renyi, rounded_up
from hush.ledger import Ledger, LedgerError
from hush.plan import PrivatePreprocessing
from hush.report import read_statement, write_report
from hush.report.plots import ticks
from hush.training import About, HeldOut


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with everything in it."""
    place = tmp_path_factory.mktemp("report") / "run"
    run(
        out=place,
        reserve=5,
        preprocessing=PrivatePreprocessing(name="DP-PCA", event=Gaussian(4.0), run=lambda: Gaussian(4.0)),
        held_out=HeldOut(data=blobs(100, seed=1), name="the clinic's test set"),
        name="the clinic's records",
        about=About(settings_from="on public data"),
    )
    return place


def test_everything_on_the_lists_is_stated(folder: Path) -> None:
    text = " ".join((folder / "report.txt").read_text().split())
    for words in (
        "one record (row) of the training set", "zero-out", "epsilon = 3 at delta = 0.0001", "Lower bound",
        "Privacy loss distribution", "Poisson: every record enters every lot independently with probability 0.1",
        "DP-PCA: 1 x Gaussian noise, multiplier 4", "Training: clipped sums of lots: 30 x",
        "Not used, but part of the guarantee (5 of 35 units)", "Records of the clinic's test set", "on public data",
        "ChaCha20 keyed by the operating system", "The number of records N = 400", "central",
        "Head of the chain", "torch", "python", "Side channels", "moments epsilon",
    ):  # fmt: skip
        assert words.lower() in text.lower(), words


def test_numbers_are_those_of_the_plan(folder: Path) -> None:
    values = json.loads((folder / "report.json").read_text())
    noise = values["facts"]["run"]["plan"]["noise_multiplier"][0]
    steps = PoissonSampled(0.1, Gaussian(noise))
    whole = compose([(Gaussian(4.0), 1), (steps, 35)])
    for answer in values["accountants"]:
        if answer["epsilon"] is not None:
            assert answer["epsilon"] == epsilon(whole, delta=BUDGET.delta, accountant=answer["accountant"]).upper
    pair = epsilon(grouped(whole, 2), delta=BUDGET.delta, accountant="renyi").upper
    assert rounded_up(pair) in values["sections"]["Guarantee"]["For a person with two records"]
    order = renyi.best_order(whole, delta=BUDGET.delta)
    share = renyi.divergence(Gaussian(4.0), order) / renyi.divergence(whole, order)
    assert values["accesses"][0]["share"] == pytest.approx(share)
    assert sum(access["share"] for access in values["accesses"]) == pytest.approx(1.0)
    assert values["epsilon_lower"] <= values["epsilon"] <= BUDGET.epsilon
    with Ledger(folder / "ledger.hush") as ledger:
        assert values["ledger"]["head"] == ledger.head().to_dict()
    assert str(folder.parent) not in (folder / "report.json").read_text(), "no places of this machine"
    assert str(folder.parent) not in (folder / "report.html").read_text()


def test_the_report_is_written_again_from_the_folder(folder: Path) -> None:
    first = json.loads((folder / "report.json").read_text())
    again = read_statement(folder)
    write_report(folder, again)
    second = json.loads((folder / "report.json").read_text())
    for values in (first, second):
        values["facts"].pop("seconds")
        values["sections"]["Result"].pop("Time")
        values["facts"]["account"].pop("seen")
    assert first == second


def test_a_delta_of_many_digits_is_stated_rounded_up() -> None:
    statement = run(budget=Budget(epsilon=3.0, delta=1.2345649e-05)).statement
    assert statement.headline.split("delta = ")[1].startswith("1.23457e-05")
    assert "at delta 1.23457e-05" in dict(statement.sections()[0][1])["Epsilon"]


def test_strong_composition_as_published_is_marked_as_not_valid() -> None:
    answers = {answer.accountant: answer for answer in run().statement.answers}
    assert not answers["strong-paper"].valid and "not a valid bound" in answers["strong-paper"].why
    assert answers["pld"].valid and answers["pld"].chosen
    assert "NOT" in str(run(seed=1).statement)


def test_a_ledger_that_was_rolled_back_is_refused_and_a_missing_one_is_said(folder: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    for file in copy.glob("ledger.hush*"):
        file.unlink()
    assert "was not found" in str(read_statement(copy))
    with Ledger(copy / "ledger.hush", create=True):
        pass
    with pytest.raises(LedgerError):
        read_statement(copy)


def test_other_runs_on_the_same_ledger_are_added_up(tmp_path: Path) -> None:
    book = tmp_path / "data.hush"
    Ledger(book, create=True).close()
    run(ledger=book)
    second = run(ledger=book, out=tmp_path / "run").statement
    assert second.ledger is not None and second.ledger["accounts"] == 2
    # Two slices have a delta of 1e-4 each; at 1e-4 in all, the odometer answers for both together.
    assert second.ledger["spent"]["epsilon"] > second.epsilon.upper
    assert not any("Other runs" in line for line in second.not_covered)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.1, 0.97), (0, 413), (1.998, 2.0), (1e-6, 3e-6)])
def test_ticks_cover_the_range_with_few_round_numbers(low: float, high: float) -> None:
    found = ticks(low, high)
    assert found[0] <= low + 1e-12 and found[-1] >= high - 1e-12 and 3 <= len(found) <= 8
    gaps = {round(b - a, 12) for a, b in pairwise(found)}
    assert len(gaps) <= 2 and found == sorted(found)
