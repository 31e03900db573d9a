"""The DP-SGD step: against a loop of single backward passes, however a lot is cut, with the noise that it claims."""

import copy
import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F

from hush.accumulation import LotSum
from hush.augment import copies
from hush.gradients.bounded import BoundedSum, Group
from hush.gradients.clip import Clip, FlatClip, PerLayerClip, QuantileClip
from hush.loading import Loader
from hush.lots import AllocatedLots, Lots, PoissonLots, ShuffledLots
from hush.optim import CorrectedAdam
from hush.plan import Plan
from hush.private import Private

torch.manual_seed(0)
N, L = 40, 8
X, Y = torch.randn(N, 5), torch.randint(3, (N,))
POISSON = PoissonLots(N, L)


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def plan(clip: Clip | None = None, noise: float = 0.0, steps: int = 6, lots: Lots = POISSON) -> Plan:
    return Plan(lots=lots, steps=steps, clip=clip or FlatClip(0.5), noise_multiplier=noise)


def losses_of(model: nn.Module, index: Tensor) -> Tensor:
    return F.cross_entropy(model(X[index]), Y[index], reduction="none")


def sgd(model: nn.Module, lr: float = 1.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def run(private: Private, model: nn.Module, optimizer: torch.optim.Optimizer, size: int = 3) -> Iterator[list[int]]:
    """The plain loop; yields the examples of each lot after its step."""
    for lot in private.lots():
        for index in lot.batches(size):
            private.backward(losses_of(model, index))
        private.step(optimizer)
        yield lot.indices.tolist()


def clipped_mean(model: nn.Module, indices: list[int], bound: float, denominator: int) -> list[Tensor]:
    """The oracle: one backward pass for each example, norms and sums in float64."""
    total = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
    for i in indices:
        gradients = torch.autograd.grad(losses_of(model, torch.tensor([i]))[0], list(model.parameters()))
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
        for place, g in zip(total, gradients, strict=True):
            place += g.double() * min(1.0, bound / norm)
    return [place / denominator for place in total]


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.detach().clone() for p in model.parameters() if p.grad is not None]


def distance(a: list[Tensor], b: list[Tensor]) -> float:
    return math.sqrt(
        sum(float((x.detach().double() - y.detach().double()).square().sum()) for x, y in zip(a, b, strict=True))
    )


# Against oracles -------------------------------------------------------------------------------------------------

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
    private = Private(ours, plan(FlatClip(math.inf), steps=10), seed=0)
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


@pytest.mark.parametrize("lots", [POISSON, AllocatedLots(N, L), ShuffledLots(N, L)])
@pytest.mark.parametrize("size", [1, 3, 64])
def test_hazard_26_any_physical_batch_size_gives_the_clipped_sum_of_single_examples(lots: Lots, size: int) -> None:
    model = network()
    optimizer, private = sgd(model, lr=0.0), Private(model, plan(FlatClip(1.4), lots=lots, steps=7), seed=3)
    for indices in run(private, model, optimizer, size):
        expected = clipped_mean(model, indices, 1.4, L)
        assert distance(gradients(model), expected) <= 1e-5


def test_padded_loaded_and_captured_batches_give_the_same() -> None:
    def released(form: str) -> list[Tensor]:
        model = network()
        optimizer, private = sgd(model), Private(model, plan(noise=0.3, steps=4), seed=5)
        loader, found = Loader((X, Y)), []
        captured = private.capture(lambda x, y: F.cross_entropy(model(x), y, reduction="none"))
        for lot in private.lots():
            if form == "plain":
                for index in lot.batches(3):
                    private.backward(losses_of(model, index))
            elif form == "padded":
                for index, mask in lot.batches(3, pad=True):
                    private.backward(losses_of(model, index), mask)
            elif form == "mask forgotten":
                for index, _ in lot.batches(3, pad=True):
                    private.backward(losses_of(model, index))
            elif form == "wrong mask":
                for index, _ in lot.batches(3, pad=True):
                    private.backward(losses_of(model, index), torch.ones(3, dtype=torch.bool))
            else:
                for (x, y), mask in loader.padded(lot, 3):
                    captured(x, y, mask=mask)
            private.step(optimizer)
            found += gradients(model)
        return found

    plain = released("plain")
    for form in ("padded", "mask forgotten", "wrong mask", "captured"):
        assert distance(plain, released(form)) < 1e-5, form


def test_per_layer_clip_bounds_each_layer_and_gets_the_joint_noise() -> None:
    model = network()
    private = Private(model, plan(PerLayerClip({"0": 0.1, "2": 0.2}), steps=3), seed=0)
    for indices in run(private, model, sgd(model, lr=0.0)):
        for layer, bound in ((model[0], 0.1), (model[2], 0.2)):
            norm = math.sqrt(sum(float(p.grad.detach().double().square().sum()) for p in layer.parameters()))
            assert norm <= len(indices) * bound / L + 1e-9


# Hazards ---------------------------------------------------------------------------------------------------------


def test_hazard_01_neighbours_move_the_release_by_at_most_the_sensitivity_over_a_constant() -> None:
    def released(without: int | None) -> list[list[Tensor]]:
        model = network()
        optimizer, private, found = sgd(model, lr=0.0), Private(model, plan(steps=30), seed=2), []
        for lot in private.lots():
            for index in lot.batches(5):
                private.backward(losses_of(model, index), None if without is None else index != without)
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

        def forward(self, rows: int) -> Tensor:
            return 100.0 * self.w.expand(rows)

    model, sizes = Far(), set()
    private = Private(model, plan(FlatClip(1.0), steps=150, lots=PoissonLots(20, 2)), seed=0)
    optimizer = sgd(model, lr=0.0)
    for lot in private.lots():
        for index in lot.batches(4):
            private.backward(model(len(index)))
        private.step(optimizer)
        sizes.add(len(lot.indices))
        assert model.w.grad is not None
        assert model.w.grad.item() == pytest.approx(len(lot.indices) / 2, rel=1e-4)
    assert {0, 1, 2, 3, 4, 5} <= sizes


def test_hazard_05_unfreezing_keeps_the_bound_or_raises() -> None:
    model = network()
    model[2].requires_grad_(False)
    optimizer, private = sgd(model), Private(model, plan(FlatClip(0.01), steps=20), seed=1)
    for lot in private.lots():
        if lot.step == 4:
            model[2].requires_grad_(True)  # inside a lot: nobody has clipped it
            index = next(iter(lot.batches(30)))
            with pytest.raises(ValueError, match="trainable parameter"):
                private.backward(losses_of(model, index))
            private.abandon()
            continue
        if lot.step == 9:
            model[0].requires_grad_(False)
            index = next(iter(lot.batches(30)))
            with pytest.raises(ValueError, match="require a gradient"):
                private.backward(losses_of(model, index))
            model[0].requires_grad_(True)
            private.abandon()
            continue
        if lot.step == 12:
            model.register_parameter("late", nn.Parameter(torch.ones(1)))
            optimizer.add_param_group({"params": [model.late]})
            private.abandon()
            continue
        before = [p.detach().clone() for p in model.parameters()]
        for index in lot.batches(6):
            late = model.late if hasattr(model, "late") else 1.0
            private.backward(losses_of(model, index) * late)
        private.step(optimizer)
        assert distance(before, list(model.parameters())) <= len(lot.indices) * 0.01 / L * (1 + 1e-3)


def test_hazard_05_a_gradient_that_is_not_private_stops_the_step() -> None:
    model, stranger = network(), nn.Parameter(torch.ones(2))
    private = Private(model, plan(noise=1.0), seed=0)
    optimizer = torch.optim.SGD([*model.parameters(), stranger], lr=1.0)
    for lot in private.lots():
        for index in lot.batches(8):
            private.backward(losses_of(model, index))
        if lot.step == 2:
            before = [p.detach().clone() for p in model.parameters()]
            stranger.square().sum().backward()
            with pytest.raises(RuntimeError, match=r"shape \(2,\) in group 0 .* not private"):
                private.step(optimizer)
            assert distance(before, list(model.parameters())) == 0
            stranger.grad = None
        private.step(optimizer)
    with pytest.raises(TypeError, match="LBFGS"):
        other = Private(network(), plan(), seed=0)
        next(other.lots())
        other.step(torch.optim.LBFGS(other.model.parameters()))


def test_plain_backward_by_the_user_is_overwritten() -> None:
    a, b = network(), network()
    for model, spoil in ((a, False), (b, True)):
        private = Private(model, plan(noise=0.5, steps=3), seed=0)
        optimizer = sgd(model)
        for lot in private.lots():
            for index in lot.batches(8):
                private.backward(losses_of(model, index))
            if spoil:
                (1e6 * losses_of(model, torch.arange(N)).sum()).backward()
            private.step(optimizer)
    assert distance(list(a.parameters()), list(b.parameters())) == 0


@pytest.mark.parametrize("bad", [math.inf, math.nan, 1e25])
def test_hazard_09_one_bad_example_is_bounded_and_touches_no_other(bad: float) -> None:
    spoiled = X.clone()
    spoiled[7] = bad
    model = network()

    def forward(index: Tensor) -> Tensor:
        return F.cross_entropy(model(spoiled[index]), Y[index], reduction="none")

    private, met = Private(model, plan(steps=12), seed=0), False
    optimizer = sgd(model, lr=0.0)
    for lot in private.lots():
        for index in lot.batches(5):
            private.backward(forward(index))
        private.step(optimizer)
        others = [i for i in lot.indices.tolist() if i != 7]
        moved = distance(gradients(model), clipped_mean(model, others, 0.5, L))
        assert moved <= 0.5 / L + 1e-6
        met |= 7 in lot.indices
    assert met
    noisy = Private(model, plan(noise=1.0, lots=PoissonLots(N, N), steps=1), seed=0)
    for lot in noisy.lots():
        for index in lot.batches(64):
            noisy.backward(forward(index))
        noisy.step(optimizer)
    assert all(torch.isfinite(g).all() and g.std() > 0 for g in gradients(model))


def released_noise(private: Private, model: nn.Module) -> Iterator[list[Tensor]]:
    """Lots of which no batch is used: nothing but noise."""
    optimizer = sgd(model, lr=0.0)
    for _ in private.lots():
        private.step(optimizer)
        yield gradients(model)


def test_noise_has_the_scale_of_the_plan() -> None:
    model = nn.Linear(400, 500)
    private = Private(model, plan(FlatClip(0.7), noise=1.3, lots=PoissonLots(10, 4), steps=1), seed=0)
    (noise,) = released_noise(private, model)
    values = torch.cat([n.flatten() for n in noise]).double().numpy() * 4 / (1.3 * 0.7)
    assert stats.kstest(values, "norm").pvalue > 1e-6
    for wrong in (0.95, 1.05):
        assert stats.kstest(values * wrong, "norm").pvalue < 1e-6


def test_noise_of_groups_is_joint() -> None:
    model = nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 200))
    private = Private(
        model, plan(PerLayerClip({"0": 1.0, "1": 3.0}), noise=2.0, lots=PoissonLots(10, 4), steps=1), seed=0
    )
    (noise,) = released_noise(private, model)
    for tensors, bound in ((noise[:2], 1.0), (noise[2:], 3.0)):
        std = torch.cat([t.flatten() for t in tensors]).std().item()
        assert std == pytest.approx(2.0 * math.sqrt(2) * bound / 4, rel=0.015)


def test_hazard_17_no_two_tensors_steps_or_mechanisms_share_noise() -> None:
    model = nn.Sequential(nn.Linear(30, 30, bias=False), nn.Linear(30, 30, bias=False))
    private = Private(model, plan(noise=1.0, steps=4), seed=0)
    vectors = [t.flatten() for step in released_noise(private, model) for t in step]
    correlations = np.abs(np.corrcoef(torch.stack(vectors).numpy()) - np.eye(8))
    assert correlations.max() < 0.2
    fresh = [Private(network(), plan(noise=1.0, steps=2)) for _ in range(2)]
    first, second = ([g for step in run(p, p.model, sgd(p.model)) for g in gradients(p.model)] for p in fresh)
    assert distance(first, second) > 0.1, "two secure runs never share noise"


@pytest.mark.parametrize("clip", [FlatClip(0.7), QuantileClip(initial=0.7, count_noise=40.0)])
def test_hazard_28_discrete_noise_lies_on_a_grid_and_has_the_same_scale(clip: Clip) -> None:
    model = nn.Linear(100, 100)
    private = Private(model, plan(clip, noise=2.0, lots=PoissonLots(16, 4), steps=2), seed=0, noise="discrete")
    for lot in private.lots():
        for index in lot.batches(8):
            private.backward(model(torch.ones(len(index), 100) / 7).square().sum(1))
        private.step(sgd(model, lr=0.0))
        for gradient in gradients(model):
            steps = gradient.double() * 4 / 2.0**-20  # coarser grids are multiples of this one
            assert torch.equal(steps, steps.round()) and gradient.std() > 0
    noise = torch.cat([g.flatten() for g in gradients(model)])
    if isinstance(clip, FlatClip):
        assert noise.std().item() == pytest.approx(2.0 * 0.7 / 4, rel=0.03)
    with pytest.raises(ValueError, match="'gaussian' or 'discrete', got 'laplace'"):
        Private(model, plan(), noise="laplace")  # type: ignore[arg-type]


def test_the_bound_covers_every_batch_and_forgets_no_slack() -> None:
    def batch(value: float, bound: float) -> BoundedSum:
        return BoundedSum({"w": torch.full((2,), value)}, (Group(("w",), bound),))

    parameters, total = {"w": nn.Parameter(torch.zeros(2))}, LotSum()
    for value, bound in ((1e8, 2.02), (1.0, 2.2), (-1e8, 2.0)):
        total.add(batch(value, bound), FlatClip(2.0))
    result = total.total(parameters, FlatClip(2.0))
    assert result.tensors["w"].tolist() == [1.0, 1.0], "batches are added in fp64"
    assert 2.2 <= result.sensitivity < 2.2 * (1 + 1e-9)
    total.clear()
    empty = total.total(parameters, FlatClip(3.0))
    assert empty.tensors["w"].tolist() == [0.0, 0.0]
    assert empty.sensitivity == pytest.approx(3.3, rel=1e-9), "an empty lot has the bound of the others"
    borrowed = batch(1.0, 2.0)
    total.add(borrowed, FlatClip(2.0), borrowed=True)
    total.keep()
    borrowed.tensors["w"].zero_()
    assert total.total(parameters, FlatClip(2.0)).tensors["w"].tolist() == [1.0, 1.0]


# Quantile clipping -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 4, 64])
def test_hazard_11_and_12_the_bound_is_constant_in_a_lot_and_counts_all_of_it(size: int) -> None:
    start, model = QuantileClip(initial=0.3, quantile=0.5, learning_rate=0.5, count_noise=10.0), network()
    optimizer, private = sgd(model, lr=0.5), Private(model, plan(start, steps=15), seed=4)
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
        for index in lot.batches(size):
            private.backward(losses_of(model, index))
        private.step(optimizer)
        assert distance(gradients(model), expected) < 1e-5
        bound *= math.exp(-0.5 * (min(1.0, max(0.0, share)) - 0.5))


def test_hazard_12_gradient_and_count_are_one_release_of_the_joint_multiplier() -> None:
    clip, counts, stds = QuantileClip(initial=1.0, learning_rate=1.0, count_noise=4.0), [], []
    for seed in range(300):
        model = nn.Linear(30, 30)
        private = Private(model, plan(clip, noise=2.0, lots=PoissonLots(1000, 1000), steps=1), seed=seed)
        for lot in private.lots():
            next(iter(lot.batches(1000)))  # fetched, not used: the lot stays empty
            private.step(sgd(model, lr=0.0))
        stds.append(torch.cat([g.flatten() for g in gradients(model)]).std().item() * 1000)
        moved = private.state_dict()["clip"]["initial"]
        counts.append(-math.log(moved) * 1000)  # exp(-1.0 * (0.5 + noised / 1000 - 0.5))
    gradient, count = np.mean(stds), np.std(counts) / 0.5
    assert count == pytest.approx(4.0, rel=0.15)
    assert gradient == pytest.approx((2.0**-2 - 4.0**-2) ** -0.5, rel=0.01)
    assert 1 / gradient**2 + 1 / count**2 == pytest.approx(1 / 2.0**2, rel=0.05)


# Parts of the same loop ------------------------------------------------------------------------------------------


def test_copies_are_averaged_before_clipping() -> None:
    augmented = copies(X, 3) + 0.5 * torch.randn(3 * N, 5, generator=torch.Generator().manual_seed(0))
    model = network()

    def losses(index: Tensor) -> Tensor:
        rows = (3 * index[:, None] + torch.arange(3)).flatten()
        return F.cross_entropy(model(augmented[rows]), copies(Y[index], 3), reduction="none")

    clipped = 0
    for form in ("flat", "table", "captured"):
        private = Private(model, plan(FlatClip(1.4), steps=4), seed=1)
        captured = private.capture(losses, copies=3)
        for lot in private.lots():
            expected = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
            for i in lot.indices.tolist():
                one = torch.autograd.grad(losses(torch.tensor([i])).mean(), list(model.parameters()))
                norm = math.sqrt(sum(float(g.double().square().sum()) for g in one))
                clipped += 1 if norm > 1.4 else -1
                for place, g in zip(expected, one, strict=True):
                    place += g.double() * min(1.0, 1.4 / norm) / L
            for index in lot.batches(5):
                if form == "captured":
                    captured(index)
                else:
                    values = losses(index)
                    private.backward(values.view(-1, 3) if form == "table" else values, copies=3)
            private.step(sgd(model, lr=0.0))
            assert distance(gradients(model), expected) < 1e-6
    assert abs(clipped) < 60, "some must be clipped and some not"
    private = Private(model, plan(steps=1, lots=PoissonLots(N, N)), seed=1)
    for lot in private.lots():
        index = next(iter(lot.batches(5)))
        with pytest.raises(ValueError, match=r"shape \(5,\), one for each example of the batch, got \(15,\)"):
            private.backward(losses(index))
        private.abandon()


def test_noise_aware_optimizers_hear_the_true_deviation() -> None:
    class Listener(torch.optim.SGD):
        def expect_noise(self, deviations: dict[Tensor, float]) -> None:
            self.heard = deviations

    model = network()
    optimizer = Listener(model.parameters(), lr=0.0)
    private = Private(model, plan(PerLayerClip({"0": 1.0, "2": 3.0}), noise=2.0, steps=1), seed=0)
    for _ in run(private, model, optimizer):
        pass
    assert optimizer.heard[model[0].weight] == pytest.approx(2.0 * math.sqrt(2) * 1.0 / L, rel=1e-4)
    assert optimizer.heard[model[2].bias] == pytest.approx(2.0 * math.sqrt(2) * 3.0 / L, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_models_of_other_dtypes(dtype: torch.dtype) -> None:
    model = network().to(dtype)
    private = Private(model, plan(noise=0.5, steps=3), seed=0)
    optimizer = sgd(model, lr=0.1)
    for lot in private.lots():
        for index in lot.batches(4):
            private.backward(F.cross_entropy(model(X[index].to(dtype)), Y[index], reduction="none"))
        private.step(optimizer)
        assert all(g.dtype == dtype and torch.isfinite(g).all() for g in gradients(model))


def test_hazard_33_nothing_is_attached_and_nothing_gets_stale() -> None:
    model, reference = network(), network()
    for one, disturbed in ((model, True), (reference, False)):
        private = Private(one, plan(noise=0.5, steps=5), seed=0)
        optimizer = sgd(one)
        for lot in private.lots():
            for index in lot.batches(3):
                if disturbed:
                    one(X[:3])
                    with torch.no_grad():
                        one(X)
                    losses_of(one, torch.arange(9))
                    with pytest.raises(ValueError, match="got a scalar"):
                        private.backward(losses_of(one, index).mean())
                private.backward(losses_of(one, index))
            if disturbed:
                copy.deepcopy(one)
            private.step(optimizer)
        private.detach()
    assert distance(list(model.parameters()), list(reference.parameters())) == 0
    fresh = network()
    assert model.state_dict().keys() == fresh.state_dict().keys()
    assert {k for m in model.modules() for k in vars(m)} == {k for m in fresh.modules() for k in vars(m)}
    assert all(not vars(m)["_forward_hooks"] and not vars(m)["_backward_hooks"] for m in model.modules())
    assert all(p.grad is None and not p._backward_hooks for p in model.parameters())
