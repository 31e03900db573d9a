"""Captured steps when something goes wrong or is done in between: no noise twice, no sum of another lot, no padding."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.captured_run import DEVICE, ON_GPU, N, Plain, Run, assert_same, fresh_noise
from support.recorder import Studio, play_graphs_on_cpu
from torch import Tensor, nn

pytest.importorskip("triton")

from hush.clipping.clips import FlatClip
from hush.machine import Machine
from hush.plan import Plan
from hush.private import Private
from hush.randomness.gaussian_samples import fill_normals
from hush.randomness.streams import Claim, Key
from hush.sampling.lots import PoissonLots


@pytest.fixture
def studio(monkeypatch: pytest.MonkeyPatch) -> Studio | None:
    return None if ON_GPU else play_graphs_on_cpu(monkeypatch)


def trouble(run: Run) -> None:
    """Lots that are begun again, given up, and left without a batch."""
    for lot in run.private.lots():
        if lot.step % 3 == 0:
            run.batches(lot)
            run.private.restart()
        if lot.step == 4:
            run.batches(lot)
        if lot.step in (4, 7):
            run.private.abandon()
            continue
        if lot.step == 9:
            for batch in lot.batches(N):
                run.private.skip(batch)
        else:
            run.batches(lot)
        run.step()


def test_lots_that_are_begun_again_given_up_or_left_empty(studio: Studio | None) -> None:
    captured, plain = Run(captured=True, steps=14), Run(captured=False, steps=14)
    trouble(captured)
    trouble(plain)
    assert_same(captured, plain)
    assert fresh_noise(captured) and len(captured.gradients) == 12


def test_parameters_that_change_under_a_batch_are_refused(studio: Studio | None) -> None:
    for how, noise in (("value", 1.0), ("storage", 1.0), ("value", 0.0)):  # without noise there is no captured update
        run = Run(captured=True, noise_multiplier=noise)
        with pytest.raises(RuntimeError, match="were changed between the batch and"):
            for lot in run.private.lots():
                run.batches(lot)
                if lot.step == 4:
                    first = next(run.model.parameters())
                    if how == "value":
                        with torch.no_grad():
                            first.mul_(2)
                    else:
                        first.data = first.data.clone()
                run.step()
        with pytest.raises(RuntimeError, match="were changed between the batch and"):
            run.step()  # again: an older sum must not be released in its place
        run.private.restart()
        run.batches(run.private._open_lot("test"))
        run.step()
        assert run.private.steps_done == 5 and fresh_noise(run)


def test_noise_is_never_used_twice_when_a_replay_fails(studio: Studio | None, monkeypatch: pytest.MonkeyPatch) -> None:
    from hush.captured import cuda_graphs as graphs

    run, failed = Run(captured=True, steps=12), []
    kind = graphs.Recording if studio is None else type(studio.record(lambda: None)[0])
    replay = kind.replay
    for lot in run.private.lots():
        run.batches(lot)
        if lot.step in (5, 8):
            monkeypatch.setattr(kind, "replay", lambda self: failed.append(self) or 1 / 0)
            with pytest.raises(ZeroDivisionError):
                run.step()
            monkeypatch.setattr(kind, "replay", replay)
            assert run.private.steps_done == lot.step + 1, "its noise may have been used"
        else:
            run.step()
    plain = Run(captured=False, steps=12)
    for lot in plain.private.lots():
        if lot.step in (5, 8):
            plain.private.abandon()
        else:
            plain.batches(lot)
            plain.step()
    assert len(failed) == 2
    assert_same(run, plain)


def test_what_cannot_be_captured_goes_on_without(studio: Studio | None, monkeypatch: pytest.MonkeyPatch) -> None:
    from hush.captured import cuda_graphs as graphs

    run, real = Run(captured=True, kind="plain"), graphs.record

    def refusing(function: Callable[[], Any], *, beside: Any = None) -> Any:
        if beside is not None:
            real(function, beside=beside)
            raise torch.OutOfMemoryError("no memory for the whole step")
        return real(function)

    monkeypatch.setattr(graphs, "record", refusing)
    with pytest.warns(RuntimeWarning, match="not captured, and goes on without: no memory for the whole step"):
        run.train()
    assert_same(run, Run(captured=False, kind="plain").train())


def test_large_regions_take_two_launches(studio: Studio | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hush.captured.step._WHOLE_BELOW", 0)
    captured = Run(captured=True).train()
    assert_same(captured, Run(captured=False).train())
    if studio is not None:
        assert studio.replays == [8, 6]


def test_a_mask_that_the_user_wrote_into_changes_nothing(studio: Studio | None) -> None:
    def trained(captured: bool, written: bool) -> Run:
        run = Run(captured=captured, kind="plain")
        for lot in run.private.lots():
            for batch in lot.batches(run.size, pad=True):
                rows = batch.index.to(DEVICE)
                if written:
                    batch.mask[:] = batch.index % 3 != lot.step % 3
                run.private.add(batch, run.x[rows], run.y[rows])
            run.step()
        return run

    for captured in (False, True):
        assert_same(trained(captured, True), trained(captured, False))


def test_the_order_of_named_parts_is_seen(studio: Studio | None) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 1).to(DEVICE)
    plan = Plan(lots=PoissonLots(examples=N, lot_size=N), steps=6, clip=FlatClip(1.0), noise_multiplier=1e-3)
    parts = {"up": torch.randn(N, 6, device=DEVICE), "down": torch.randn(N, 6, device=DEVICE)}

    def gradients(captured: bool) -> list[Tensor]:
        def losses_of(model: nn.Module, *, up: Tensor, down: Tensor) -> Tensor:
            return (2 * model(up) - model(down)).square().squeeze(1)

        machine = Machine() if captured else Plain()
        private, found = Private(model, plan, losses_of, seed=0, machine=machine), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for lot in private.lots():
            names = ("up", "down") if lot.step % 2 else ("down", "up")
            for batch in lot.batches(N, pad=True):
                private.add(batch, **{name: parts[name] for name in names})
            private.step(optimizer)
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return found

    for one, other in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(one, other)


def test_a_batch_can_be_computed_before_its_step(studio: Studio | None) -> None:
    run = Run(captured=True)
    for lot in run.private.lots():
        run.batches(lot)
        if lot.step in (1, 6):
            run.private.captured and run.private.captured.compute()
        run.step()
    assert_same(run, Run(captured=False).train())


class Counting(nn.Module):
    """Writes into a buffer in every forward pass, from the second lot on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.active = False

    def forward(self, x: Tensor) -> Tensor:
        if self.active:
            self.calls += 1
        return x


def test_a_forward_pass_that_was_refused_is_not_replayed(studio: Studio | None) -> None:
    model = nn.Sequential(nn.Linear(6, 3), Counting()).to(DEVICE)
    plan = Plan(lots=PoissonLots(examples=N, lot_size=N), steps=4, clip=FlatClip(1.0), noise_multiplier=1.0)
    private = Private(model, plan, lambda model, x: model(x).square().sum(1), seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for lot in private.lots():
        if lot.step == 3:  # a lot that nobody looks at but for the counters
            model[1].active = True
            model.eval()  # another graph, so that the code of the model runs again
            model.train()
            private.captured._region.forget()  # type: ignore[union-attr]
            for _ in range(3):
                for batch in lot.batches(N, pad=True):
                    with pytest.raises(RuntimeError, match=r"buffer '1.calls' of Counting was changed"):
                        private.add(batch, torch.randn(N, 6, device=DEVICE))
                private.restart()
                model[1].calls.zero_()
            break
        for batch in lot.batches(N, pad=True):
            private.add(batch, torch.randn(N, 6, device=DEVICE))
        private.step(optimizer)


def test_a_captured_step_uses_its_noise_up(studio: Studio | None) -> None:
    run = Run(captured=True).train()
    with pytest.raises(RuntimeError, match="step 7 was asked for after that of step 7"):
        run.private._releaser.normals.begin(7)


@pytest.mark.parametrize("happens", ["nothing", "resume", "fork"])
def test_every_captured_step_has_the_noise_of_its_own_claim(
    happens: str, studio: Studio | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    claims: list[Claim] = []

    def noting(key: Key, purpose: str, **wanted: int | None) -> Claim:
        claims.append(claim(key, purpose, **wanted))  # type: ignore[arg-type]
        return claims[-1]

    claim = Key.claim
    monkeypatch.setattr(Key, "claim", noting)
    run, subkeys = Run(captured=True, kind="plain", seed=None, steps=9, noise_multiplier=1e5), set()
    for lot in run.private.lots():
        run.batches(lot)
        run.step()
        assert claims[-1].step == lot.step
        subkeys.add(claims[-1].subkey())
        numbers = np.empty(run.gradients[-1].numel(), np.float32)
        fill_normals(numbers, claims[-1].subkey(), lot.step)
        torch.testing.assert_close(run.gradients[-1].cpu(), torch.from_numpy(numbers) * 1e5 / 20, rtol=1e-2, atol=10.0)
        if lot.step == 5 and happens == "fork":  # between lots: an open one stays the parent's
            monkeypatch.setattr("hush.randomness.streams._Process.token", object())  # what a fork does in the child
        if lot.step == 5 and happens == "resume":
            run.private._load(run.private.state_dict())
    assert len(subkeys) == 9, "fresh bytes of the operating system in each"
    assert studio is None or sum(studio.replays) > 6


def test_a_batch_that_asks_for_gradients_is_not_captured(studio: Studio | None) -> None:
    run = Run(captured=True, steps=5)
    run.x.requires_grad_()
    assert_same(run.train(), Run(captured=False, steps=5).train())
    assert studio is None or studio.recordings == []


def test_nothing_stays_in_the_gradients_when_a_capture_is_interrupted(
    studio: Studio | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hush.captured import cuda_graphs as graphs

    run, real = Run(captured=True, kind="plain"), graphs.record

    def interrupted(function: Callable[[], Any], *, beside: Any = None) -> Any:
        found = real(function, beside=beside)
        if beside is not None:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(graphs, "record", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.train()
    assert len(run.gradients) == 1 and all(p.grad is None for p in run.model.parameters())
