"""hush.fit from a budget to a result: what is charged, what is measured, where it ends, what it refuses."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_fit import BUDGET, blobs, network, run, sgd
from support.watching import watch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hush.accounting import Budget, Gaussian, PoissonSampled, compose, epsilon
from hush.clipping.clips import FlatClip, QuantileClip
from hush.ledger import BudgetExhausted, DataNotLinked, Ledger, checkpoints
from hush.plan import Plan, PrivatePreprocessing
from hush.training import HeldOut, PrivacyWarning


def test_end_to_end(tmp_path: Path) -> None:
    model = network()
    held_out = HeldOut(data=blobs(200, seed=1), public=True)
    result = run(model, held_out=held_out, out=tmp_path / "run", epochs=8)
    assert result.ended == "finished" and result.steps == 80
    assert result.epsilon.upper <= BUDGET.epsilon and result.epsilon.upper > 0.99 * BUDGET.epsilon
    assert result.measured is not None and result.measured > 0.85
    with torch.no_grad():
        x, y = held_out.data
        assert (model(x).argmax(1) == y).float().mean().item() == pytest.approx(result.measured)
    assert [entry["epoch"] for entry in result.history] == list(range(9))
    spent = [entry["epsilon"] for entry in result.history]
    assert spent == sorted(spent) and spent[0] == 0 and spent[-1] == result.epsilon.upper
    assert not any(name.startswith("unsafe") for entry in result.history for name in entry)
    saved = torch.load(tmp_path / "run" / "model.pt", weights_only=True)
    assert all(torch.equal(saved[name], p) for name, p in model.state_dict().items())
    for name in ("report.html", "report.json", "report.txt", "ledger.hush"):
        assert (tmp_path / "run" / name).exists()


def test_hazard_27_every_step_of_fit_is_clipped_noised_and_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch(monkeypatch)
    result = run(clip=FlatClip(0.7))
    noise = result.statement.plan.noise_multiplier
    assert isinstance(noise, float)
    seen.check(steps=30, noise=noise, clip=0.7)
    event = PoissonSampled(0.1, Gaussian(noise)) * 30
    assert result.epsilon == epsilon(event, delta=BUDGET.delta)


def test_hazard_25_upfront_and_reserve_are_inside_the_budget() -> None:
    done: list[str] = []
    look = PrivatePreprocessing(
        name="a look", event=Gaussian(4.0), run=lambda: (done.append("looked"), Gaussian(4.0))[1]
    )
    result = run(preprocessing=look, reserve=5)
    noise = result.statement.plan.noise_multiplier
    whole = compose([(Gaussian(4.0), 1), (PoissonSampled(0.1, Gaussian(noise)), 35)])
    assert done == ["looked"] and result.epsilon.upper <= BUDGET.epsilon
    assert result.epsilon == epsilon(whole, delta=BUDGET.delta)
    assert result.statement.accesses[0].name == "a look"
    assert sum(access.share for access in result.statement.accesses) == pytest.approx(1.0)
    wrong = PrivatePreprocessing(name="a look", event=Gaussian(4.0), run=lambda: Gaussian(1.0))
    with pytest.raises(ValueError, match=r"was Gaussian\(noise_multiplier=1.0\), but"):
        run(preprocessing=wrong)


def test_a_given_noise_ends_exactly_where_one_step_more_would_exceed_the_budget() -> None:
    result = run(noise_multiplier=1.5, epochs=1000, budget=Budget(epsilon=1.5, delta=1e-4))
    unit = PoissonSampled(0.1, Gaussian(1.5))
    assert result.ended == "budget" and 5 < result.steps < 200
    assert epsilon(unit * result.steps, delta=1e-4).upper <= 1.5 < epsilon(unit * (result.steps + 1), delta=1e-4).upper
    assert run(noise_multiplier=1.5, epochs=1, budget=Budget(epsilon=1.5, delta=1e-4)).ended == "finished"
    with pytest.raises(ValueError, match="does not allow one step"):
        run(noise_multiplier=0.3, budget=Budget(epsilon=0.1, delta=1e-6))


@pytest.mark.parametrize("sampling", ["allocated", "shuffled"])
def test_other_samplings_are_accounted_as_what_they_are(sampling: str) -> None:
    result = run(sampling=sampling, accountant="renyi")
    assert result.epsilon.upper <= BUDGET.epsilon and result.steps == 30
    assert type(result.statement.plan.lots).__name__ == f"{sampling.capitalize()}Lots"
    assert sampling in str(result.statement)


def test_hazard_21_nothing_is_computed_when_the_cap_would_be_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(tmp_path / "data.hush", budget=Budget(epsilon=4.0, delta=2e-4))
    assert run(ledger=ledger).statement.ledger is not None
    seen, model = watch(monkeypatch), network()
    before = [p.clone() for p in model.parameters()]
    looked: list[int] = []
    look = PrivatePreprocessing(name="a look", event=Gaussian(9.0), run=lambda: (looked.append(1), Gaussian(9.0))[1])
    with pytest.raises(BudgetExhausted, match="what the cap leaves"):
        run(model, ledger=ledger, preprocessing=look)
    assert not seen.multipliers and not looked
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    smaller = run(ledger=ledger, budget=Budget(epsilon=1.0, delta=1e-4))
    total = ledger.spent(delta=2e-4)
    assert smaller.epsilon.upper <= 1.0 and total.upper <= 4.0


def test_hazard_21_the_upfront_access_is_charged_before_it_is_done(tmp_path: Path) -> None:
    on_record: list[float] = []

    def look() -> Gaussian:
        with Ledger(tmp_path / "data.hush") as other:
            on_record.append(other.spent(delta=1e-4).upper)
        return Gaussian(4.0)

    Ledger(tmp_path / "data.hush", create=True).close()
    run(ledger=tmp_path / "data.hush", preprocessing=PrivatePreprocessing(name="a look", event=Gaussian(4.0), run=look))
    assert on_record and on_record[0] >= epsilon(Gaussian(4.0), delta=1e-4).lower


def test_hazard_32_other_data_is_refused(tmp_path: Path) -> None:
    Ledger(tmp_path / "data.hush", create=True).close()
    run(ledger=tmp_path / "data.hush")
    with pytest.raises(DataNotLinked, match="hush ledger link"):
        run(data=blobs(400, seed=9), ledger=tmp_path / "data.hush")


def test_a_refused_model_costs_nothing(tmp_path: Path) -> None:
    bad = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    with pytest.raises(RuntimeError, match="BatchNorm"):
        run(bad, ledger=Ledger(tmp_path / "data.hush", create=True))
    assert not Ledger(tmp_path / "data.hush").accounts()


def test_loss_forms() -> None:
    assert run(loss=nn.CrossEntropyLoss()).ended == "finished"
    assert run(loss=lambda out, y: F.cross_entropy(out, y, reduction="none")).ended == "finished"

    def losses_of(model: nn.Module, *, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y, reduction="none")

    x, y = blobs()
    assert run(data={"x": x, "y": y}, losses_of=losses_of).ended == "finished"
    assert run(data=TensorDataset(x, y)).ended == "finished"
    with pytest.raises(ValueError, match="one loss for each example, got a scalar"):
        run(loss=lambda out, y: F.cross_entropy(out, y))
    with pytest.raises(TypeError, match="DataLoader"):
        run(data=DataLoader(TensorDataset(x, y)))


def test_delta_of_one_over_n_is_warned_about_and_reported() -> None:
    with pytest.warns(PrivacyWarning, match="not below 1 / N"):
        result = run(budget=Budget(epsilon=3.0, delta=1 / 400))
    assert any("1 / N" in note for note in result.statement.facts["notes"])
    assert "1 / N" in str(result.statement)


def test_seeds_make_runs_equal_and_not_private() -> None:
    first, second, other = (run(seed=seed) for seed in (5, 5, 6))
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first.model.parameters(), other.model.parameters(), strict=True))
    assert not first.statement.private and first.statement.headline.startswith("NOT PRIVATE")
    secure, again = run(), run()
    assert secure.statement.private
    assert not all(torch.equal(a, b) for a, b in zip(secure.model.parameters(), again.model.parameters(), strict=True))


def test_mistakes_are_told_before_anything_is_charged(tmp_path: Path) -> None:
    with Ledger(tmp_path / "x.hush", budget=BUDGET) as ledger:
        model = network()
        other = Plan.for_budget(BUDGET, examples=500, lot_size=40, epochs=1, clip=FlatClip(1.0))
        mistakes: list[tuple[str, dict[str, Any]]] = [
            ("expected plan=hush.Plan", {"plan": {"noise": 1.0}}),
            ("made for 500 examples, and the data has 400", {"plan": other}),
            ("expected held_out=hush.HeldOut", {"held_out": blobs(10)}),
            ("expected an optimizer made with", {"optimizer": torch.optim.SGD}),
            ("not a trainable parameter of the model", {"optimizer": sgd(network())}),
            ("holds the trainable parameters 0.weight, 0.bias:", {"optimizer": sgd(model[2])}),  # type: ignore[index]
            ("compile must be", {"compile": "yes"}),
            ("batch_size must be", {"batch_size": 0}),
            ("cannot be used", {"device": "nowhere"}),
            ("clip must be", {"clip": 1.0}),
        ]
        for words, changes in mistakes:
            with pytest.raises((TypeError, ValueError, RuntimeError), match=words):
                run(model, ledger=ledger, **changes)
        assert not ledger.accounts()


def test_quantile_clip_counts_are_named_among_the_accesses() -> None:
    result = run(clip=QuantileClip(initial=1.0))
    assert result.epsilon.upper <= BUDGET.epsilon
    assert "counts" in result.statement.accesses[0].name


def test_checkpoints_hold_no_key_and_load_with_weights_only(tmp_path: Path) -> None:
    run(out=tmp_path / "run", checkpoint_every=7)
    saved = checkpoints.load(tmp_path / "run" / "checkpoint")
    assert saved.facts["ended"] == "finished" and "random" not in saved.state
    assert "key" not in str(saved.facts["run"]).replace(str(tmp_path), "").lower()
