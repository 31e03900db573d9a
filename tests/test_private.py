"""The DP-SGD step against a loop of single backward passes, however a lot is cut into batches."""

import math
from collections.abc import Callable

import pytest
import torch
from support.small_run import POISSON, L, N, X, Y, clipped_mean, distance, gradients, losses_of, network, plan, run, sgd
from torch import Tensor, nn
from torch.nn import functional as F

from hush.clipping.clips import FlatClip, PerLayerClip, QuantileClip
from hush.gradients.functional import per_example
from hush.private import Private
from hush.sampling.lots import AllocatedLots, Lots, PoissonLots, ShuffledLots
from hush.training.augmentation import copies
from hush.training.optimizers import CorrectedAdam

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.3),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.3, momentum=0.9, weight_decay=1e-2),
    "nesterov": lambda m: torch.optim.SGD(m.parameters(), lr=0.3, momentum=0.9, nesterov=True),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
    "corrected": lambda m: CorrectedAdam(m.parameters(), lr=0.01, floor=1e-8),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_without_noise_and_bound_it_is_the_plain_optimizer(name: str) -> None:
    ours, theirs = network(), network()
    mine, other = OPTIMIZERS[name](ours), OPTIMIZERS[name](theirs)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.5) for o in (mine, other)]
    private = Private(ours, plan(FlatClip(math.inf), steps=10), losses_of, seed=0)
    for indices in run(private, ours, mine):
        other.zero_grad()
        if indices:
            (losses_of(theirs, torch.tensor(indices)).sum() / L).backward()
        else:
            for p in theirs.parameters():
                p.grad = torch.zeros_like(p)
        if isinstance(other, CorrectedAdam):
            other.expect_noise(dict.fromkeys(theirs.parameters(), 0.0))
        other.step()
        for schedule in schedules:
            schedule.step()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lots", [POISSON, AllocatedLots(examples=N, lot_size=L), ShuffledLots(examples=N, lot_size=L)])
@pytest.mark.parametrize("size", [1, 3, 64])
def test_hazard_26_any_physical_batch_size_gives_the_clipped_sum_of_single_examples(lots: Lots, size: int) -> None:
    model = network()
    optimizer, private = sgd(model, lr=0.0), Private(model, plan(FlatClip(1.4), lots=lots, steps=7), losses_of, seed=3)
    for indices in run(private, model, optimizer, size):
        expected = clipped_mean(model, indices, 1.4, L)
        assert distance(gradients(model), expected) <= 1e-5


def test_padded_and_loaded_batches_give_the_same_whatever_is_done_to_the_mask() -> None:
    def released(form: str) -> list[Tensor]:
        model = network()
        optimizer, found = sgd(model), []
        data = (X, Y) if form == "loaded" else None
        function = per_example(F.cross_entropy) if form == "loaded" else losses_of
        private = Private(model, plan(noise=0.3, steps=4), function, data=data, seed=5)
        for lot in private.lots():
            for batch in lot.batches(3, pad=form != "plain"):
                if form == "wrong mask":
                    batch.mask[:] = True
                private.add(batch, *([] if form == "loaded" else [batch.index]))
            private.step(optimizer)
            found += gradients(model)
        return found

    plain = released("plain")
    for form in ("padded", "wrong mask", "loaded"):
        assert distance(plain, released(form)) < 1e-5, form


def test_per_layer_clip_bounds_each_layer_and_gets_the_joint_noise() -> None:
    model = network()
    private = Private(model, plan(PerLayerClip({"0": 0.1, "2": 0.2}), steps=3), losses_of, seed=0)
    for indices in run(private, model, sgd(model, lr=0.0)):
        for layer, bound in ((model[0], 0.1), (model[2], 0.2)):
            norm = math.sqrt(sum(float(p.grad.detach().double().square().sum()) for p in layer.parameters()))
            assert norm <= len(indices) * bound / L + 1e-9


def test_hazard_01_neighbours_move_the_release_by_at_most_the_sensitivity_over_a_constant() -> None:
    def released(without: int | None) -> list[list[Tensor]]:
        def losses(model: nn.Module, index: Tensor) -> Tensor:
            return losses_of(model, index) * (index != without)  # a record that contributes nothing

        model = network()
        optimizer, private, found = sgd(model, lr=0.0), Private(model, plan(steps=30), losses, seed=2), []
        for lot in private.lots():
            for batch in lot.batches(5):
                private.add(batch, batch.index)
            private.step(optimizer)
            found.append(gradients(model))
        return found

    full, fewer = released(None), released(17)
    moves = [distance(a, b) for a, b in zip(full, fewer, strict=True)]
    assert max(moves) <= 0.5 / L * (1 + 1e-4)
    assert max(moves) >= 0.49 / L, "the test must have met the example, clipped"
    assert min(moves) == 0.0


def test_hazard_02_the_scale_is_constant_for_every_lot_size() -> None:
    class Far(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(1))

        def forward(self, index: Tensor) -> Tensor:
            return 100.0 * self.w.expand(len(index))

    model, sizes = Far(), set()
    private = Private(
        model, plan(FlatClip(1.0), steps=150, lots=PoissonLots(examples=20, lot_size=2)), nn.Module.__call__, seed=0
    )
    optimizer = sgd(model, lr=0.0)
    for lot in private.lots():
        for batch in lot.batches(4):
            private.add(batch, batch.index)
        private.step(optimizer)
        sizes.add(len(lot.indices))
        assert model.w.grad is not None
        assert model.w.grad.item() == pytest.approx(len(lot.indices) / 2, rel=1e-4)
    assert {0, 1, 2, 3, 4, 5} <= sizes


@pytest.mark.parametrize("size", [1, 4, 64])
def test_hazard_11_and_12_the_bound_is_constant_in_a_lot_and_counts_all_of_it(size: int) -> None:
    start, model = QuantileClip(initial=0.3, quantile=0.5, learning_rate=0.5, count_noise=10.0), network()
    optimizer, private = sgd(model, lr=0.5), Private(model, plan(start, steps=15), losses_of, seed=4)
    bound = 0.3
    norms = lambda i: math.sqrt(  # noqa: E731
        sum(
            float(g.square().sum())
            for g in torch.autograd.grad(losses_of(model, torch.tensor([i]))[0], list(model.parameters()))
        )
    )
    for lot in private.lots():
        indices = lot.indices.tolist()
        expected = clipped_mean(model, indices, bound, L)
        share = 0.5 + sum(0.5 if norms(i) <= bound else -0.5 for i in indices) / L
        for batch in lot.batches(size):
            private.add(batch, batch.index)
        private.step(optimizer)
        assert distance(gradients(model), expected) < 1e-5
        bound *= math.exp(-0.5 * (min(1.0, max(0.0, share)) - 0.5))


def test_views_of_an_example_are_averaged_before_clipping() -> None:
    augmented = copies(X, 3) + 0.5 * torch.randn(3 * N, 5, generator=torch.Generator().manual_seed(0))
    model = network()

    def losses(model: nn.Module, index: Tensor) -> Tensor:
        rows = (3 * index[:, None] + torch.arange(3)).flatten()
        return F.cross_entropy(model(augmented[rows]), copies(Y[index], 3), reduction="none").view(-1, 3)

    clipped = 0
    private = Private(model, plan(FlatClip(1.4), steps=6), losses, seed=1)
    for lot in private.lots():
        expected = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
        for i in lot.indices.tolist():
            one = torch.autograd.grad(losses(model, torch.tensor([i])).mean(), list(model.parameters()))
            norm = math.sqrt(sum(float(g.double().square().sum()) for g in one))
            clipped += 1 if norm > 1.4 else -1
            for place, g in zip(expected, one, strict=True):
                place += g.double() * min(1.0, 1.4 / norm) / L
        for batch in lot.batches(5):
            private.add(batch, batch.index)
        private.step(sgd(model, lr=0.0))
        assert distance(gradients(model), expected) < 1e-6
    assert abs(clipped) < 30, "some must be clipped and some not"
    private = Private(model, plan(steps=1), lambda model, index: losses(model, index).flatten(), seed=1)
    for lot in private.lots():
        batch = next(iter(lot.batches(5)))
        with pytest.raises(ValueError, match=r"one for each row of the batch, .*K views of each, got \("):
            private.add(batch, batch.index)
        private.abandon()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_models_of_other_dtypes(dtype: torch.dtype) -> None:
    model = network().to(dtype)
    data = X.to(dtype), Y
    private = Private(model, plan(noise=0.5, steps=3), per_example(F.cross_entropy), data=data, seed=0)
    optimizer = sgd(model, lr=0.1)
    for lot in private.lots():
        for batch in lot.batches(4):
            private.add(batch)
        private.step(optimizer)
        assert all(g.dtype == dtype and torch.isfinite(g).all() for g in gradients(model))
