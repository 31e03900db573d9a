"""Hazards 35 and 42: the noise does not tell who was in the lot, not how many, not how long, not whether anybody.

Amplification by sampling needs a lot without the record to have the law of a lot with its null record. A deviation of
the noise that follows the lots that were drawn, by a few parts in a thousand, is read off a large release, and the lot
of the record then costs an unamplified Gaussian.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from support.recorder import play_graphs_on_cpu
from torch import Tensor, nn

from hush.clipping.clips import AutomaticClip, Clip, FlatClip, PerLayerClip, QuantileClip
from hush.plan import Plan
from hush.private import Private
from hush.sampling.lots import PoissonLots

LENGTHS = [*range(1, 31), *range(40, 330, 10), 1000]
"""Sixty of them."""
EXPECTED = 3
pytestmark = pytest.mark.filterwarnings("ignore:where the examples lie")


class Listening(torch.optim.SGD):
    """An optimizer that hears the deviation of the noise, as it is declared."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.0)
        self.heard: set[tuple[float, ...]] = set()

    def expect_noise(self, deviations: dict[Tensor, float]) -> None:
        self.heard.add(tuple(deviations.values()))


class Words(nn.Module):
    """A table and a layer over sequences of any length, and a layer over single rows: sums of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 8)
        self.mix, self.out = nn.Linear(8, 12), nn.Linear(12, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(torch.tanh(self.mix(self.table(tokens))).mean(1))


def nobody_counts(model: nn.Module, tokens: Tensor) -> Tensor:
    """Losses that go through every sum and have gradients of zero."""
    return 0 * model(tokens).square().sum(1)


def released(
    length_of: Callable[[int], int | None], clip: Clip, *, steps: int = len(LENGTHS), noise: str = "gaussian"
) -> tuple[set[tuple[float, ...]], Tensor]:
    """The declared deviations, and all that was released, of lots whose rows go through every sum and count zero.

    `length_of(step)` is the length of the sequences of a lot, None for a lot whose batches are not used. The seed is
    always the same: what is released can differ by the scale of the noise alone.
    """
    torch.manual_seed(0)
    model = Words()
    optimizer = Listening(model)
    lots, kind = PoissonLots(examples=40, lot_size=EXPECTED), cast(Any, noise)
    plan = Plan(lots=lots, steps=steps, clip=clip, noise_multiplier=1.5, noise=kind)
    private = Private(model, plan, nobody_counts, seed=1)
    found = []
    for lot in private.lots():
        length = length_of(lot.step)
        for batch in lot.batches(2):
            if length is None:
                private.skip(batch)
            else:
                private.add(batch, torch.arange(len(batch) * length).view(len(batch), length) % 7)
        private.step(optimizer)
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    return optimizer.heard, torch.stack(found)


WORLDS: dict[str, Callable[[int], int | None]] = {
    "short": lambda step: 1,
    "sixty lengths": lambda step: LENGTHS[step],
    "long ones first": lambda step: LENGTHS[-1 - step],
    "one long lot": lambda step: 1000 if step == 30 else 8,
    "empty until one comes": lambda step: 300 if step >= 20 else None,
    "empty now and then": lambda step: LENGTHS[step] if step % 3 else None,
}


@pytest.fixture(scope="module")
def nobody() -> tuple[set[tuple[float, ...]], Tensor]:
    """The run in which no lot has anybody in it."""
    return released(lambda step: None, FlatClip(0.7))


@pytest.mark.parametrize("world", WORLDS)
def test_hazards_35_and_42_every_lot_has_the_same_noise(
    world: str, nobody: tuple[set[tuple[float, ...]], Tensor]
) -> None:
    declared, noise = released(WORLDS[world], FlatClip(0.7))
    assert declared == nobody[0] and len(declared) == 1
    assert torch.equal(noise, nobody[1]), "bit for bit"
    (one,) = {round(deviation, 12) for deviation in next(iter(declared))}
    assert one == round(1.5 * 0.7 * 1.01 / EXPECTED, 12)
    assert float(noise.std()) == pytest.approx(one, rel=5 / math.sqrt(2 * noise.numel()))


@pytest.mark.parametrize(
    "clip, noise",
    [
        (FlatClip(0.7), "float_safe"),
        (PerLayerClip({"mix": 0.2, "*": 1.0}), "gaussian"),
        (AutomaticClip(0.3), "gaussian"),
        (FlatClip(lambda step: 1.0 / (1 + step)), "gaussian"),
        (QuantileClip(initial=0.5, count_noise=7.0, learning_rate=1e-9), "gaussian"),
    ],
    ids=["on a grid", "layers", "automatic", "schedule", "quantile"],
)
def test_hazards_35_and_42_under_every_clip(clip: Clip, noise: str) -> None:
    steps = 4 if noise == "float_safe" else 12
    nobody, mixed = (
        released(length_of, clip, steps=steps, noise=noise)
        for length_of in (lambda step: None, lambda step: [None, 300, 1, 77][step % 4])
    )
    assert torch.equal(nobody[1], mixed[1]) or isinstance(clip, QuantileClip)
    torch.testing.assert_close(nobody[1], mixed[1], rtol=1e-6, atol=0.0)  # the count moves a bound by 1e-9
    if not callable(getattr(clip, "bound", None)) and not isinstance(clip, QuantileClip):
        assert nobody[0] == mixed[0] and len(nobody[0]) == 1


def lots_of_one_run(private: Private, model: nn.Module, captured: bool) -> Iterator[Tensor]:
    """Lots in physical batches of 40 rows, padded: without a batch, or with one whose rows all count zero."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for lot in private.lots():
        for batch in lot.batches(40, pad=True):
            if captured and lot.step % 4:
                private.add(batch, torch.ones(len(batch), 6))
            else:
                private.skip(batch)
        private.step(optimizer)
        yield torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_hazards_35_and_42_captured_steps_have_the_noise_of_empty_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    play_graphs_on_cpu(monkeypatch)

    def run(captured: bool) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
        plan = Plan(lots=PoissonLots(examples=40, lot_size=20), steps=9, clip=FlatClip(1.0), noise_multiplier=1.0)
        return torch.stack(list(lots_of_one_run(Private(model, plan, nobody_counts, seed=3), model, captured)))

    assert torch.equal(run(captured=True), run(captured=False))
