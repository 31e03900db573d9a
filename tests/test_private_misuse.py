"""The DP-SGD step when something goes wrong around it: parameters that come and go, strange gradients, bad examples."""

import copy
import math
import os
import pickle
import threading
from typing import Any

import pytest
import torch
from support.small_run import L, N, X, Y, clipped_mean, distance, gradients, losses_of, network, plan, run, sgd
from torch import Tensor, nn
from torch.nn import functional as F

from hush.clipping.clips import FlatClip
from hush.gradients.sums.lot_sum import LotSum
from hush.ledger import BudgetExhausted
from hush.private import Private
from hush.sampling.lots import PoissonLots


def test_hazard_05_unfreezing_keeps_the_bound_or_raises() -> None:
    model = network()
    model[2].requires_grad_(False)

    def losses(model: nn.Module, index: Tensor) -> Tensor:
        return losses_of(model, index) * (model.late if hasattr(model, "late") else 1.0)

    optimizer, private = sgd(model), Private(model, plan(FlatClip(0.01), steps=20), losses, seed=1)
    for lot in private.lots():
        if lot.step == 4:
            model[2].requires_grad_(True)  # inside a lot: nobody has clipped it
            batch = next(iter(lot.batches(30)))
            with pytest.raises(RuntimeError, match="trainable parameters changed inside a lot"):
                private.add(batch, batch.index)
            private.abandon()
            continue
        if lot.step == 9:
            model[0].requires_grad_(False)
            batch = next(iter(lot.batches(30)))
            with pytest.raises(RuntimeError, match="trainable parameters changed inside a lot"):
                private.add(batch, batch.index)
            model[0].requires_grad_(True)
            private.abandon()
            continue
        if lot.step == 12:
            model.register_parameter("late", nn.Parameter(torch.ones(1)))
            optimizer.add_param_group({"params": [model.late]})
            private.abandon()
            continue
        before = [p.detach().clone() for p in model.parameters()]
        for batch in lot.batches(6):
            private.add(batch, batch.index)
        private.step(optimizer)
        assert distance(before, list(model.parameters())) <= len(lot.indices) * 0.01 / L * (1 + 1e-3)


def test_hazard_05_a_gradient_that_is_not_private_stops_the_step() -> None:
    model, stranger = network(), nn.Parameter(torch.ones(2))
    private = Private(model, plan(noise=1.0), losses_of, seed=0)
    optimizer, several = sgd(model), torch.optim.SGD([*model.parameters(), stranger], lr=1.0)
    for lot in private.lots():
        for batch in lot.batches(8):
            private.add(batch, batch.index)
        if lot.step == 2:
            before = [p.detach().clone() for p in model.parameters()]
            with pytest.raises(RuntimeError, match=r"shape \(2,\) in group 0 .* not private"):
                private.step(several)
            with pytest.raises(ValueError, match=r"no optimizer of this step holds .* 2.weight"):
                private.step(torch.optim.SGD(model[0].parameters(), lr=1.0))
            with pytest.raises(ValueError, match="held twice"):
                private.step(optimizer, torch.optim.SGD(model[0].parameters(), lr=1.0))
            with pytest.raises(TypeError, match="LBFGS"):
                private.step(torch.optim.LBFGS(model.parameters()))
            assert distance(before, list(model.parameters())) == 0
        private.step(optimizer)


def test_two_optimizers_share_a_model_and_none_leaves_the_gradients_to_the_user() -> None:
    whole, parts, own = network(), network(), network()
    for model in (whole, parts, own):
        private = Private(model, plan(noise=0.5, steps=3), losses_of, seed=0)
        two = sgd(model[0]), sgd(model[2])
        for lot in private.lots():
            for batch in lot.batches(8):
                private.add(batch, batch.index)
            if model is own:
                private.step()
                with torch.no_grad():
                    for p in model.parameters():
                        p -= p.grad  # type: ignore[operator]
            else:
                private.step(*([sgd(model)] if model is whole else two))
    assert distance(list(whole.parameters()), list(parts.parameters())) == 0
    assert distance(list(whole.parameters()), list(own.parameters())) == 0


def test_plain_backward_by_the_user_is_overwritten() -> None:
    a, b = network(), network()
    for model, spoil in ((a, False), (b, True)):
        private = Private(model, plan(noise=0.5, steps=3), losses_of, seed=0)
        optimizer = sgd(model)
        for lot in private.lots():
            for batch in lot.batches(8):
                private.add(batch, batch.index)
            if spoil:
                (1e6 * losses_of(model, torch.arange(N)).sum()).backward()
            private.step(optimizer)
    assert distance(list(a.parameters()), list(b.parameters())) == 0


@pytest.mark.parametrize("bad", [math.inf, math.nan, 1e25])
def test_hazard_09_one_bad_example_is_bounded_and_touches_no_other(bad: float) -> None:
    spoiled = X.clone()
    spoiled[7] = bad
    model = network()

    def forward(model: nn.Module, index: Tensor) -> Tensor:
        return F.cross_entropy(model(spoiled[index]), Y[index], reduction="none")

    private, met = Private(model, plan(steps=12), forward, seed=0), False
    optimizer = sgd(model, lr=0.0)
    for lot in private.lots():
        for batch in lot.batches(5):
            private.add(batch, batch.index)
        private.step(optimizer)
        others = [i for i in lot.indices.tolist() if i != 7]
        moved = distance(gradients(model), clipped_mean(model, others, 0.5, L))
        assert moved <= 0.5 / L + 1e-6
        met |= 7 in lot.indices
    assert met
    noisy = Private(model, plan(noise=1.0, lots=PoissonLots(examples=N, lot_size=N), steps=1), forward, seed=0)
    for lot in noisy.lots():
        for batch in lot.batches(64):
            noisy.add(batch, batch.index)
        noisy.step(optimizer)
    assert all(torch.isfinite(g).all() and g.std() > 0 for g in gradients(model))


def test_hazard_33_nothing_is_attached_and_nothing_gets_stale() -> None:
    model, reference = network(), network()
    for one, disturbed in ((model, True), (reference, False)):
        private = Private(one, plan(noise=0.5, steps=5), losses_of, seed=0)
        optimizer = sgd(one)
        for lot in private.lots():
            for batch in lot.batches(3):
                if disturbed:
                    one(X[:3])
                    with torch.no_grad():
                        one(X)
                    losses_of(one, torch.arange(9))
                private.add(batch, batch.index)
            if disturbed:
                copy.deepcopy(one)
            private.step(optimizer)
        private.close()
    assert distance(list(model.parameters()), list(reference.parameters())) == 0
    fresh = network()
    assert model.state_dict().keys() == fresh.state_dict().keys()
    assert {k for m in model.modules() for k in vars(m)} == {k for m in fresh.modules() for k in vars(m)}
    assert all(not vars(m)["_forward_hooks"] and not vars(m)["_backward_hooks"] for m in model.modules())
    assert all(p.grad is None and not p._backward_hooks for p in model.parameters())


def test_a_batch_that_was_interrupted_while_it_was_added_never_counts_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    model, add = network(), LotSum.add
    private = Private(model, plan(FlatClip(0.5), steps=1, lots=PoissonLots(examples=N, lot_size=N)), losses_of)
    (lot,) = [next(private.lots())]
    first, second = lot.batches(20)
    private.add(first, first.index)

    def interrupted(*arguments: Any, **named: Any) -> None:
        add(*arguments, **named)
        raise KeyboardInterrupt

    monkeypatch.setattr(LotSum, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        private.add(second, second.index)
    monkeypatch.setattr(LotSum, "add", add)
    with pytest.raises(RuntimeError, match="no unused ticket"):
        private.add(second, second.index)
    before = [p.detach().clone() for p in model.parameters()]
    private.step(sgd(model, lr=0.0))
    assert distance(gradients(model), clipped_mean(model, list(range(N)), 0.5, N)) < 1e-6
    assert distance(before, list(model.parameters())) == 0


def test_memory_that_runs_out_in_an_addition_leaves_no_half_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, left = network(), [1]
    private = Private(model, plan(FlatClip(0.5), steps=1, lots=PoissonLots(examples=N, lot_size=N)), losses_of)
    lot = next(private.lots())
    first, second = lot.batches(20)
    private.add(first, first.index)
    double = Tensor.double

    def scarce(tensor: Tensor) -> Tensor:
        if not left:
            raise torch.OutOfMemoryError("no room")
        left.pop()
        return double(tensor)

    clipped = private.gradients.clipped_sum

    def then_scarce(*arguments: Any, **named: Any) -> Any:
        found = clipped(*arguments, **named)
        monkeypatch.setattr(Tensor, "double", scarce)
        return found

    monkeypatch.setattr(private.gradients, "clipped_sum", then_scarce)
    with pytest.raises(torch.OutOfMemoryError):
        private.add(second, second.index)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="no unused ticket"):
        private.add(second, second.index)
    with pytest.raises(RuntimeError, match=r"private\.restart\(\)"):
        private.step(sgd(model))
    private.restart()
    for batch in lot.batches(40):
        private.add(batch, batch.index)
    private.step(sgd(model, lr=0.0))
    assert distance(gradients(model), clipped_mean(model, list(range(N)), 0.5, N)) < 1e-6


@pytest.mark.parametrize("where", ["_close_lot", "restart"])
def test_an_interrupt_between_a_lot_and_the_next_never_joins_their_sums(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    model, clear = network(), LotSum.clear
    private = Private(model, plan(FlatClip(0.5), steps=3, lots=PoissonLots(examples=N, lot_size=N)), losses_of)
    optimizer = sgd(model, lr=0.0)

    def interrupted(lot_sum: LotSum) -> None:
        monkeypatch.setattr(LotSum, "clear", clear)
        raise KeyboardInterrupt

    lot = next(private.lots())
    for batch in lot.batches(20):
        private.add(batch, batch.index)
    monkeypatch.setattr(LotSum, "clear", interrupted)
    with pytest.raises(KeyboardInterrupt):
        private.step(optimizer) if where == "_close_lot" else private.restart()
    if where == "restart":
        with pytest.raises(RuntimeError, match="already handed out"):
            next(lot.batches(20))
        private.restart()
        for batch in lot.batches(40):
            private.add(batch, batch.index)
        private.step(optimizer)
        assert distance(gradients(model), clipped_mean(model, list(range(N)), 0.5, N)) < 1e-6
    else:
        private.abandon()
    for lot in private.lots():
        for batch in lot.batches(20):
            private.add(batch, batch.index)
        private.step(optimizer)
        assert distance(gradients(model), clipped_mean(model, list(range(N)), 0.5, N)) < 1e-6


def test_an_interrupted_drawing_costs_a_charge_and_not_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model, draw = network(), PoissonLots.draw
    private = Private(model, plan(FlatClip(0.5), noise=1.0, steps=3), losses_of)

    def interrupted(*_: object) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(PoissonLots, "draw", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(private.lots())
    monkeypatch.setattr(PoissonLots, "draw", draw)
    with pytest.raises(BudgetExhausted):
        for _ in run(private, model, sgd(model)):
            pass
    assert private.steps_done == 2 and private.account is not None and private.account.taken == 3


def test_an_open_lot_is_released_by_the_process_and_the_thread_that_took_it() -> None:
    model = network()
    private = Private(model, plan(FlatClip(0.5), noise=1.0, steps=3), losses_of)
    optimizer, lot = sgd(model), next(private.lots())
    for batch in lot.batches(8):
        private.add(batch, batch.index)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            private.step(optimizer)
        except RuntimeError as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    assert b"another process or thread" in os.read(reading, 1000)
    os.close(reading)
    refused: list[BaseException] = []

    def elsewhere() -> None:
        try:
            private.step(optimizer)
        except RuntimeError as error:
            refused.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "another process or thread" in str(refused[0])
    private.step(optimizer)
    assert private.steps_done == 1


def test_a_run_is_never_copied() -> None:
    private = Private(network(), plan(FlatClip(0.5), noise=1.0), losses_of)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied"):
            copied(private)
