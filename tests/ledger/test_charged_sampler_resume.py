"""A run goes on where it was saved: bit for bit with a seed, with a new key without one; lost steps stay charged."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_course import KINDS, POISSON, L, N, losses_of, network, plan, train, weights
from torch import Tensor

from hush.accounting import Budget
from hush.clipping.clips import QuantileClip
from hush.ledger import Ledger, MemoryAccount
from hush.private import Private
from hush.sampling.lot import Lot
from hush.sampling.lots import AllocatedLots, Lots, ShuffledLots


def skip_all(private: Private, lot: Lot) -> None:
    for batch in lot.batches(N):
        private.skip(batch)


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("lots", KINDS)
@pytest.mark.parametrize("stop", [1, 3, 5, 7])
def test_hazard_22_a_seeded_run_resumes_bit_for_bit(lots: Lots, stop: int) -> None:
    made = plan(lots=lots, steps=12, clip=QuantileClip(initial=1.0, count_noise=5.0))

    def start() -> tuple[Private, torch.optim.Optimizer]:
        model = network()
        return Private(model, made, losses_of, seed=9), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    whole, optimizer = start()
    train(whole, optimizer)
    first, optimizer = start()
    train(first, optimizer, stop)
    saved = through_a_file(
        {"run": first.state_dict(), "model": first.model.state_dict(), "opt": optimizer.state_dict()}
    )
    model = network()
    model.load_state_dict(saved["model"])
    second = Private.resume(saved["run"], model, losses_of)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.load_state_dict(saved["opt"])
    assert second.steps_done == stop
    train(second, optimizer)
    assert torch.equal(weights(second.model), weights(whole.model))
    assert second.state_dict() == whole.state_dict()


@pytest.mark.parametrize(
    ("lots", "charged"),
    [(POISSON, 10), (AllocatedLots(examples=N, lot_size=L), 3), (ShuffledLots(examples=N, lot_size=L), 3)],
)
def test_hazard_22_a_secure_run_draws_a_new_key_and_gives_up_a_begun_epoch(lots: Lots, charged: int) -> None:
    made = plan(lots=lots, steps=10, reserve=10)
    first = Private(network(), made, losses_of)
    train(first, torch.optim.SGD(first.model.parameters(), lr=0.0), 7)
    state = through_a_file(first.state_dict())
    assert not any(isinstance(value, bytes | Tensor) for value in state.values()), "no key, no sum"
    assert state["charged"] == (7 if lots is POISSON else 2)
    after = []
    for _ in range(2):
        second = Private.resume(state, network(), losses_of)
        seen = []
        optimizer = torch.optim.SGD(second.model.parameters(), lr=0.0)
        for lot in second.lots():
            skip_all(second, lot)
            second.step(optimizer)
            seen.append(torch.cat([p.grad.flatten() for p in second.model.parameters() if p.grad is not None]))
        assert second.steps_done == 10 and second.account is not None and second.account.taken == charged
        after.append(torch.stack(seen))
    assert not torch.equal(after[0], after[1]), "no resumed run repeats another's noise"


def test_lost_steps_stay_charged_and_the_reserve_pays_for_them(tmp_path: Path) -> None:
    made = plan(steps=8, reserve=20, budget=Budget(epsilon=30.0, delta=1e-5))
    book = Ledger(tmp_path / "x.hush", create=True)
    first = Private(network(), made, losses_of, ledger=book.open_account("run", budget=made.budget, units=made.units))
    optimizer = torch.optim.SGD(first.model.parameters(), lr=0.0)
    train(first, optimizer, 3)
    state = first.state_dict()
    assert book.accounts()[0].spent == 3, "a checkpoint gives back what was only reserved"
    train(first, optimizer, 5)  # and then a crash
    resumed_at = book.accounts()[0].spent
    with pytest.raises(ValueError, match=r"was charged to .*x.hush: resume it with that ledger"):
        Private.resume(state, network(), losses_of)
    second = Private.resume(state, network(), losses_of, ledger=book)
    assert second.steps_done == 3 and resumed_at >= 5
    train(second, torch.optim.SGD(second.model.parameters(), lr=0.0))
    second.close()
    assert second.steps_done == 8 and book.accounts()[0].spent == resumed_at + 5


def test_noise_is_that_of_the_unit_that_was_charged() -> None:
    made = plan(steps=8, reserve=6, noise_multiplier=lambda charged: 1.0 + charged)
    first = Private(network(), made, losses_of)
    train(first, torch.optim.SGD(first.model.parameters(), lr=0.0), 3)
    account = MemoryAccount(units=made.units, spent=6)  # three more were lost in a crash
    second = Private.resume(first.state_dict(), network(), losses_of, ledger=account)
    seen = []
    for lot in second.lots():
        seen.append((lot.step, second._course.noise()))
        skip_all(second, lot)
        second.step(torch.optim.SGD(second.model.parameters(), lr=0.0))
    assert seen == [(step, 1.0 + 6 + step - 3) for step in range(3, 8)]


def test_a_run_with_an_open_lot_is_not_saved() -> None:
    private = Private(network(), plan(), losses_of, seed=0)
    next(private.lots())
    with pytest.raises(RuntimeError, match="lot 0 is open"):
        private.state_dict()


def test_an_exception_in_a_with_block_leaves_the_account_open_and_leaving_it_closes(tmp_path: Path) -> None:
    made = plan(budget=Budget(epsilon=30.0, delta=1e-5), reserve=20)
    Ledger(tmp_path / "x.hush", create=True).close()
    with pytest.raises(KeyboardInterrupt), Private(network(), made, losses_of, ledger=tmp_path / "x.hush") as first:
        optimizer = torch.optim.SGD(first.model.parameters(), lr=0.1)
        for lot in first.lots():
            skip_all(first, lot)
            first.step(optimizer)
            if lot.step == 2:
                state = first.state_dict()
                raise KeyboardInterrupt
    assert not Ledger(tmp_path / "x.hush").accounts()[0].closed
    with Private.resume(state, network(), losses_of, ledger=tmp_path / "x.hush") as second:
        assert second.steps_done == 3
        train(second, torch.optim.SGD(second.model.parameters(), lr=0.1))
    assert second.steps_done == 8 and Ledger(tmp_path / "x.hush").accounts()[0].closed


def test_epochs_are_the_lots_in_parts_and_a_second_pass_is_refused() -> None:
    private = Private(network(), plan(lots=AllocatedLots(examples=N, lot_size=L), steps=12), losses_of, seed=0)
    optimizer, sizes = torch.optim.SGD(private.model.parameters(), lr=0.1), []
    for epoch in private.epochs():
        sizes.append(0)
        for lot in epoch:
            skip_all(private, lot)
            private.step(optimizer)
            sizes[-1] += 1
    assert sizes == [5, 5, 2]
    with pytest.raises(RuntimeError, match=r"all 12 steps of the plan are done.*private.epochs\(\)"):
        private.lots()
