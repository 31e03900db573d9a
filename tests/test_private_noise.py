"""The noise of the DP-SGD step: its scale, its independence, one release for gradient and count."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from scipy import stats
from support.small_run import L, distance, gradients, losses_of, network, plan, run, sgd
from torch import Tensor, nn

from hush.clipping.clips import Clip, FlatClip, PerLayerClip, QuantileClip
from hush.private import Private
from hush.sampling.lots import PoissonLots


def released_noise(private: Private, model: nn.Module) -> Iterator[list[Tensor]]:
    """Lots of which no batch is used: nothing but noise."""
    optimizer = sgd(model, lr=0.0)
    for lot in private.lots():
        for batch in lot.batches(10**6):
            private.skip(batch)
        private.step(optimizer)
        yield gradients(model)


def test_noise_has_the_scale_of_the_plan() -> None:
    model = nn.Linear(400, 500)
    private = Private(
        model, plan(FlatClip(0.7), noise=1.3, lots=PoissonLots(examples=10, lot_size=4), steps=1), losses_of, seed=0
    )
    (noise,) = released_noise(private, model)
    values = torch.cat([n.flatten() for n in noise]).double().numpy() * 4 / (1.3 * 0.7)
    assert stats.kstest(values, "norm").pvalue > 1e-6
    for wrong in (0.95, 1.05):
        assert stats.kstest(values * wrong, "norm").pvalue < 1e-6


def test_noise_of_groups_is_joint() -> None:
    model = nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 200))
    private = Private(
        model,
        plan(PerLayerClip({"0": 1.0, "1": 3.0}), noise=2.0, lots=PoissonLots(examples=10, lot_size=4), steps=1),
        losses_of,
        seed=0,
    )
    (noise,) = released_noise(private, model)
    for tensors, bound in ((noise[:2], 1.0), (noise[2:], 3.0)):
        std = torch.cat([t.flatten() for t in tensors]).std().item()
        assert std == pytest.approx(2.0 * math.sqrt(2) * bound / 4, rel=0.015)


def test_hazard_17_no_two_tensors_steps_or_mechanisms_share_noise() -> None:
    model = nn.Sequential(nn.Linear(30, 30, bias=False), nn.Linear(30, 30, bias=False))
    private = Private(model, plan(noise=1.0, steps=4), losses_of, seed=0)
    vectors = [t.flatten() for step in released_noise(private, model) for t in step]
    correlations = np.abs(np.corrcoef(torch.stack(vectors).numpy()) - np.eye(8))
    assert correlations.max() < 0.2
    fresh = [Private(network(), plan(noise=1.0, steps=2), losses_of) for _ in range(2)]
    first, second = ([g for step in run(p, p.model, sgd(p.model)) for g in gradients(p.model)] for p in fresh)
    assert distance(first, second) > 0.1, "two secure runs never share noise"


@pytest.mark.parametrize("clip", [FlatClip(0.7), QuantileClip(initial=0.7, count_noise=40.0)])
def test_hazard_28_discrete_noise_lies_on_a_grid_and_has_the_same_scale(clip: Clip) -> None:
    model = nn.Linear(100, 100)
    lots = PoissonLots(examples=16, lot_size=4)
    made = plan(clip, noise=2.0, lots=lots, steps=2, kind="float_safe")
    private = Private(model, made, lambda model, x: model(x / 7).square().sum(1), data=torch.ones(16, 100), seed=0)
    for lot in private.lots():
        for batch in lot.batches(8):
            private.add(batch)
        private.step(sgd(model, lr=0.0))
        for gradient in gradients(model):
            steps = gradient.double() * 4 / 2.0**-20  # coarser grids are multiples of this one
            assert torch.equal(steps, steps.round()) and gradient.std() > 0
    noise = torch.cat([g.flatten() for g in gradients(model)])
    if isinstance(clip, FlatClip):
        assert noise.std().item() == pytest.approx(2.0 * 0.7 / 4, rel=0.03)
    with pytest.raises(ValueError, match="noise must be one of 'gaussian', 'float_safe'; got 'laplace'"):
        plan(kind="laplace")


def test_hazard_12_gradient_and_count_are_one_release_of_the_joint_multiplier() -> None:
    clip, counts, stds = QuantileClip(initial=1.0, learning_rate=1.0, count_noise=4.0), [], []
    for seed in range(300):
        model = nn.Linear(30, 30)
        private = Private(
            model, plan(clip, noise=2.0, lots=PoissonLots(examples=1000, lot_size=1000), steps=1), losses_of, seed=seed
        )
        for lot in private.lots():
            private.skip(next(iter(lot.batches(1000))))  # the lot stays empty
            private.step(sgd(model, lr=0.0))
        stds.append(torch.cat([g.flatten() for g in gradients(model)]).std().item() * 1000)
        moved = private.state_dict()["clip"]["initial"]
        counts.append(-math.log(moved) * 1000)  # exp(-1.0 * (0.5 + noised / 1000 - 0.5))
    gradient, count = np.mean(stds), np.std(counts) / 0.5
    assert count == pytest.approx(4.0, rel=0.15)
    assert gradient == pytest.approx(1.01 * (2.0**-2 - 4.0**-2) ** -0.5, rel=0.01)
    assert (1.01 / gradient) ** 2 + 1 / count**2 == pytest.approx(1 / 2.0**2, rel=0.05)


def test_noise_aware_optimizers_hear_the_true_deviation() -> None:
    class Listener(torch.optim.SGD):
        def expect_noise(self, deviations: dict[Tensor, float]) -> None:
            self.heard = deviations

    model = network()
    optimizer = Listener(model.parameters(), lr=0.0)
    private = Private(model, plan(PerLayerClip({"0": 1.0, "2": 3.0}), noise=2.0, steps=1), losses_of, seed=0)
    for _ in run(private, model, optimizer):
        pass
    assert optimizer.heard[model[0].weight] == pytest.approx(1.01 * 2.0 * math.sqrt(2) * 1.0 / L)
    assert optimizer.heard[model[2].bias] == pytest.approx(1.01 * 2.0 * math.sqrt(2) * 3.0 / L)
