"""The bound in finite precision: of one example, and between neighbours, for fp32, bf16 and fp16 models."""

import pytest
import torch
from oracles import gradients as oracle
from support.finished import clipped_sum
from torch import Tensor, nn

from hush.clipping import AutomaticClip, FlatClip, Group
from hush.clipping import rounding as precision
from hush.gradients.sums.blocks import BLOCK, blocked_additions

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Mixed(nn.Module):
    """Linear over time, an embedding, norms and a convolution, all in one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(13, 24)
        self.norm = nn.LayerNorm(24)
        self.wide = nn.Linear(24, 40)
        self.conv = nn.Conv1d(40, 8, 3)
        self.group = nn.GroupNorm(2, 8)
        self.head = nn.Linear(8 * 4, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.tanh(self.wide(self.norm(self.table(tokens))))
        return self.head(self.group(self.conv(hidden.transpose(1, 2))).flatten(1))


class Products(nn.Module):
    """Nothing but products: what is computed is what it looks like."""

    def __init__(self, inputs: int, outputs: int, bias: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, outputs, bias=bias)

    def forward(self, data: Tensor) -> Tensor:
        return self.layer(data)


def norm(tensors) -> float:
    return float(sum(tensor.double().square().sum() for tensor in tensors.values())) ** 0.5


def squares(model: nn.Module, data: Tensor) -> Tensor:
    return model(data).square().flatten(1).sum(1)


def params(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("clip", [FlatClip(1e-3), FlatClip(0.1), AutomaticClip(1.0)], ids=str)
def test_hazard_10_a_lot_of_one_random_example(dtype: torch.dtype, clip) -> None:
    torch.manual_seed(1)
    for _ in range(25):
        model = Mixed().to(dtype)
        tokens = torch.randint(0, 13, (1, 6))
        total = clipped_sum(squares(model, tokens), params(model), clip)
        assert all(tensor.dtype == torch.float32 for tensor in total.tensors.values())
        assert 0.5 * clip.bound < norm(total.tensors) <= clip.bound


def adversarial(kind: str, dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    """Inputs whose products round in one direction, or cancel, or span many magnitudes."""
    if kind == "one direction":
        return Products(512, 384).to(dtype), torch.full((1, 512), 1.0 + 2.0**-7 * 1.3, dtype=dtype)
    if kind == "magnitudes":
        return Products(300, 7).to(dtype), (10.0 ** torch.linspace(-4, 2, 300)).to(dtype)[None]
    if kind == "cancelling rows":
        rows = torch.randn(1, 1, 48)
        noise = 1e-4 * torch.randn(1, 16, 48)
        return Products(48, 40, bias=False).to(dtype), (rows * torch.tensor([1.0, -1.0] * 8)[None, :, None] + noise).to(
            dtype
        )
    rows = torch.randn(1, 64, 6)
    return Products(6, 5).to(dtype), rows.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["one direction", "magnitudes", "cancelling rows", "many rows"])
def test_hazard_10_a_lot_of_one_adversarial_example(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    for _ in range(10):
        model, data = adversarial(kind, dtype)
        out = model(data)
        losses = out.sum().reshape(1) if kind == "cancelling rows" else out.flatten(1).sin().sum(1)
        total = clipped_sum(losses, params(model), FlatClip(1e-2))
        assert norm(total.tensors) <= 1e-2


def test_the_factor_is_not_much_too_small() -> None:
    """The slack is small: a clipped example keeps more than 99.99 percent of its bound."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(60, 1000), nn.ReLU(), nn.Linear(1000, 10))
    total = clipped_sum(squares(model, torch.randn(1, 60)), params(model), FlatClip(1e-2))
    assert 0.9999e-2 < norm(total.tensors) <= 1e-2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["aligned", "random", "tokens", "rows"])
def test_neighbours_differ_by_at_most_the_sensitivity(kind: str, dtype: torch.dtype) -> None:
    """One row of a batch replaced by nothing (a zero in the mask): the sums, as computed, move by at most the bound."""
    torch.manual_seed(4)
    size = 256 if kind in ("aligned", "random") else 32
    if kind == "tokens":
        model, data = Mixed().to(dtype), torch.randint(0, 13, (size, 6))
    elif kind == "rows":
        model, data = Products(64, 48).to(dtype), torch.randn(size, 12, 64).to(dtype)
    else:
        model = Products(20, 10).to(dtype)
        data = (torch.ones(size, 20) * 1.37 if kind == "aligned" else torch.randn(size, 20)).to(dtype)
    mask = torch.ones(size)
    whole = clipped_sum(squares(model, data), params(model), FlatClip(0.01), mask=mask)
    assert whole.sensitivity == 0.01 * (1 + precision.RUN_SLACK)
    for gone in (0, size // 3, size - 1):
        without = mask.clone()
        without[gone] = 0
        other = clipped_sum(squares(model, data), params(model), FlatClip(0.01), mask=without)
        moved = norm({name: whole.tensors[name].double() - other.tensors[name] for name in whole.tensors})
        assert 0.0099 < moved <= whole.sensitivity


def test_hazard_35_the_bound_is_one_number_whatever_the_batch() -> None:
    for model, clip in ((Products(6, 3), FlatClip(1.0)), (Products(6, 3).double(), FlatClip(1.0))):
        dtype = next(model.parameters()).dtype
        bounds = {
            clipped_sum(squares(model, torch.randn(*shape, dtype=dtype)), params(model), clip).groups
            for shape in ((1, 6), (5, 6), (2000, 6), (3, 1, 6), (3, 700, 6))
        }
        bounds.add(clipped_sum(torch.zeros(0), params(model), clip).groups)
        assert bounds == {(Group(tuple(params(model)), 1.0 + precision.RUN_SLACK),)}


def test_slack_is_about_half_a_percent_for_256_rows() -> None:
    assert 0.003 < precision.slack(blocked_additions(256, BLOCK), torch.float32) < 0.005
    assert precision.slack(blocked_additions(256, BLOCK), torch.float64) < 1e-11


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_models_are_summed_in_fp32(dtype: torch.dtype) -> None:
    """A thousand equal examples: a sum in the model's own dtype would stop growing."""
    model = Products(4, 2).to(dtype)
    data = torch.ones(1000, 4, dtype=dtype)
    total = clipped_sum(model(data).sum(1), params(model), FlatClip(1e3))
    expected = oracle.clipped_sum(
        oracle.per_example_gradients(model, (data[:1],), lambda m, batch: m(batch[0]).sum(1)), 1e3
    )
    for name, tensor in expected.items():
        torch.testing.assert_close(total.tensors[name].double(), 1000 * tensor, rtol=1e-4, atol=0)


def test_float64_models_stay_in_float64() -> None:
    model = Products(6, 3).double()
    total = clipped_sum(squares(model, torch.randn(4, 6).double()), params(model), FlatClip(0.1))
    assert {tensor.dtype for tensor in total.tensors.values()} == {torch.float64}


def test_autocast_is_exact_for_its_own_gradients() -> None:
    """Under autocast the clipped sum is that of the bf16 forward and backward pass, summed in fp32."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 4))
    data = torch.randn(8, 20)

    def losses(rows: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(rows).float().square().sum(1)

    norms = []
    for row in data:
        loss = losses(row[None])
        norms.append(sum(g.double().square().sum() for g in torch.autograd.grad(loss[0], list(model.parameters()))))
    with torch.autocast("cpu", torch.bfloat16):  # called inside the context too: nothing of ours may be cast down
        total = clipped_sum(losses(data), params(model), FlatClip(1.0))
    assert all(tensor.dtype == torch.float32 for tensor in total.tensors.values())
    expected = dict.fromkeys(params(model), 0)
    for row, squared in zip(data, norms, strict=True):
        loss = losses(row[None])
        factor = min(1.0, 1.0 / float(squared) ** 0.5)
        for name, g in zip(expected, torch.autograd.grad(loss[0], list(model.parameters())), strict=True):
            expected[name] = expected[name] + factor * g.double()
    for name, tensor in total.tensors.items():
        assert float((tensor - expected[name]).norm()) <= 4e-3 * float(expected[name].norm())
    alone = clipped_sum(losses(data[:1]), params(model), FlatClip(0.5))
    assert 0.499 < norm(alone.tensors) <= 0.5


def test_hardware_that_rounds_products_is_counted() -> None:
    """With tf32 or bf16 products allowed for fp32, the factor shrinks by what they may round."""
    torch.manual_seed(6)
    model, data = Products(20, 10), torch.randn(1, 20)
    norms = {}
    try:
        for setting in ("highest", "high", "medium"):
            torch.set_float32_matmul_precision(setting)
            norms[setting] = norm(clipped_sum(squares(model, data), params(model), FlatClip(1e-2)).tensors)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert 0.9999e-2 < norms["highest"] <= 1e-2
    assert 2.0**-11 < 1 - norms["high"] / 1e-2 < 2.0**-9
    assert 2.0**-8 < 1 - norms["medium"] / 1e-2 < 2.0**-6


@pytest.mark.parametrize("kind", ["rows", "pixels"])
def test_long_examples_are_added_up_in_blocks(kind: str) -> None:
    """Many examples of many rows: the slack stays small, and the sum is the one of the float64 loop."""
    torch.manual_seed(3)
    if kind == "rows":
        model, x = torch.nn.Linear(40, 50), torch.randn(300, 12, 40)
    else:
        model, x = torch.nn.Conv2d(20, 24, 3), torch.randn(150, 20, 8, 8)

    def losses(m: torch.nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return m(batch[0]).square().flatten(1).sum(1)

    exact = oracle.clipped_sum(oracle.per_example_gradients(model, (x,), losses), 5.0)
    total = clipped_sum(losses(model, (x,)), params(model), FlatClip(5.0))
    for name, value in exact.items():
        # The factors of long examples are shrunk by what rounding might add, here a few parts in ten thousand.
        assert (total.tensors[name].double() - value).norm() <= 1e-3 * value.norm()
