"""Weight and bias of a layer that one product sums: all shapes, long lots, silent examples, two groups."""

from dataclasses import dataclass

import pytest
import torch
from oracles import gradients as oracle
from support.finished import clipped_sum
from torch import Tensor, nn

from hush.clipping import FlatClip, PerLayerClip
from hush.clipping import rounding as precision
from hush.clipping.bounded_sum import Group
from hush.clipping.clips import Clip
from hush.gradients.layers import affine
from hush.gradients.sums.blocks import CHAIN

SHAPES = {"joint": (5, 40), "joint, exact width": (15, 40), "wide": (200, 210), "narrow": (40, 6)}

CLOSE = 3e-5
"""The factor of an example is shrunk by what rounding might add to its norm: here up to 2e-5."""


def losses_of(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return (model(batch[0]).sin() * batch[1]).sum(1)


def sample(rows: int, shape: tuple[int, int]) -> tuple[nn.Linear, tuple[Tensor, Tensor]]:
    torch.manual_seed(rows)
    model = nn.Linear(*shape)
    return model, (torch.randn(rows, shape[0]), torch.randn(rows, shape[1]) * torch.rand(rows, 1).exp2())


def params(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters())


def norm(tensors: dict[str, Tensor]) -> float:
    return float(sum(tensor.double().square().sum() for tensor in tensors.values())) ** 0.5


@pytest.mark.parametrize("rows", [64, 600, CHAIN + 1, 769])
@pytest.mark.parametrize("kind", SHAPES)
def test_sums_are_those_of_the_float64_loop(kind: str, rows: int) -> None:
    model, batch = sample(rows, SHAPES[kind])
    gradients = oracle.per_example_gradients(model, batch, losses_of)
    bound = float(sum(oracle.squared_norms(gradients).values()).median().sqrt())
    total = clipped_sum(losses_of(model, batch), params(model), FlatClip(bound))
    for name, expected in oracle.clipped_sum(gradients, bound).items():
        assert total.tensors[name].is_contiguous()
        assert (total.tensors[name] - expected).norm() <= CLOSE * expected.norm()


@pytest.mark.parametrize("kind", SHAPES)
def test_each_large_tensor_is_read_by_one_product(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The joint path is taken where it is meant to be: a test of sums alone would not see that it never is."""
    seen = []
    added = affine.Affine._added

    def noted(self: affine.Affine, left: Tensor, right: Tensor) -> Tensor:
        seen.append((left.shape[1], right.shape[1]))
        return added(self, left, right)

    monkeypatch.setattr(affine.Affine, "_added", noted)
    model, batch = sample(64, SHAPES[kind])
    clipped_sum(losses_of(model, batch), params(model), FlatClip(1.0))
    wanted = {
        "joint": [(40, 16)],
        "joint, exact width": [(40, 16)],
        "wide": [(210, 200), (1, 210)],
        "narrow": [(6, 40)],
    }
    assert seen == wanted[kind]


@pytest.mark.parametrize("rows", [256, CHAIN, 800])
@pytest.mark.parametrize("kind", SHAPES)
def test_neighbours_differ_by_at_most_the_sensitivity(kind: str, rows: int) -> None:
    model, batch = sample(rows, SHAPES[kind])
    aligned = (torch.full_like(batch[0], 1.37), torch.ones_like(batch[1]))
    mask = torch.ones(rows)
    whole = clipped_sum(losses_of(model, aligned), params(model), FlatClip(0.01), mask=mask)
    assert whole.sensitivity == 0.01 * (1 + precision.RUN_SLACK)
    for gone in (0, rows // 2, rows - 1):
        without = mask.clone()
        without[gone] = 0
        other = clipped_sum(losses_of(model, aligned), params(model), FlatClip(0.01), mask=without)
        moved = norm({name: whole.tensors[name].double() - other.tensors[name] for name in whole.tensors})
        assert 0.0099 < moved <= whole.sensitivity


@pytest.mark.parametrize("rows", [64, 700])
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_example_that_is_not_finite_adds_zero_and_touches_no_other(kind: str, bad: float, rows: int) -> None:
    model, (x, scale) = sample(rows, SHAPES[kind])
    x[3, 1] = bad
    keep = torch.arange(rows) != 3
    total = clipped_sum(losses_of(model, (x, scale)), params(model), FlatClip(1.0))
    exact = oracle.clipped_sum(oracle.per_example_gradients(model, (x[keep], scale[keep]), losses_of), 1.0)
    for name, expected in exact.items():
        assert (total.tensors[name] - expected).norm() <= CLOSE * expected.norm()


@dataclass(frozen=True)
class Apart(Clip):
    """Weight and bias in groups of their own, each with its own bound."""

    def at(self, step: int) -> "Apart":
        return self

    def groups(self, names: object) -> tuple[Group, ...]:
        return (Group(("weight",), 0.5), Group(("bias",), 0.25))


@pytest.mark.parametrize("kind", SHAPES)
def test_weight_and_bias_in_two_groups_get_two_factors(kind: str) -> None:
    model, batch = sample(64, SHAPES[kind])
    gradients = oracle.per_example_gradients(model, batch, losses_of)
    total = clipped_sum(losses_of(model, batch), params(model), Apart())
    assert [group.bound for group in total.groups] == [0.5 * 1.01, 0.25 * 1.01]
    for name, bound in (("weight", 0.5), ("bias", 0.25)):
        expected = oracle.clipped_sum({name: gradients[name]}, bound)[name]
        assert (total.tensors[name] - expected).norm() <= CLOSE * expected.norm()


def test_layers_of_other_groups_do_not_share_factors() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 6))
    batch = (torch.randn(64, 5), torch.randn(64, 6))
    gradients = oracle.per_example_gradients(model, batch, losses_of)
    total = clipped_sum(losses_of(model, batch), params(model), PerLayerClip({"0": 0.3, "2": 0.7}))
    for layer, bound in (("0", 0.3), ("2", 0.7)):
        names = [f"{layer}.weight", f"{layer}.bias"]
        for name, expected in oracle.clipped_sum({name: gradients[name] for name in names}, bound).items():
            assert (total.tensors[name] - expected).norm() <= CLOSE * expected.norm()
