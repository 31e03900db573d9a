"""Norms and weighted sums of per-example gradients by kernels, through Triton's interpreter where there is no GPU."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from support.kernel_inputs import DEVICE, HALF, compare_clipped_sums, halves, per_example

from hush.gradients.layers import products
from hush.gradients.layers.convolution import rule as conv
from hush.gradients.sums.blocks import BLOCK, blocked_additions
from hush.kernels.gradients.grams import row_norms
from hush.kernels.gradients.products import LONGEST, block_of, squared_norms, weighted_sums

SHAPES = [(3, 40, 24, 70), (2, 33, 130, 140), (3, 42, 20, 18), (2, 64, 33, 17), (5, 9, 5, 40)]
"""Batch, rows, inputs, outputs: one tile and several, rows that fill a block and rows that do not."""


@pytest.mark.parametrize("shape", SHAPES)
def test_norms_and_sums_are_those_of_products(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    batch, length, i, j = shape
    x, g, factors = halves(batch, length, i), halves(batch, length, j), torch.rand(batch, device=DEVICE)
    want = per_example(x, g)
    norms = squared_norms(x, g)
    torch.testing.assert_close(norms.double(), want.square().flatten(1).sum(1), rtol=1e-6, atol=0)
    for block in (1, 2, batch):
        sums = weighted_sums(x, g, factors, block)
        assert len(sums) == -(-batch // block)
        total = torch.einsum("b,bji->ji", factors.double(), want)
        torch.testing.assert_close(sums.double().sum(0), total, rtol=1e-5, atol=1e-4)


def test_an_example_without_weight_is_not_even_read() -> None:
    torch.manual_seed(0)
    x, g = halves(3, 20, 16), halves(3, 20, 16)
    x[1], g[1, 3] = float("nan"), float("inf")
    factors = torch.tensor([1.0, 0.0, 1.0], device=DEVICE)
    assert bool(weighted_sums(x, g, factors, 3).isfinite().all())
    assert squared_norms(x, g).isfinite().tolist() == [True, False, True]


@pytest.mark.parametrize("length, inputs, outputs", [(40, 24, 72), (70, 32, 24), (130, 16, 400), (40, 16, 4200)])
def test_norms_from_pairs_of_rows(length: int, inputs: int, outputs: int) -> None:
    torch.manual_seed(0)
    x, g = halves(3, length, inputs), halves(3, length, outputs)
    want = torch.einsum("bti,btj->bij", x.double(), g.double()).square().flatten(1).sum(1)
    norms, masses = row_norms(x, g)
    torch.testing.assert_close(norms.double(), want, rtol=1e-5, atol=0)
    sizes = x.double().norm(dim=2) * g.double().norm(dim=2)
    torch.testing.assert_close(masses.double(), sizes.sum(1).square(), rtol=1e-5, atol=0)


def test_no_chain_of_additions_is_longer_than_the_bound_says() -> None:
    for batch in (1, 7, 128, 129, 2000):
        for outputs, inputs in ((16, 16), (64, 1600), (50257, 768)):
            assert 1 <= block_of(batch, outputs, inputs) <= LONGEST
    assert blocked_additions(2000, LONGEST) < blocked_additions(2000, BLOCK) < 2000 * 2002


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(16, 20, 3, padding=1)
        self.rows = nn.Linear(20, 24)
        self.last = nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.conv(x).tanh().flatten(2).transpose(1, 2)
        return self.last(self.rows(rows).tanh().mean(1))


@pytest.mark.parametrize("by_pairs", [False, True])
def test_clipped_sums_with_the_kernels_equal_those_without(by_pairs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    used: list[int] = []

    def served(*tensors: Tensor) -> bool:
        used.append(len(tensors))
        return all(one.dtype == HALF for one in tensors)

    def use_kernels() -> None:
        for rules in (products, conv):
            monkeypatch.setattr(rules, "on_matrix_units", served)
        monkeypatch.setattr(products.Products, "_small", False)
        fused = products.fused_rows
        monkeypatch.setattr(products, "fused_rows", lambda x, g: replace(fused(x, g), by_pairs=by_pairs))

    compare_clipped_sums(Network(), halves(5, 16, 5, 5), use_kernels)
    assert used
