"""The slack of rounding: no adversary gets beyond it, and no ordinary model loses a percent of its gradients to it."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from oracles import gradients as oracle
from support.finished import clipped_sum
from torch import Tensor, nn

from hush.clipping import FlatClip
from hush.clipping import rounding as precision
from hush.gradients.layers import products
from hush.gradients.layers.embedding import Rows
from hush.gradients.sums import shared as combine
from hush.gradients.sums.blocks import chained_additions, long_additions, long_block, rho
from hush.gradients.sums.norms import upper_squared_norms
from hush.gradients.sums.per_example import Layout

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


@pytest.mark.parametrize("rows", [16, 64])
def test_strided_rows_move_further_than_whole_examples_and_within_the_bound(rows: int) -> None:
    """A kernel that adds the first rows of all examples, then the second ones: a part of every example is in a sum."""
    examples, top = 16, 8.0  # rho(rows) is 16: each goes up to 8 and back to 1
    small = examples * top * UNIT * (1 + 2.0**-10)
    values = np.full((examples, rows), small)
    values[:, 0], values[:, -1] = top, 1 - top
    without = values.copy()
    without[0] = 0
    moved = float(in_one_chain(values.T.flatten())) - float(in_one_chain(without.T.flatten())) - 1
    assert UNIT * examples * rows * (examples + 4 * 16) < moved < UNIT * examples * rows * examples * 17
    assert examples * rows * examples * 17 <= long_additions(examples, rows) or examples > long_block(rows)


def products_of(x: Tensor, g: Tensor) -> Callable[[nn.Module], Tensor]:
    """Losses whose gradient at the layer's output is g: the examples' gradients are the products of g and x."""
    return lambda layer: (layer(x) * g).flatten(1).sum(1)


SHAPES = {"pairs": (24, 200, 300), "formed": (64, 48, 40), "kept": (64, 48, 40), "one by one": (800, 20, 30)}
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
        monkeypatch.setattr(products, "_KEEP_BYTES", 0)
    return request.param


def the_layer(shape: tuple[int, int, int]) -> tuple[nn.Linear, dict[str, Tensor]]:
    layer = nn.Linear(shape[1], shape[2], bias=False)
    return layer, dict(layer.named_parameters())


@pytest.mark.parametrize("kind", ["words", "rows", "scales"])
def test_a_growing_sum_moves_within_the_sensitivity(kind: str) -> None:
    """The chain above through the library: in one chain of fp32, a thousand examples would move by twice the slack."""
    values = torch.from_numpy(growing(1000, 1)[:, 0])
    if kind == "words":
        model, data = nn.Embedding(2, 1), torch.zeros(1000, 1, dtype=torch.long)
    elif kind == "rows":
        model, data = nn.Linear(1, 1, bias=False), torch.ones(1000, 1)
    else:
        model, data = nn.LayerNorm(1), torch.ones(1000, 1)
    params = dict(model.named_parameters())

    def total(mask: Tensor) -> Tensor:
        losses = model(data).flatten() * values.float()
        found = clipped_sum(losses, params, FlatClip(1.001), mask=mask)
        assert found.sensitivity == 1.001 * 1.01
        return next(tensor for name, tensor in reversed(found.tensors.items())).double()

    without = torch.ones(1000)
    without[0] = 0
    moved = float((total(torch.ones(1000)) - total(without)).norm())
    assert 1 <= moved <= 1.001 * 1.007
    assert float(in_one_chain(values.numpy())) - float(in_one_chain(values.numpy()[1:])) > 1.01


@pytest.mark.parametrize("way", ["pairs", "formed", "one by one"], indirect=True)
def test_upper_norms_are_what_the_derivation_says(way: str) -> None:
    """Against the formulas of `precision`, written out in float64; between them and a fifth more of the error."""
    torch.manual_seed(10)
    length, i, j = SHAPES[way]
    for kind in KINDS:
        x, g = rows_of(kind, 3, SHAPES[way])
        part = products.Products(x.flatten(0, 1), g.flatten(0, 1), Layout(0, 1, 3, length), transposed=False)
        assert (part.pairs, part.apart) == (way == "pairs", way == "one by one")
        upper = upper_squared_norms([(part, (j, i))]).double().sqrt()
        x, g = x.double(), g.double()
        norm = torch.linalg.matrix_norm(torch.bmm(g.transpose(1, 2), x))
        mass = (x.norm(dim=2) * g.norm(dim=2)).sum(1)
        of_pairs = UNIT * (2 * length + i + (256 + 2)) * mass**2 if way == "pairs" else UNIT * (i + j) * norm**2
        of_sums = UNIT * length * mass * (1 if way == "pairs" else 2)
        if kind != "cancelling":
            true = (norm**2 + of_pairs).sqrt() + of_sums
            assert bool((upper >= true).all() and (upper - norm <= 1.35 * (true - norm)).all())
        elif way == "one by one":
            assert bool((upper >= of_sums).all())
        else:
            assert bool((upper >= 0.999 * mass / rho(length)).all())


def test_parts_that_overlap_count_what_lies_between_them() -> None:
    """Inner products of a table's two uses round relative to the masses of both."""
    torch.manual_seed(11)
    x, g = torch.randn(2 * 16, 8), torch.randn(2 * 16, 9)
    head = products.Products(x, g, Layout(0, 1, 2, 16), transposed=False)
    owner = torch.arange(2).repeat_interleave(5)
    words = Rows(torch.randint(0, 9, (10,)), owner, torch.randn(10, 8), batch=2, table=9, regular=True)
    both = combine.together([head, words])
    assert isinstance(both, combine.Several)
    upper = upper_squared_norms([(both, (9, 8))]).double()
    exact = (head.per_example() + words.per_example()).double().square().sum((1, 2))
    masses = head.squared_mass().double().sqrt(), words.squared_mass().double().sqrt()
    between = 2 * masses[0] * masses[1] * (8 + 16 + 5) * UNIT
    assert bool((upper >= exact + between).all() and (upper <= exact * 1.01).all())
    own = sum(part.squared_norms().double() * part.chain((9, 8)) for part in (head, words))
    assert bool((both.spread((9, 8), 0) >= 0.999 * (own + between / UNIT)).all())
    assert both.additions(2) >= 4 * (head.additions(2) + words.additions(2))
    assert bool((both.floor() >= words.squared_norms() / 16).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", SHAPES, indirect=True)
def test_one_example_alone_is_never_longer_than_its_bound(way: str, kind: str) -> None:
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
def test_neighbours_of_adversarial_rows_stay_within_the_sensitivity(way: str, kind: str) -> None:
    torch.manual_seed(8)
    layer, params = the_layer(SHAPES[way])
    x, g = rows_of(kind, 12, SHAPES[way])
    whole = clipped_sum(products_of(x, g)(layer), params, FlatClip(1.0), mask=torch.ones(12))
    for gone in (0, 5, 11):
        mask = torch.ones(12)
        mask[gone] = 0
        other = clipped_sum(products_of(x, g)(layer), params, FlatClip(1.0), mask=mask)
        assert float((whole.tensors["weight"].double() - other.tensors["weight"]).norm()) <= 1.009


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
    "wide rows": (lambda: nn.Linear(1100, 1100, bias=False), lambda: torch.randn(4, 512, 1100)),
    "many rows": (lambda: nn.Linear(40, 60), lambda: torch.randn(8, 512, 40)),
    "rows, 1,000 examples": (lambda: nn.Linear(40, 300), lambda: torch.randn(1000, 8, 40)),
    "pixels": (lambda: nn.Conv2d(24, 24, 5, padding=2), lambda: torch.randn(32, 24, 12, 12)),
    "tied": (Tied, lambda: torch.randint(0, 300, (8, 32))),
}


@pytest.mark.parametrize("kind", ORDINARY)
def test_an_ordinary_model_loses_less_than_a_percent(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a clipped gradient, and by noise that is larger than the bound asks for."""
    torch.manual_seed(9)
    build, draw = ORDINARY[kind]
    model, data = build(), draw()
    params, seen = dict(model.named_parameters()), []

    def pieces(additions: Callable[[int], float], examples: int, dtype: torch.dtype) -> int:
        seen.append(precision.pieces_needed(additions, examples, dtype))
        return seen[-1]

    monkeypatch.setattr("hush.gradients.sums.clipped.pieces_needed", pieces)

    def losses(m: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        out = m(batch[0])
        return (out * torch.linspace(-1, 1, out[0].numel(), dtype=out.dtype).view(out.shape[1:])).flatten(1).sum(1)

    whole = clipped_sum(losses(model, (data,)), params, FlatClip(1e-3))
    assert whole.sensitivity == 1e-3 * 1.01
    assert seen == [1], "no piece is summed apart"
    alone = torch.zeros(len(data))
    alone[3] = 1
    total = clipped_sum(losses(model, (data,)), params, FlatClip(1e-3), mask=alone)
    norm = float(sum(tensor.double().square().sum() for tensor in total.tensors.values())) ** 0.5
    assert 0.99e-3 < norm <= 1e-3
    exact = oracle.clipped_sum(oracle.per_example_gradients(model, (data[3:4],), losses), 1e-3)
    for name, tensor in exact.items():
        assert float((total.tensors[name] - tensor).norm()) <= 0.01 * 1e-3
