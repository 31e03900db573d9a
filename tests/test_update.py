"""Captured steps give the numbers of plain ones, whatever happens between them. Without a GPU graphs are played."""

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from recorder import Studio, play_graphs_on_cpu
from torch import Tensor, nn

pytest.importorskip("triton")

from hush.gradients.clip import FlatClip, QuantileClip
from hush.lots import PoissonLots
from hush.normals import fill_normals
from hush.plan import Plan
from hush.private import Private

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_GPU = DEVICE == "cuda"
N = 40


@pytest.fixture
def studio(monkeypatch: pytest.MonkeyPatch) -> Studio | None:
    return None if ON_GPU else play_graphs_on_cpu(monkeypatch)


class Doubling(nn.Module):
    """Does another thing in training mode than else."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x if self.training else x


class Run:
    """A small training, seeded; captured or by the plain loop."""

    def __init__(self, *, captured: bool, kind: str = "sgd", steps: int = 8, size: int = 40, **changes: Any) -> None:
        torch.manual_seed(0)
        dtype = changes.pop("dtype", torch.float32)
        self.model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), Doubling().eval(), nn.Linear(5, 3))
        self.model.to(DEVICE, dtype)
        self.x, self.y = torch.randn(N, 6).to(DEVICE, dtype), torch.randint(0, 3, (N,)).to(DEVICE)
        self.optimizer = optimizers()[kind](self.model.parameters())
        settings = {"lots": PoissonLots(N, 20), "clip": FlatClip(1.0), "noise_multiplier": 1.0} | changes
        noise, seed = settings.pop("noise", "gaussian"), settings.pop("seed", 3)
        self.private = Private(self.model, Plan(steps=steps, **settings), seed=seed, noise=noise)
        self.captured, self.size = captured, size
        self.run = self.private.capture(self.losses)
        self.gradients: list[Tensor] = []

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.model(x), y, reduction="none")

    def batches(self, lot: Any) -> None:
        for index, mask in lot.batches(self.size, pad=True):
            rows = self.x[index.to(DEVICE)], self.y[index.to(DEVICE)]
            if self.captured:
                self.run(*rows, mask=mask)
            else:
                self.private.backward(self.losses(*rows), mask)

    def step(self) -> None:
        self.private.step(self.optimizer)
        self.gradients.append(torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None]))

    def train(self, between: Callable[["Run", int], None] = lambda run, step: None) -> "Run":
        for lot in self.private.lots():
            self.batches(lot)
            self.step()
            between(self, lot.step)
        return self


def optimizers() -> dict[str, Callable[[Any], torch.optim.Optimizer]]:
    found: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "plain": lambda p: torch.optim.SGD(p, lr=0.1),
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        "adam on the host": lambda p: torch.optim.Adam(p, lr=0.01),
        "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    }
    if ON_GPU:
        found["adam"] = lambda p: torch.optim.Adam(p, lr=0.01, capturable=True)
        found["adamw"] = lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01, device=DEVICE), capturable=True)
        found["fused"] = lambda p: torch.optim.SGD(p, lr=torch.tensor(0.1, device=DEVICE), momentum=0.9, fused=True)
    return found


def assert_same(one: Run, other: Run) -> None:
    """Bit for bit, gradients and parameters."""
    assert len(one.gradients) == len(other.gradients)
    for step, (a, b) in enumerate(zip(one.gradients, other.gradients, strict=True)):
        assert torch.equal(a, b), f"step {step}"
    for p, q in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(p, q)


def fresh_noise(run: Run) -> bool:
    return all(not torch.equal(a, b) for n, a in enumerate(run.gradients) for b in run.gradients[:n])


@pytest.mark.parametrize("kind", optimizers())
def test_captured_steps_equal_plain_steps(kind: str, studio: Studio | None) -> None:
    captured = Run(captured=True, kind=kind).train()
    assert_same(captured, Run(captured=False, kind=kind).train())
    assert fresh_noise(captured)
    if studio is not None:
        expected = {"plain": [1, 7], "sgd": [2, 6]}
        assert studio.replays == expected.get(kind, [8]), "the region alone first, then the whole step as one launch"


@pytest.mark.parametrize(
    "changes",
    [
        {"size": 16},  # nearly every lot spills
        {"size": 22},  # some do
        {"lots": PoissonLots(N, 1), "steps": 12},  # a third of the lots are empty
        {"noise_multiplier": lambda step: 1.0 + step % 3},
        {"clip": FlatClip(lambda step: 1.0 + step % 2)},
        {"clip": FlatClip(lambda step: 1.0 + step // 4)},
        {"clip": QuantileClip(initial=1.0, count_noise=5.0)},
        {"noise_multiplier": 0.0},
        {"noise": "discrete", "kind": "plain", "steps": 3},
        {"dtype": torch.bfloat16},  # sums in float32, parameters not
    ],
    ids=["spilled", "sometimes", "empty", "noise", "clip", "two clips", "quantile", "no noise", "discrete", "half"],
)
def test_lots_of_every_kind_equal_plain_ones(changes: dict[str, Any], studio: Studio | None) -> None:
    captured, plain = Run(captured=True, **changes).train(), Run(captured=False, **changes).train()
    assert_same(captured, plain)
    assert fresh_noise(captured) or changes.get("noise_multiplier") == 0.0


def change_rate(run: Run, step: int) -> None:
    run.optimizer.param_groups[0]["lr"] = 0.1 / (1 + step // 4)


def change_rate_always(run: Run, step: int) -> None:
    run.optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)


def load_parameters(run: Run, step: int) -> None:
    if step == 5:
        run.model.load_state_dict({name: 2 * value for name, value in run.model.state_dict().items()})


def move_parameters(run: Run, step: int) -> None:
    if step == 5:
        for parameter in run.model.parameters():
            parameter.data = 2 * parameter.data


def freeze(run: Run, step: int) -> None:
    run.model[0].weight.requires_grad_(step not in (4, 5, 6))


def change_mode(run: Run, step: int) -> None:
    run.model[2].train(step == 5)


def look_on(run: Run, step: int) -> None:
    run.model.eval()(run.x)
    run.model.train()[2].eval()


def swap_optimizer(run: Run, step: int) -> None:
    if step == 6:
        run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.02, momentum=0.5)


def resume(run: Run, step: int) -> None:
    if step == 6:
        run.private.load_state_dict(run.private.state_dict())


@pytest.mark.parametrize(
    "between",
    [
        change_rate,
        change_rate_always,
        load_parameters,
        move_parameters,
        freeze,
        change_mode,
        look_on,
        swap_optimizer,
        resume,
    ],
    ids=lambda function: function.__name__,
)
def test_what_changes_between_steps_is_seen(between: Callable[[Run, int], None], studio: Studio | None) -> None:
    captured = Run(captured=True, steps=12).train(between)
    assert_same(captured, Run(captured=False, steps=12).train(between))
    assert fresh_noise(captured)
    if studio is not None and between is look_on:
        assert studio.replays == [2, 10], "the same modes again are nothing new"


def test_a_learning_rate_in_a_host_tensor_is_not_frozen_into_the_graph(studio: Studio | None) -> None:
    def start(captured: bool) -> Run:
        run = Run(captured=captured, kind="plain", steps=12)
        run.optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
        return run

    def halve(run: Run, step: int) -> None:
        if step == 7:
            run.optimizer.param_groups[0]["lr"].mul_(0.5)

    assert_same(start(True).train(halve), start(False).train(halve))


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
        if lot.step != 9:
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
    from hush import graphs

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
    from hush import graphs

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


def test_large_models_take_two_launches(studio: Studio | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hush.update._WHOLE_BELOW", 10)
    captured = Run(captured=True).train()
    assert_same(captured, Run(captured=False).train())
    if studio is not None:
        assert studio.replays == [8, 6]


def test_a_mask_that_the_user_wrote_into_counts_and_padding_never_does(studio: Studio | None) -> None:
    def masked(captured: bool, passed: bool, lots: PoissonLots) -> Run:
        run = Run(captured=captured, kind="plain", lots=lots)
        for lot in run.private.lots():
            for index, mask in lot.batches(run.size, pad=True):
                rows = run.x[index.to(DEVICE)], run.y[index.to(DEVICE)]
                if lot.step % 3:
                    mask[:] = index % 3 != lot.step % 3  # padding is example 0: it would count now and then
                given = mask if passed else None
                if captured:
                    run.run(*rows, mask=given)
                else:
                    run.private.backward(run.losses(*rows), given)
            run.step()
        return run

    def oracle(lots: PoissonLots) -> Run:
        run = Run(captured=False, kind="plain", lots=lots)
        for lot in run.private.lots():
            for index in lot.batches(run.size):
                keep = (index % 3 != lot.step % 3) | (lot.step % 3 == 0)
                run.private.backward(run.losses(run.x[index.to(DEVICE)], run.y[index.to(DEVICE)]), keep)
            run.step()
        return run

    for lots in (PoissonLots(N, 20), PoissonLots(N, N)):
        for captured, passed in product((False, True), (False, True)):
            found = masked(captured, passed, lots)
            for one, other in zip(found.gradients, oracle(lots).gradients, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_batch_can_be_computed_before_its_step(studio: Studio | None) -> None:
    run = Run(captured=True)
    for lot in run.private.lots():
        run.batches(lot)
        if lot.step in (1, 6):
            run.run.finish()
        run.step()
    assert_same(run, Run(captured=False).train())


class Counting(nn.Module):
    """Writes into a buffer in every forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


def test_a_forward_pass_that_was_refused_is_not_replayed(studio: Studio | None) -> None:
    model = nn.Sequential(nn.Linear(6, 3), Counting()).to(DEVICE)
    plan = Plan(lots=PoissonLots(N, N), steps=4, clip=FlatClip(1.0), noise_multiplier=1.0)
    private = Private(model, plan, seed=0, selfcheck=False)
    run = private.capture(lambda x: model(x).square().sum(1))
    lot = next(private.lots())
    for _ in range(3):
        for _ in lot.batches(N, pad=True):
            with pytest.raises(RuntimeError, match=r"buffer '1.calls' of Counting was changed"):
                run(torch.randn(N, 6, device=DEVICE))
        private.restart()
        private._guard.begin_lot()


def test_a_captured_step_uses_its_noise_up(studio: Studio | None) -> None:
    run = Run(captured=True).train()
    with pytest.raises(RuntimeError, match="noise for step 7 was asked for after that of step 7"):
        run.private._releaser._normals.begin(7)


def test_a_new_key_is_used_from_the_next_step_on(studio: Studio | None) -> None:
    run, old = Run(captured=True, kind="plain", seed=None, steps=9, noise_multiplier=1e5), b""
    for lot in run.private.lots():
        run.batches(lot)
        run.step()
        subkey = run.private._releaser._normals.subkey()
        numbers = np.empty(run.gradients[-1].numel(), np.float32)
        fill_normals(numbers, subkey, lot.step)
        torch.testing.assert_close(run.gradients[-1].cpu(), torch.from_numpy(numbers) * 1e5 / 20, rtol=1e-2, atol=10.0)
        if lot.step == 5:
            run.private.load_state_dict(run.private.state_dict())
            old = subkey
    assert subkey != old


def test_nothing_stays_in_the_gradients_when_a_capture_is_interrupted(
    studio: Studio | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hush import graphs

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


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("kind", ["plain", "sgd", "adam"])
def test_a_captured_step_waits_for_nothing(kind: str) -> None:
    run = Run(captured=True, kind=kind, steps=12)
    rows = run.x, run.y
    try:
        for lot in run.private.lots():
            torch.cuda.set_sync_debug_mode("error" if lot.step > 4 else "default")
            for _ in lot.batches(N, pad=True):
                run.run(*rows)
            run.private.step(run.optimizer)
    finally:
        torch.cuda.set_sync_debug_mode("default")
