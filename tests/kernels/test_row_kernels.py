"""Norms and weighted sums of linear layers by kernels, through Triton's interpreter where there is no GPU."""

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from support.kernel_inputs import DEVICE, HALF, compare_clipped_sums, halves, per_example

from hush.gradients.layers import products
from hush.gradients.layers.cuda_rows import FusedRows
from hush.gradients.sums.per_example import Stored, Weights
from hush.kernels.gradients import row_products, rows, stored
from hush.kernels.gradients.grams import row_norms

SHAPES = [(3, 40, 136, 208), (5, 70, 128, 304), (1, 33, 144, 128), (9, 30, 128, 128), (2, 64, 272, 136)]
"""Batch, rows, inputs, outputs: tiles that are cut into pieces and tiles that are not, rows that fill no block."""


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("programs", [1, 3, 7, 100])
def test_norms_and_sums_are_those_of_products(
    shape: tuple[int, ...], programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    batch, length, i, j = shape
    monkeypatch.setattr(rows, "programs_of", lambda _: programs)
    x, g, factors = halves(batch, length, i), halves(batch, length, j), torch.rand(batch, device=DEVICE)
    want = per_example(x, g)
    norms = row_products.squared_norms(x, g).double()
    torch.testing.assert_close(norms, want.square().flatten(1).sum(1), rtol=1e-6, atol=0)
    alone = rows.weighted_sum(x, g, (torch.arange(batch, device=DEVICE) == batch - 1).float())
    torch.testing.assert_close(norms[-1], alone.double().square().sum(), rtol=1e-6, atol=0)
    total = rows.weighted_sum(x, g, factors).double()
    torch.testing.assert_close(total, torch.einsum("b,bji->ji", factors.double(), want), rtol=1e-5, atol=1e-4)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # infinities, in the interpreter
def test_an_example_without_weight_adds_nothing_whatever_it_holds() -> None:
    torch.manual_seed(0)
    x, g = halves(3, 40, 128), halves(3, 40, 136)
    factors = torch.tensor([0.3, 0.0, 1.0], device=DEVICE)
    want = rows.weighted_sum(x, g, factors)
    x[1], g[1, 3] = float("nan"), float("inf")
    assert torch.equal(rows.weighted_sum(x, g, factors), want)
    assert row_products.squared_norms(x, g).isfinite().tolist() == [True, False, True]


def test_rows_with_room_between_them_are_read_where_they_lie() -> None:
    torch.manual_seed(0)
    x, g, factors = halves(3, 40, 128), halves(3, 40, 144), torch.rand(3, device=DEVICE)
    apart = [torch.nn.functional.pad(tensor, (0, 16))[..., :-16] for tensor in (x, g)]
    odd = [torch.nn.functional.pad(tensor, (0, 3))[..., :-3] for tensor in (x, g)]
    assert all(rows.readable(tensor) is tensor for tensor in apart)
    assert all(rows.readable(tensor).is_contiguous() for tensor in odd)
    for strided in (apart, odd):
        assert torch.equal(row_products.squared_norms(*strided), row_products.squared_norms(x, g))
        assert torch.equal(rows.weighted_sum(*strided, factors), rows.weighted_sum(x, g, factors))
        assert torch.equal(row_norms(*strided)[0], row_norms(x, g)[0])


def test_a_sum_has_the_same_bits_every_time() -> None:
    torch.manual_seed(0)
    x, g, factors = halves(6, 40, 256), halves(6, 40, 384), torch.rand(6, device=DEVICE)
    sums = [rows.weighted_sum(x, g, factors) for _ in range(3)]
    assert torch.equal(sums[0], sums[1]) and torch.equal(sums[0], sums[2])


def test_tiles_that_do_not_fill_the_gpu_are_cut() -> None:
    assert rows.cut(144, 16, 512, 132) == (132, 2)
    assert rows.cut(132, 16, 512, 132) == (132, 16)
    assert rows.cut(108, 16, 512, 132) == (108, 16), "to write and read pieces would cost more"
    assert rows.cut(2358, 16, 512, 132) == (2358, 16)
    assert rows.cut(36, 16, 512, 132) == (0, 6)
    for tiles in (1, 7, 131, 133, 500):
        for examples in (1, 5, 128):
            whole, piece = rows.cut(tiles, examples, 512, 132)
            assert whole <= tiles and 1 <= piece <= examples and (whole == tiles or piece < examples)


def test_only_batches_whose_chain_of_additions_is_short_are_served() -> None:
    for batch, served in ((rows.LONGEST, True), (rows.LONGEST + 1, False)):
        assert rows.serves(torch.empty(batch, 2, 128), torch.empty(batch, 2, 128)) is served
    assert not rows.serves(torch.empty(4, 2, 64), torch.empty(4, 2, 128))


@pytest.mark.parametrize("by_pairs", [False, True])
@pytest.mark.parametrize("i, j", [(130, 150), (24, 150)], ids=["wide", "narrow"])
def test_a_contribution_of_rows_that_need_padding(i: int, j: int, by_pairs: bool) -> None:
    torch.manual_seed(0)
    x, g, factors = halves(3, 40, i), halves(3, 40, j), torch.rand(3, device=DEVICE)
    want = per_example(x, g)
    part = FusedRows(x, g, by_pairs)
    torch.testing.assert_close(part.squared_norms().double(), want.square().flatten(1).sum(1), rtol=1e-5, atol=0)
    total = part.weighted_sum(Weights(factors))
    assert total.shape == (j, i)
    torch.testing.assert_close(total.double(), torch.einsum("b,bji->ji", factors.double(), want), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(part.per_example().double(), want, rtol=1e-5, atol=1e-4)
    assert rows.serves(rows.aligned(x), rows.aligned(g)) is (i > 128)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(130, 144), nn.Linear(144, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh().mean(1))


@pytest.mark.parametrize("by_pairs", [False, True])
def test_clipped_sums_with_the_kernels_equal_those_without(by_pairs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    used: list[FusedRows] = []

    def fused(inputs: Tensor, gradients: Tensor) -> FusedRows:
        used.append(FusedRows(inputs, gradients, by_pairs))
        return used[-1]

    def use_kernels() -> None:
        monkeypatch.setattr(products, "on_matrix_units", lambda *tensors: all(t.dtype == HALF for t in tensors))
        monkeypatch.setattr(products.Products, "_small", False)
        monkeypatch.setattr(products, "fused_rows", fused)

    compare_clipped_sums(Network(), halves(5, 12, 130), use_kernels)
    assert used


@pytest.mark.parametrize("programs", [stored._PROGRAMS, 0], ids=["short pieces", "long pieces"])
def test_large_stored_gradients_are_summed_by_the_kernel(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(stored, "_PROGRAMS", programs)
    part = Stored(torch.randn(4, 30, 20, device=DEVICE))
    assert not part._in_one_pass, "small ones are not worth a launch"
    silent = torch.tensor([False, True, False, False], device=DEVICE)
    weights = Weights(torch.rand(4, device=DEVICE) * ~silent, silent)
    want = part.weighted_sum(weights)
    monkeypatch.setattr(Stored, "_in_one_pass", True)
    torch.testing.assert_close(part.weighted_sum(weights), want, rtol=1e-6, atol=1e-6)
    part.values[1, 3] = float("nan")
    torch.testing.assert_close(part.weighted_sum(weights), want, rtol=1e-6, atol=1e-6)
