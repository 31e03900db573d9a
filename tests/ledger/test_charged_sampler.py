"""Charges before use, one charge and one noise for each step whatever happens in the loop, and resuming."""

import copy
import math
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_course import KINDS, L, N, losses_of, network, plan, train, weights

from hush.accounting import Budget, Gaussian, PoissonSampled, Shuffled, epsilon
from hush.clipping.clips import FlatClip
from hush.ledger import AccountRefused, BudgetExhausted, Ledger, LedgerMismatch, LedgerMissing, MemoryAccount
from hush.ledger.charged_sampler import ChargedSampler
from hush.plan import PrivatePreprocessing
from hush.private import Private
from hush.sampling.lots import AllocatedLots, Lots, PoissonLots, ShuffledLots

# Charging --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lots", KINDS)
def test_hazard_21_a_unit_is_on_record_before_it_is_handed_out(lots: Lots) -> None:
    log: list[str] = []

    class Spy(MemoryAccount):
        def take(self) -> int:
            log.append(f"charge {self.taken}")
            return super().take()

    made = plan(lots=lots, steps=12)
    sampler = ChargedSampler(made, Spy(units=made.units), seed=0)
    drawn = sampler._lots_of
    sampler._lots_of = lambda unit: log.append(f"draw {unit}") or drawn(unit)  # type: ignore[method-assign, func-returns-value]
    for _ in range(12):
        sampler.next_lot()
        sampler.step += 1
    units = -(-12 // lots.steps_per_unit)
    assert log == [entry for unit in range(units) for entry in (f"charge {unit}", f"draw {unit}")]


def indices(sampler: ChargedSampler, steps: int) -> list[list[int]]:
    found = []
    for _ in range(steps):
        found.append(sampler.next_lot().indices.tolist())
        sampler.step += 1
    return found


@pytest.mark.parametrize("lots", [*KINDS, PoissonLots(examples=10**6, lot_size=600)])
def test_hazard_22_a_run_that_resumes_inside_a_draw_gets_the_lots_it_would_have_had(lots: Lots) -> None:
    made = plan(lots=lots, steps=400)
    whole = indices(ChargedSampler(made, None, seed=5), 300)
    assert len({tuple(lot) for lot in whole}) > 250, "draws differ from each other"
    for stop in (1, 108, 109, 127, 128, 200):
        first, second = ChargedSampler(made, None, seed=5), ChargedSampler(made, None, seed=5)
        assert indices(first, stop) == whole[:stop]
        second.load_state_dict(first.state_dict())
        assert indices(second, 300 - stop) == whole[stop:]


def test_lots_that_were_drawn_ahead_are_not_used_again_without_a_seed() -> None:
    made = plan(lots=PoissonLots(examples=10**6, lot_size=600), steps=400)
    first = ChargedSampler(made, None, seed=None)
    indices(first, 3)
    state, ahead = first.state_dict(), indices(first, 5)
    for other in (ChargedSampler(made, None, seed=None), first):
        other.load_state_dict(state)
        assert not set(map(tuple, indices(other, 5))) & set(map(tuple, ahead))


@pytest.mark.parametrize(
    "lots",
    [
        PoissonLots(examples=10**6, lot_size=600),
        AllocatedLots(examples=6000, lot_size=60),
        ShuffledLots(examples=6000, lot_size=60),
    ],
)
def test_a_forked_child_draws_lots_of_its_own(lots: Lots, monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan(lots=lots, steps=400)
    sampler = ChargedSampler(made, None, seed=None)
    indices(sampler, 3)
    state = vars(sampler) | {"_unit": list(sampler._unit)}
    parent = object.__new__(ChargedSampler)
    vars(parent).update(state)
    charged, ahead = sampler.charged, indices(parent, 5)
    process = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: process + 1)
    assert not set(map(tuple, indices(sampler, 5))) & set(map(tuple, ahead))
    assert sampler.charged == charged + (5 if lots.steps_per_unit == 1 else 1), "a begun epoch is given up"


def test_s2_a_run_is_not_copied_and_two_runs_on_one_account_get_different_units() -> None:
    made = plan(steps=8)
    account = MemoryAccount(units=made.units)
    first, second = (ChargedSampler(made, account, seed=None) for _ in range(2))
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.copy(first)
    indices(first, 5), indices(second, 3)
    for sampler in (first, second):
        with pytest.raises(BudgetExhausted):
            sampler.next_lot()
    assert account.taken == 8


def test_an_exhausted_account_hands_out_nothing() -> None:
    one = plan(steps=8)
    account = MemoryAccount(units=one.units, spent=5)
    private = Private(network(), one, losses_of, ledger=account, seed=0)
    with pytest.raises(BudgetExhausted):
        train(private, torch.optim.SGD(private.model.parameters(), lr=0.1))
    assert private.steps_done == 3 and account.taken == 8


def test_spent_follows_the_lots_and_the_plan_bounds_it() -> None:
    private = Private(network(), plan(preprocessing=Gaussian(5.0)), losses_of)
    optimizer = torch.optim.SGD(private.model.parameters(), lr=0.1)
    assert private.spent(delta=1e-5) == epsilon(Gaussian(5.0) * 1, delta=1e-5)
    for lot in private.lots():
        done = lot.step + 1
        expected = epsilon(PoissonSampled(0.2, Gaussian(1.0)) * done + Gaussian(5.0), delta=1e-5)
        if done in (1, 5, 8):
            assert private.spent(delta=1e-5) == expected, "charged before the lot is used"
        for batch in lot.batches(N):
            private.add(batch, batch.index)
        private.step(optimizer)
    assert private.spent(delta=1e-5) == private.plan.epsilon(delta=1e-5)


def test_a_ledger_by_path_by_object_and_by_account(tmp_path: Path) -> None:
    made = plan(budget=Budget(epsilon=20.0, delta=1e-5), lots=ShuffledLots(examples=N, lot_size=L), steps=7)
    for name in "ab":
        Ledger(tmp_path / f"{name}.hush", create=True).close()
    for ledger in (tmp_path / "a.hush", str(tmp_path / "b.hush"), Ledger(tmp_path / "c.hush", create=True)):
        private = Private(network(), made, losses_of, ledger=ledger)
        train(private, torch.optim.SGD(private.model.parameters(), lr=0.1))
        private.close()
        private.close()
        (page,) = (ledger if isinstance(ledger, Ledger) else Ledger(ledger)).accounts()
        assert page.closed and page.spent == 2 and page.event(page.spent) == Shuffled(5, Gaussian(1.0)) * 2
        assert page.budget == Budget(epsilon=20.0, delta=1e-5)
        with pytest.raises(RuntimeError, match="ended by close"):
            next(_again(private))
    book = Ledger(tmp_path / "d.hush", create=True)
    account = book.open_account("mine", budget=made.budget, units=made.units)
    assert Private(network(), made, losses_of, ledger=account).account is account
    with pytest.raises(LedgerMismatch, match="another plan"):
        Private(network(), plan(), losses_of, ledger=account)


def test_an_account_serves_the_plan_that_it_was_opened_for_and_no_other(tmp_path: Path) -> None:
    book, paid = Ledger(tmp_path / "a.hush", create=True), plan(noise_multiplier=50.0)
    budget = Budget(epsilon=2.0, delta=1e-5)
    one = book.open_account("one", budget=budget, units=paid.units)
    two = book.open_account(
        "two", budget=budget, units=[(event, 1) for event, count in paid.units for _ in range(count)]
    )
    others = [plan(noise_multiplier=1.0), plan(noise_multiplier=50.0, lots=PoissonLots(examples=N, lot_size=N))]
    for other in others:
        for account in (one, two, MemoryAccount(units=paid.units)):
            assert account.total == sum(count for _, count in other.units)
            with pytest.raises(LedgerMismatch, match="another plan"):
                Private(network(), other, losses_of, ledger=account)
    saved = Private(network(), others[0], losses_of).state_dict()
    with pytest.raises(LedgerMismatch, match="another plan"):
        Private.resume(saved, network(), losses_of, ledger=book.resume_account("one"))
    for account in (two, book.resume_account("one")):
        assert Private(network(), paid, losses_of, ledger=account).account is account


def test_a_preprocessing_is_done_once_for_one_account(tmp_path: Path) -> None:
    looked: list[int] = []
    event = Gaussian(50.0)
    look = PrivatePreprocessing(name="a look", event=event, run=lambda: (looked.append(1), event)[1])
    paid = plan(noise_multiplier=50.0, preprocessing=look.event, access=look)
    book = Ledger(tmp_path / "a.hush", create=True)
    account = book.open_account(
        "one", budget=Budget(epsilon=2.0, delta=1e-5), units=paid.units, upfront=paid.preprocessing
    )
    Private(network(), paid, losses_of, ledger=account)
    for again in (account, book.resume_account("one")):
        with pytest.raises(AccountRefused, match="preprocessing was done before"):
            Private(network(), paid, losses_of, ledger=again)
    assert looked == [1]


def _again(private: Private) -> Any:
    private._course.step = 0
    return private.lots()


def test_a_plan_made_for_no_budget_takes_what_it_costs(tmp_path: Path) -> None:
    with pytest.raises(LedgerMissing, match="create=True"):
        Private(network(), plan(), losses_of, ledger=tmp_path / "x.hush")
    Ledger(tmp_path / "x.hush", create=True).close()
    private = Private(network(), plan(), losses_of, ledger=tmp_path / "x.hush")
    (page,) = Ledger(tmp_path / "x.hush").accounts()
    assert page.budget is not None and page.budget.delta == 1e-5
    assert page.budget.epsilon == plan().epsilon(delta=1e-5).upper
    private.close()


def test_runs_without_noise_are_not_charged_and_say_so(tmp_path: Path) -> None:
    bare = plan(noise_multiplier=0.0)
    private = Private(network(), bare, losses_of)
    assert not private.protects and private.account is None
    train(private, torch.optim.SGD(private.model.parameters(), lr=0.1))
    assert private.spent(delta=1e-5).upper == math.inf
    with pytest.raises(ValueError, match="NOT PRIVATE"):
        Private(network(), bare, losses_of, ledger=tmp_path / "x.hush")
    assert not (tmp_path / "x.hush").exists()
    assert not Private(network(), plan(), losses_of, seed=0).protects
    assert Private(network(), plan(), losses_of, seed=0).spent(delta=1e-5).lower == math.inf
    assert Private(network(), plan(), losses_of).protects
    with pytest.raises(ValueError, match="is infinite"):
        Private(network(), plan(clip=FlatClip(math.inf)), losses_of)


# Whatever happens in the loop ------------------------------------------------------------------------------------


def test_hazard_20_a_forgotten_step_is_an_error() -> None:
    private = Private(network(), plan(), losses_of, seed=0)
    optimizer = torch.optim.SGD(private.model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="lot 0 was charged but not used"):
        for lot in private.lots():
            for batch in lot.batches(4):
                private.add(batch, batch.index)
    with pytest.raises(RuntimeError, match="lot 0 was charged but not used"):
        next(private.lots())
    private.step(optimizer)
    with pytest.raises(RuntimeError, match="step needs an open lot"):
        private.step(optimizer)
    with pytest.raises(RuntimeError, match="add needs an open lot"):
        private.add(batch, batch.index)


class Oops(Exception):
    pass


@pytest.mark.parametrize("seed", range(12))
def test_hazard_20_every_update_has_one_charge_and_one_noise(seed: int) -> None:
    """Exceptions, continue, break and second generators at random points of the loop."""
    chance = random.Random(seed)
    model = network()
    made = plan(steps=25, noise_multiplier=100.0)
    account = MemoryAccount(units=made.units)
    private = Private(model, made, losses_of, ledger=account, seed=seed)
    updates, charged_at_update, seen_noise = 0, [], []

    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            nonlocal updates
            updates += 1
            charged_at_update.append(account.taken)
            seen_noise.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
            if chance.random() < 0.1:
                raise Oops
            return super().step(closure)

    optimizer = Counting(model.parameters(), lr=1e-3)
    trouble = lambda: chance.random() < 0.1  # noqa: E731
    while private.steps_done < 25:
        try:
            for lot in private.lots():
                for batch in lot.batches(4):
                    if trouble():
                        raise Oops
                    if trouble():
                        continue
                    if trouble():
                        private.skip(batch)
                        continue
                    private.add(batch, batch.index)
                if trouble():
                    continue
                if trouble():
                    break
                private.step(optimizer)
        except Oops:
            pass
        except RuntimeError as error:
            assert "charged but not used" in str(error) or "were not added" in str(error)
        if private._lot is not None:
            private.abandon() if chance.random() < 0.5 else _finish(private, optimizer)
    assert len(set(charged_at_update)) == updates <= account.taken == 25
    for a, noise in enumerate(seen_noise):
        assert noise.std() > 1.0, "sigma 100, C 1, L 6"
        assert all(not torch.equal(noise, other) for other in seen_noise[:a])


def _finish(private: Private, optimizer: torch.optim.Optimizer) -> None:
    lot = private._open_lot("test")
    private.restart()
    for batch in lot.batches(4):
        private.add(batch, batch.index)
    try:
        private.step(optimizer)
    except Oops:
        assert private._lot is None, "the lot is done even if the optimizer failed"


def test_hazard_19_an_example_is_used_once_in_a_step() -> None:
    model = network()
    private = Private(model, plan(lots=PoissonLots(examples=N, lot_size=N), noise_multiplier=0.0), losses_of, seed=0)
    for lot in private.lots():
        for batch in lot.batches(10):
            with pytest.raises(ValueError, match=r"expected inputs of 10 rows, one for each of the batch, got 5"):
                private.add(batch, batch.index[:5])
            private.add(batch, batch.index)
            with pytest.raises(RuntimeError, match="would count its examples twice"):
                private.add(batch, batch.index)
        with pytest.raises(TypeError, match=r"expected a batch of lot.batches"):
            private.add(torch.arange(10), torch.arange(10))
        with pytest.raises(RuntimeError, match="already handed out"):
            lot.batches(10)
        private.abandon()
        break


def test_restart_forgets_what_was_added() -> None:
    results = []
    for again in (False, True):
        model = network()
        private = Private(model, plan(steps=3), losses_of, seed=0)
        for lot in private.lots():
            if again:
                for batch in lot.batches(2):
                    private.add(batch, batch.index)
                private.restart()
            for batch in lot.batches(4):
                private.add(batch, batch.index)
            private.step(torch.optim.SGD(model.parameters(), lr=0.1))
        results.append(weights(model))
    assert torch.equal(*results)
