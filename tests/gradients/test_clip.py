"""Clipping rules as values: groups, schedules, factors, and the adaptive bound."""

import math

import pytest
import torch
from oracles import gradients as oracle
from support.finished import clipped_sum
from torch import Tensor, nn

from hush.clipping import AutomaticClip, FlatClip, PerLayerClip, QuantileClip

NAMES = ["conv1.weight", "conv1.bias", "fc.weight", "scale"]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def squares(m: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return m(batch[0]).square().sum(1)


def test_flat_is_one_group() -> None:
    (group,) = FlatClip(2.0).groups(NAMES)
    assert group.names == tuple(NAMES) and group.bound == 2.0


def test_layers_are_modules() -> None:
    groups = PerLayerClip(0.5).groups([*NAMES, "att.parametrizations.weight.original0", "att.bias"])
    assert [group.names for group in groups] == [
        ("conv1.weight", "conv1.bias"),
        ("fc.weight",),
        ("scale",),
        ("att.parametrizations.weight.original0", "att.bias"),
    ]
    assert {group.bound for group in groups} == {0.5}


def test_patterns_in_order_and_none_forgotten() -> None:
    groups = PerLayerClip({"conv*": 2.0, "c*": 3.0, "*": 1.0}).groups(NAMES)
    assert [group.bound for group in groups] == [2.0, 1.0, 1.0]
    with pytest.raises(ValueError, match="fits the layer 'fc'"):
        PerLayerClip({"conv*": 2.0}).groups(NAMES)


@pytest.mark.parametrize("bound", [0.0, -1.0, math.nan, 1e-12])
@pytest.mark.parametrize("kind", [FlatClip, PerLayerClip, AutomaticClip, lambda bound: QuantileClip(initial=bound)])
def test_bad_bounds_are_refused(kind, bound: float) -> None:
    with pytest.raises(ValueError, match="clipping bound"):
        kind(bound)


def test_schedules_are_evaluated_once_for_each_step() -> None:
    clip = FlatClip(lambda step: 2.0 / (1 + step))
    assert [clip.at(step).bound for step in (0, 1, 3)] == [2.0, 1.0, 0.5]
    layers = PerLayerClip({"conv*": lambda step: 1.0 + step, "*": 4.0}).at(2)
    assert [group.bound for group in layers.groups(NAMES)] == [3.0, 4.0, 4.0]
    with pytest.raises(ValueError, match=r"call clip\.at\(step\) first"):
        clip.groups(NAMES)
    with pytest.raises(ValueError, match="clipping bound"):
        FlatClip(lambda step: 1.0 - step).at(1)


def test_an_infinite_bound_is_plain_summation() -> None:
    net, data = model(), torch.randn(5, 6)
    total = clipped_sum(squares(net, (data,)), dict(net.named_parameters()), FlatClip(math.inf))
    squares(net, (data,)).sum().backward()
    for name, param in net.named_parameters():
        torch.testing.assert_close(total.tensors[name], param.grad, rtol=1e-6, atol=1e-6)
    assert total.sensitivity == math.inf


def test_groups_carry_their_own_bounds() -> None:
    net, data = model(), torch.randn(5, 6)
    total = clipped_sum(squares(net, (data,)), dict(net.named_parameters()), PerLayerClip({"0": 3.0, "2": 4.0}))
    assert [group.names for group in total.groups] == [("0.weight", "0.bias"), ("2.weight", "2.bias")]
    assert [group.bound for group in total.groups] == [3.0 * 1.01, 4.0 * 1.01]
    assert total.sensitivity == pytest.approx(5.05)


def test_automatic_clipping_normalises() -> None:
    net, data = model(), torch.randn(5, 6)
    exact = oracle.per_example_gradients(net, (data,), squares)
    norms = sum(oracle.squared_norms(exact).values()).sqrt()
    total = clipped_sum(squares(net, (data,)), dict(net.named_parameters()), AutomaticClip(0.7, stability=0.02))
    for name, gradients in exact.items():
        expected = torch.einsum("b,b...->...", 0.7 / (norms + 0.02), gradients)
        torch.testing.assert_close(total.tensors[name].double(), expected, rtol=1e-5, atol=1e-7)


def test_quantile_clip_counts_who_is_below() -> None:
    net, data = model(), torch.randn(7, 6)
    norms = sum(oracle.squared_norms(oracle.per_example_gradients(net, (data,), squares)).values()).sqrt()
    bound = float(norms.sort().values[4]) * 1.01
    clip = QuantileClip(initial=bound, quantile=0.5)
    mask = torch.tensor([1.0] * 6 + [0.0])
    total = clipped_sum(squares(net, (data,)), dict(net.named_parameters()), clip, mask=mask)
    below = float((norms[:6] <= bound).sum())
    assert total.count is not None and float(total.count.tensors["count"]) == (below - (6 - below)) / 2
    assert total.count.sensitivity == 0.5
    flat = clipped_sum(squares(net, (data,)), dict(net.named_parameters()), FlatClip(bound), mask=mask)
    assert all(torch.equal(total.tensors[name], flat.tensors[name]) for name in flat.tensors)


def test_hazard_11_the_bound_is_constant_inside_a_lot() -> None:
    """Counting is pure: the rule is the same value before and after any number of batches."""
    net, clip = model(), QuantileClip(initial=1.0)
    params = dict(net.named_parameters())
    parts = [clipped_sum(squares(net, (torch.randn(4, 6),)), params, clip, rows=4) for _ in range(5)]
    assert len({part.sensitivity for part in parts}) == 1 and clip == QuantileClip(initial=1.0)


def test_hazard_12_counts_of_empty_and_bad_batches() -> None:
    """An empty batch counts nobody; a non-finite example counts for nothing; the count covers all batches of a lot."""
    net, clip = model(), QuantileClip(initial=1e6)
    params = dict(net.named_parameters())
    empty = clipped_sum(torch.zeros(0), params, clip)
    assert empty.count is not None and float(empty.count.tensors["count"]) == 0
    assert all(not tensor.any() for tensor in empty.tensors.values())
    data = torch.randn(4, 6)
    data[1, 2] = math.nan
    full = clipped_sum(squares(net, (data,)), params, clip)
    total = empty + full + full
    assert total.count is not None and float(total.count.tensors["count"]) == 3.0
    assert clip.updated(noised_count=3.0, lot_size=100).initial == pytest.approx(
        1e6 * math.exp(-0.2 * (0.5 + 0.03 - 0.5))
    )


def test_gradient_and_count_are_one_gaussian_release() -> None:
    clip = QuantileClip(initial=1.0, count_noise=10.0)
    for joint in (0.5, 1.0, 4.0):
        assert 1 / clip.gradient_noise(joint) ** 2 + 1 / 10.0**2 == pytest.approx(1 / joint**2, rel=1e-12)
        assert clip.gradient_noise(joint) > joint
    assert clip.gradient_noise(0.0) == 0.0
    with pytest.raises(ValueError, match="count_noise > noise multiplier"):
        clip.gradient_noise(10.0)


def test_quantile_clip_finds_the_quantile() -> None:
    """Fed with exact counts of a fixed set of norms, the bound settles at their quantile."""
    norms = torch.linspace(0.1, 10, 1000)
    clip = QuantileClip(initial=0.2, quantile=0.8)
    for _ in range(300):
        count = float((norms <= clip.initial).double().sum() - 500)
        clip = clip.updated(noised_count=count, lot_size=1000)
    assert clip.initial == pytest.approx(8.0, rel=0.05)


def test_sums_of_different_groups_do_not_add() -> None:
    net = model()
    params = dict(net.named_parameters())
    one = clipped_sum(squares(net, (torch.randn(2, 6),)), params, FlatClip(1.0))
    other = clipped_sum(squares(net, (torch.randn(2, 6),)), params, PerLayerClip(1.0))
    with pytest.raises(ValueError, match="same groups"):
        one + other


@pytest.mark.parametrize("stability", [1e-30, 1e-10, 0.0, math.inf, math.nan])
def test_a_stability_below_what_float32_can_square_is_refused(stability: float) -> None:
    with pytest.raises(ValueError, match="stability, the latter at least"):
        AutomaticClip(1.0, stability=stability)


@pytest.mark.parametrize("scale", [1e-30, 1e-24, 1e-22, 1e-20, 1e-10])
@pytest.mark.parametrize(
    "clip", [FlatClip(1e-9), AutomaticClip(1.0, stability=1e-9), AutomaticClip(1e-9, stability=1e-9)]
)
def test_gradients_whose_squares_vanish_stay_below_the_bound(scale: float, clip: FlatClip | AutomaticClip) -> None:
    weights, data = nn.Parameter(torch.zeros(100_000)), torch.randn(1, 100_000) * scale
    total = clipped_sum((weights * data).sum(1), {"w": weights}, clip)
    assert total.tensors["w"].double().norm() <= total.sensitivity


def test_a_batch_that_reaches_no_parameter_has_a_count_too() -> None:
    # Without it the lot would release none, and the bound that stays tells that such a batch came.
    data, clip = torch.ones(4, 6, requires_grad=True), QuantileClip(initial=1.0)
    total = clipped_sum(data.sum(1), dict(model().named_parameters()), clip, allow_unused=True)
    assert total.count is not None and total.count.tensors["count"].item() == 0
