"""What float-safe noise adds to delta is in every number that a run states or is charged for."""

from pathlib import Path

import pytest
import torch
from torch import nn

import hush
from hush.accounting import Budget
from hush.accounting.approximate_noise import added_delta
from hush.clipping import FlatClip
from hush.ledger import Ledger
from hush.noise import float_safe
from hush.plan import Plan
from hush.private import Private
from hush.sampling.lots import PoissonLots

LOTS = PoissonLots(examples=1000, lot_size=100)


def plan(**more: object) -> Plan:
    return Plan(lots=LOTS, steps=20, clip=FlatClip(1.0), noise_multiplier=1.0, **more)  # type: ignore[arg-type]


def losses_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().sum(1)


def spend_all(private: Private) -> None:
    for _ in private.lots():
        private.abandon()


@pytest.fixture
def coarse(monkeypatch: pytest.MonkeyPatch) -> float:
    """Integers that are exact to 1e-11 each, so that their share of delta can be seen."""
    monkeypatch.setattr(float_safe, "DISTANCE", 1e-11)
    return 1e-11 * 20 * 7


def test_spent_includes_it(coarse: float) -> None:
    model = nn.Linear(5, 1)
    exact, inexact = Private(model, plan(), losses_of), Private(model, plan(noise="float_safe"), losses_of)
    assert exact.distance == 0 and inexact.distance == pytest.approx(coarse)
    for private in (exact, inexact):
        spend_all(private)
    ideal, stated = exact.spent(delta=1e-5).upper, inexact.spent(delta=1e-5).upper
    assert ideal < stated < 1.1 * ideal
    accounted = hush.accounting.delta(plan().event, epsilon=stated).upper
    assert accounted + added_delta(coarse, stated) <= 1e-5


def test_all_that_may_be_released_is_counted() -> None:
    """Frozen parameters, which may be trained later, and the number of an adaptive clip in each step."""
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    assert Private(model, plan(noise="float_safe"), losses_of).distance == 20 * (18 + 4 + 1) * 2.0**-112


def test_at_its_real_size_it_is_counted_and_costs_nothing() -> None:
    model = nn.Linear(5, 1)
    private = Private(model, plan(noise="float_safe"), losses_of)
    assert private.distance == 20 * 7 * 2.0**-112
    spend_all(private)
    assert plan().epsilon(delta=1e-5).upper < private.spent(delta=1e-5).upper < plan().epsilon(delta=1e-5).upper + 1e-7


def test_a_budget_without_room_is_refused_before_anything_is_charged(coarse: float, tmp_path: Path) -> None:
    model = nn.Linear(5, 1)
    budget = Budget(epsilon=plan().epsilon(delta=1e-5).upper, delta=1e-5)
    Ledger(tmp_path / "book.hush", create=True).close()
    for ledger in (None, tmp_path / "book.hush"):
        with pytest.raises(ValueError, match="slightly smaller"):
            Private(model, plan(budget=budget, noise="float_safe"), losses_of, ledger=ledger)
    assert not Ledger(tmp_path / "book.hush").accounts()
    Private(model, plan(budget=budget), losses_of)


def test_an_account_takes_the_slice_with_it(coarse: float, tmp_path: Path) -> None:
    """A plan without a budget takes what it costs: the ledger's record is true of the noise that is drawn."""
    book = Ledger(tmp_path / "book.hush", create=True)
    private = Private(nn.Linear(5, 1), plan(noise="float_safe"), losses_of, ledger=book)
    private.close()
    (page,) = Ledger(tmp_path / "book.hush").accounts()
    assert page.budget is not None
    accounted = hush.accounting.delta(plan().event, epsilon=page.budget.epsilon).upper
    assert accounted + added_delta(coarse, page.budget.epsilon) <= page.budget.delta


def test_the_statement_of_fit_includes_it() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(5, 2), torch.randn(400, 5)
    result = hush.fit(
        model,
        (x, torch.zeros(400, dtype=torch.long)),
        hush.per_example(nn.functional.cross_entropy),
        torch.optim.SGD(model.parameters(), lr=0.1),
        Plan.for_budget(
            Budget(epsilon=4.0, delta=1e-4),
            examples=400,
            lot_size=40,
            epochs=1,
            clip=FlatClip(1.0),
            noise="float_safe",
        ),
    )
    distance = result.statement.facts["distance"]
    assert distance == pytest.approx(2.0**-112 * 13 * (result.statement.plan.steps + result.statement.plan.reserve))
    exact = result.statement.plan.epsilon(delta=1e-4).upper
    assert exact < result.epsilon.upper <= 4.0
    assert "total variation" in " ".join(str(result.statement).split())
