"""Captured batches that are read where they lie: the same numbers, no copy, and nothing that changes unseen."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from support.captured_run import DEVICE, ON_GPU, N, Run, assert_same, fresh_noise
from support.recorder import Studio, play_graphs_on_cpu
from torch import Tensor, nn

pytest.importorskip("triton")

from hush.clipping.clips import FlatClip
from hush.plan import Plan
from hush.private import Captured, Private
from hush.sampling.lots import PoissonLots


@pytest.fixture
def studio(monkeypatch: pytest.MonkeyPatch) -> Studio | None:
    return None if ON_GPU else play_graphs_on_cpu(monkeypatch)


@pytest.mark.parametrize("size", [40, 22, 16])
def test_batches_in_place_equal_plain_ones(size: int, studio: Studio | None) -> None:
    captured = Run(captured=True, in_place=True, size=size).train()
    assert_same(captured, Run(captured=False, size=size).train())
    assert fresh_noise(captured)
    if studio is not None and size == 40:
        assert studio.replays == [2, 6], "the region alone first, then the whole step as one launch"


def test_nothing_is_copied(studio: Studio | None, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = start(nn.Linear(6, 3).to(DEVICE), in_place=True)
    rows = torch.randn(N, 6, device=DEVICE), torch.zeros(N, dtype=torch.long, device=DEVICE)
    monkeypatch.setattr(torch, "_foreach_copy_", lambda *_: pytest.fail("copied"))
    for _ in range(5):
        loop.step(*rows)


class Loop:
    """Steps on one batch after another, all examples in every lot, and what they release."""

    def __init__(self, private: Private, captured: Captured, optimizer: torch.optim.Optimizer) -> None:
        self.private, self.captured, self.optimizer = private, captured, optimizer
        self.lots = private.lots()

    def batch(self, *rows: Tensor) -> None:
        for _ in next(self.lots).batches(N, pad=True):
            self.captured(*rows)

    def step(self, *rows: Tensor) -> list[Tensor]:
        self.batch(*rows)
        self.private.step(self.optimizer)
        return [p.grad.clone() for p in self.private.model.parameters() if p.grad is not None]


def start(model: nn.Module, *, in_place: bool, noise: float = 1.0) -> Loop:
    plan = Plan(lots=PoissonLots(N, N), steps=50, clip=FlatClip(1.0), noise_multiplier=noise)
    private = Private(model, plan, seed=0, selfcheck=False)
    captured = private.capture(lambda x, y: F.cross_entropy(model(x), y, reduction="none"), in_place=in_place)
    return Loop(private, captured, torch.optim.SGD(model.parameters(), lr=0.0))


def swap(x: Tensor) -> None:
    x.data = x.data.clone()


@pytest.mark.parametrize("change", [lambda x: x.mul_(2), lambda x: x[3:4].zero_(), swap], ids=["all", "row", "memory"])
def test_a_batch_that_changes_before_the_step_is_refused(
    change: Callable[[Tensor], object], studio: Studio | None
) -> None:
    loop = start(nn.Linear(6, 3).to(DEVICE), in_place=True)
    x, y = torch.randn(N, 6, device=DEVICE), torch.zeros(N, dtype=torch.long, device=DEVICE)
    for _ in range(4):
        loop.step(x, y)
    loop.batch(x, y)
    change(x)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="were changed between the batch and"):
            loop.private.step(loop.optimizer)
    assert loop.private.steps_done == 4


def test_other_strides_in_the_same_memory_are_another_batch(studio: Studio | None) -> None:
    torch.manual_seed(0)
    model, memory = nn.Linear(6, 3).to(DEVICE), torch.randn(6 * N, device=DEVICE)
    y = torch.arange(N, device=DEVICE) % 3
    batches = [memory.view(N, 6), memory.view(6, N).t()]
    assert batches[0].data_ptr() == batches[1].data_ptr() and batches[0].shape == batches[1].shape
    found, expected = start(model, in_place=True), start(model, in_place=False)
    for x in 3 * batches:
        for one, other in zip(found.step(x, y), expected.step(x, y), strict=True):
            torch.testing.assert_close(one, other)


def test_large_models_read_two_places_in_turns(studio: Studio | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hush.captured.step._WHOLE_BELOW", 0)
    torch.manual_seed(0)
    model, y = nn.Linear(6, 3).to(DEVICE), torch.arange(N, device=DEVICE) % 3
    places = [torch.randn(N, 6, device=DEVICE) for _ in range(2)]
    found, expected = start(model, in_place=True), start(model, in_place=False)
    for turn in range(24):
        x = places[turn // 8 % 2]
        for one, other in zip(found.step(x, y), expected.step(x, y), strict=True):
            torch.testing.assert_close(one, other)


def test_batches_that_never_lie_where_one_lay_are_refused(studio: Studio | None) -> None:
    loop = start(nn.Linear(6, 3).to(DEVICE), in_place=True)
    y = torch.zeros(N, dtype=torch.long, device=DEVICE)
    places = [torch.randn(N, 6, device=DEVICE) for _ in range(5)]
    for x in 2 * places[:4]:
        loop.step(x, y)
    with pytest.raises(ValueError, match="in the same memory each time, in 4 places at most"):
        loop.batch(places[4], y)


class Doubling(nn.Module):
    """Writes into what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


def test_a_forward_pass_that_writes_into_its_batch_is_refused(studio: Studio | None) -> None:
    loop = start(nn.Sequential(Doubling(), nn.Linear(6, 3)).to(DEVICE), in_place=True)
    with pytest.raises(RuntimeError, match="writes into its batch"):
        loop.batch(torch.randn(N, 6, device=DEVICE), torch.zeros(N, dtype=torch.long, device=DEVICE))
