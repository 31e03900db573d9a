"""The slack of rounding: no adversary gets beyond it, and no ordinary model loses a percent of its gradients to it."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from oracles import gradients as oracle
from torch import Tensor, nn

from hush.gradients import FlatClip, clipped_sum, linear, precision
from hush.gradients.blocks import chained_additions, long_additions, long_block, rho

UNIT = 2.0**-24


def in_one_chain(rows: np.ndarray) -> np.float32:
    """Rows added up one after another in fp32: the worst tree."""
    total = np.float32(0)
    for row in rows.astype(np.float32):
        total = np.float32(total + row)
    return total


def growing(examples: int, rows: int) -> np.ndarray:
    """[examples, rows]: numbers of size <= 1 an example, whose sum with the first one rounds up again and again.

    With it the sum reaches a power of two, and what follows is a bit more than half of its last place. Without it the
    last place is half as large, and nothing rounds.
    """
    top = 2 ** int(np.log2(examples * 2 / 3))
    values = np.zeros((examples, rows))
    values[:top, 0] = 1.0
    values[top:] = top * UNIT * (1 + 2.0**-10)
    return values


@pytest.mark.parametrize("examples", [16, 64, 320])
@pytest.mark.parametrize("rows", [1, 8, 64, 144])
def test_a_chain_of_additions_moves_as_far_as_the_bound_has_to_allow(examples: int, rows: int) -> None:
    """The worst that was found takes an eighth of the slack at least, and never more than all of it."""
    if rows > 1:
        examples = min(examples, long_block(rows))
    values = growing(examples, rows)
    with_it, without = in_one_chain(values.flatten()), in_one_chain(values[1:].flatten())
    moved = float(with_it) - float(without) - 1
    additions = chained_additions(examples) if rows == 1 else examples * rows * (examples + 4.0)
    allowed = precision.slack(additions, torch.float32)
    assert allowed / 8 < moved <= allowed
    if rows > 1:
        assert additions <= long_additions(examples, rows)


@pytest.mark.parametrize("rows", [64, 512])
def test_parts_of_an_example_that_cancel_round_as_far_as_rho_allows(rows: int) -> None:
    """An example whose rows go up to rho / 2 and back again: each small row in between rounds at that size."""
    top = 2 ** int(np.log2(rho(rows) / 2))
    small = top * UNIT * (1 + 2.0**-10)
    middle = np.array([top - 1, *[small] * (rows - 2), 1 - top], dtype=np.float64)
    with_it, without = in_one_chain(np.concatenate([[1.0], middle])), in_one_chain(middle)
    moved = float(with_it) - float(without) - 1
    assert UNIT * rows * rho(rows) / 8 < moved <= precision.slack(rows * (1 + 4 * rho(rows)), torch.float32)


def products_of(x: Tensor, g: Tensor) -> Callable[[nn.Module], Tensor]:
    """Losses whose gradient at the layer's output is g: the examples' gradients are the products of g and x."""
    return lambda layer: (layer(x) * g).flatten(1).sum(1)


SHAPES = {"pairs": (24, 200, 300), "formed": (64, 48, 40), "kept": (64, 48, 40), "one by one": (600, 20, 30)}
KINDS = ["independent", "one sign", "cancelling", "sizes from 1 to 1e6"]


def rows_of(kind: str, batch: int, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    length, i, j = shape
    x, g = torch.randn(batch, length, i), torch.randn(batch, length, j)
    if kind == "one sign":
        return x.abs() + 1, g.abs() + 1
    if kind == "cancelling":  # each row is followed by its opposite, but for one part in a hundred thousand
        x, g = x.view(batch, -1, 2, i), g.view(batch, -1, 2, j)
        x[:, :, 1], g[:, :, 1] = x[:, :, 0], -g[:, :, 0] * (1 + 1e-5 * torch.rand(batch, length // 2, 1))
        return x.flatten(1, 2), g.flatten(1, 2)
    if kind.startswith("sizes"):
        return x * 10 ** (6 * torch.rand(batch, length, 1)), g * 10 ** (6 * torch.rand(batch, length, 1) - 6)
    return x, g


@pytest.fixture
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param in ("formed", "one by one"):
        monkeypatch.setattr(linear, "_KEEP_BYTES", 0)
    return request.param


def the_layer(shape: tuple[int, int, int]) -> tuple[nn.Linear, dict[str, Tensor]]:
    layer = nn.Linear(shape[1], shape[2], bias=False)
    return layer, dict(layer.named_parameters())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", SHAPES, indirect=True)
def test_one_example_alone_is_never_longer_than_its_bound(way: str, kind: str, fresh_plans: None) -> None:
    torch.manual_seed(7)
    layer, params = the_layer(SHAPES[way])
    for seed in range(12):
        torch.manual_seed(seed)
        x, g = rows_of(kind, 2, SHAPES[way])
        for alone in ([1.0, 0.0], [0.0, 1.0]):
            total = clipped_sum(products_of(x, g)(layer), params, FlatClip(1e-3), mask=torch.tensor(alone))
            norm = float(total.tensors["weight"].double().norm())
            assert norm <= 1e-3
            assert kind == "cancelling" or norm > 0.99e-3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", SHAPES, indirect=True)
def test_neighbours_of_adversarial_rows_stay_within_the_sensitivity(way: str, kind: str, fresh_plans: None) -> None:
    torch.manual_seed(8)
    layer, params = the_layer(SHAPES[way])
    x, g = rows_of(kind, 12, SHAPES[way])
    whole = clipped_sum(products_of(x, g)(layer), params, FlatClip(1.0), mask=torch.ones(12))
    assert 1 < whole.sensitivity < 1.007
    for gone in (0, 5, 11):
        mask = torch.ones(12)
        mask[gone] = 0
        other = clipped_sum(products_of(x, g)(layer), params, FlatClip(1.0), mask=mask)
        assert float((whole.tensors["weight"].double() - other.tensors["weight"]).norm()) <= whole.sensitivity


class Tied(nn.Module):
    """An embedding that is also the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(300, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.tanh(self.table(tokens)) @ self.table.weight.t()


ORDINARY: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "one row, 60,000 examples": (lambda: nn.Linear(3, 4), lambda: torch.randn(60_000, 3)),
    "biases, 60,000 examples": (lambda: nn.LayerNorm(3), lambda: torch.randn(60_000, 3)),
    "words, 60,000 examples": (lambda: nn.Embedding(7, 2), lambda: torch.randint(0, 7, (60_000, 2))),
    "lot of 600": (lambda: nn.Linear(20, 30), lambda: torch.randn(600, 20)),
    "rows": (lambda: nn.Linear(256, 300), lambda: torch.randn(16, 64, 256)),
    "many rows": (lambda: nn.Linear(40, 60), lambda: torch.randn(8, 512, 40)),
    "rows, 1,000 examples": (lambda: nn.Linear(40, 300), lambda: torch.randn(1000, 8, 40)),
    "pixels": (lambda: nn.Conv2d(24, 24, 5, padding=2), lambda: torch.randn(32, 24, 12, 12)),
    "tied": (Tied, lambda: torch.randint(0, 300, (8, 32))),
}


@pytest.mark.parametrize("kind", ORDINARY)
def test_an_ordinary_model_loses_less_than_a_percent(kind: str, fresh_plans: None) -> None:
    """Of a clipped gradient, and by noise that is larger than the bound asks for."""
    torch.manual_seed(9)
    build, draw = ORDINARY[kind]
    model, data = build(), draw()
    params = dict(model.named_parameters())

    def losses(m: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        out = m(batch[0])
        return (out * torch.linspace(-1, 1, out[0].numel(), dtype=out.dtype).view(out.shape[1:])).flatten(1).sum(1)

    whole = clipped_sum(losses(model, (data,)), params, FlatClip(1e-3))
    if kind != "tied":  # the bounds of the two uses of the table are added up
        assert 1e-3 < whole.sensitivity < 1.01e-3
    alone = torch.zeros(len(data))
    alone[3] = 1
    total = clipped_sum(losses(model, (data,)), params, FlatClip(1e-3), mask=alone)
    norm = float(sum(tensor.double().square().sum() for tensor in total.tensors.values())) ** 0.5
    assert 0.99e-3 < norm <= 1e-3
    exact = oracle.clipped_sum(oracle.per_example_gradients(model, (data[3:4],), losses), 1e-3)
    for name, tensor in exact.items():
        assert float((total.tensors[name] - tensor).norm()) <= 0.01 * 1e-3
