"""The CIFAR-10 experiments: the paper's literal settings, what is set aside, folding, a small private training."""

import math
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))
import cifar_pretrain
import fig6_cifar
from budgets import AS_PUBLISHED, VALID
from cifar_private import Pictures, Setting, accuracy, all_views, optimizer_of, train
from random_pictures import grown, leaves, mixture

from hush.accounting import Gaussian, PoissonSampled
from hush.clipping.clips import FlatClip
from hush.recipes.features.pretrained import paper_network
from hush.recipes.networks import paper_cifar10
from hush.recipes.residual import ResidualNetwork


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_figure_6_has_the_literal_settings_of_section_5_3() -> None:
    assert fig6_cifar.SIGMA == 6.0
    assert fig6_cifar.PANELS == {2.0: 2000, 4.0: 4000, 8.0: 4000}
    assert fig6_cifar.PAPER == {2.0: 0.67, 4.0: 0.70, 8.0: 0.73}
    both = fig6_cifar.head(paper_network(), 2)
    assert [tuple(p.shape) for p in both.parameters() if p.requires_grad and p.ndim > 1] == [
        (384, 2304), (384, 384), (10, 384)
    ]  # fmt: skip
    top = fig6_cifar.head(paper_network(), 1)
    assert [tuple(p.shape) for p in top.parameters() if p.requires_grad and p.ndim > 1] == [(384, 384), (10, 384)]
    groups = fig6_cifar.clipping(both, 3.0).groups([name for name, _ in both.named_parameters()])
    assert [group.bound for group in groups] == [3.0, 3.0, 6.0]  # the softmax layer at twice the others


def test_noise_of_every_layer_is_six_times_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is handed to the library is the joint multiplier: group l then gets joint * sqrt(m) * C_l = 6 C_l."""
    seen: list[Setting] = []
    monkeypatch.setattr(fig6_cifar, "train", lambda model, setting, *rest, **more: seen.append(setting))
    x, y = torch.zeros(4, 1, 2304), torch.zeros(4, dtype=torch.long)
    for depth, layers in ((2, 3), (1, 2)):
        fig6_cifar.one_run(
            x, y, {}, folder=fig6_cifar.FOLDER, lot=2000, steps=5, bound=3.0, rate=0.1, depth=depth, seed=0, marks=[]
        )
        setting = seen[-1]
        assert setting.noise * math.sqrt(layers) == pytest.approx(6.0)
        assert (setting.momentum, setting.fall, setting.lot_size) == (0.0, 1.0, 2000)


def test_figure_6_counts_as_published_and_as_it_is() -> None:
    valid = fig6_cifar.event(10, 2000, layers=3, counting=VALID)
    assert valid == PoissonSampled(0.04, Gaussian(6.0 / math.sqrt(3))) * 10
    assert fig6_cifar.event(10, 2000, layers=3, counting=AS_PUBLISHED) == PoissonSampled(0.04, Gaussian(6.0)) * 30
    rising = fig6_cifar.deltas(2.0, 2000, [100, 1000, 1768], layers=3, counting=VALID)
    assert rising[0] < rising[1] < rising[2] <= 1e-5
    assert fig6_cifar.deltas(2.0, 2000, [1800], layers=3, counting=VALID)[0] > 1e-5


def test_what_is_set_aside_is_not_trained_on() -> None:
    x, y = torch.arange(50)[:, None], torch.arange(50)
    whole = Pictures(x, y, x[:7] + 100, y[:7] + 100)
    chosen, final = whole.chosen_on(), whole.trained_on()
    assert chosen.train_y.tolist() == final.train_y.tolist() == list(range(45))
    assert chosen.test_y.tolist() == list(range(45, 50))
    assert final.test_y.tolist() == whole.test_y.tolist()


def test_folding_takes_the_norms_into_the_convolutions() -> None:
    torch.manual_seed(0)
    trained = ResidualNetwork(widths=(4, 6), blocks=(2, 1), batch_norm=True)
    for module in trained.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 2.0), nn.init.normal_(module.bias)
            module.running_mean.normal_(), module.running_var.uniform_(0.5, 2.0)
    trained.eval()
    plain, x = cifar_pretrain.folded(trained), torch.randn(3, 3, 8, 8)
    for ours, theirs in zip(plain.maps(x), trained.maps(x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in plain.modules())


def test_the_contrastive_loss_is_that_of_a_loop() -> None:
    torch.manual_seed(0)
    first, second = torch.randn(4, 6), torch.randn(4, 6)
    views = [v / v.norm() for v in torch.cat([first, second])]
    total = 0.0
    for i, view in enumerate(views):
        others = [math.exp(float(view @ other) / 0.2) for j, other in enumerate(views) if j != i]
        total -= math.log(math.exp(float(view @ views[(i + 4) % 8]) / 0.2) / sum(others))
    assert cifar_pretrain.pairs_apart(first, second).item() == pytest.approx(total / 8, rel=1e-4)


def test_random_pictures_are_colour_pictures_of_the_size_asked_for() -> None:
    for kind in (leaves, grown, mixture):
        some, others = (kind(6, 20, generator=seeded(s)) for s in (0, 1))
        assert some.shape == (6, 3, 20, 20) and some.min() >= 0 and some.max() <= 1
        assert not torch.equal(some, others) and torch.equal(some, kind(6, 20, generator=seeded()))
        assert some.std(dim=(1, 2, 3)).min() > 0.01


def test_views_of_a_record_are_averaged_before_clipping() -> None:
    """One step without noise and bound: the gradient is the mean over the lot of the mean over the views."""
    torch.manual_seed(0)
    x, y = torch.randn(12, 3, 5), torch.arange(12) % 10
    start = nn.Linear(5, 10)
    setting = Setting(lot_size=12, steps=1, noise=0.0, clip=FlatClip(math.inf), rate=1.0, momentum=0.0, views=3)
    model = nn.Linear(5, 10)
    model.load_state_dict(start.state_dict())
    model = train(model, setting, all_views(x, y), 12, seed=0)
    losses = F.cross_entropy(start(x.flatten(0, 1)), y.repeat_interleave(3), reduction="none").view(12, 3)
    weight, bias = torch.autograd.grad(losses.mean(1).sum() / 12, [start.weight, start.bias])
    torch.testing.assert_close(start.weight - model.weight, weight, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(start.bias - model.bias, bias, rtol=1e-4, atol=1e-6)


def test_layers_below_the_last_have_their_share_of_the_rate() -> None:
    network = paper_cifar10()
    setting = Setting(lot_size=1, steps=1, noise=1.0, clip=FlatClip(1.0), rate=2.0, below=0.1)
    top, lower = optimizer_of(network, setting).param_groups
    assert {id(p) for p in top["params"]} == {id(p) for p in network[-1].parameters()} and top["lr"] == 2.0
    assert len(lower["params"]) == 8 and lower["lr"] == pytest.approx(0.2)


def test_accuracy_averages_the_outputs_of_views() -> None:
    x = torch.tensor([[[3.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [0.0, 1.0]]])
    assert accuracy(nn.Identity(), x, torch.tensor([0, 1])) == 1.0
    assert accuracy(nn.Identity(), x, torch.tensor([1, 1])) == 0.5


def test_one_cycle_rises_and_falls_to_nothing() -> None:
    optimizer = cifar_pretrain.optimizer_of([nn.Linear(2, 2)], rate=1.0)
    schedule, rates = cifar_pretrain.Schedule(optimizer, minutes=1.0, steps=100), []
    while schedule.goes_on():
        rates.append(optimizer.param_groups[0]["lr"])
    assert len(rates) == 100 and max(rates) == pytest.approx(1.0)
    assert rates.index(max(rates)) == 10 and rates[0] < 1e-3 and rates[-1] < 1e-3
    assert [group["weight_decay"] for group in optimizer.param_groups] == [5e-4, 0.0]
