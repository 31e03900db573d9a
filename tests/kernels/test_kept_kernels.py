"""Products of linear layers that are kept in half precision: through Triton's interpreter where there is no GPU."""

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from oracles.gradients import clipped_sum as oracle_sum
from oracles.gradients import per_example_gradients, squared_norms
from support.finished import clipped_sum
from support.kernel_inputs import DEVICE, HALF, compare_clipped_sums, halves, per_example

from hush.clipping import FlatClip
from hush.gradients.layers import cuda_rows, products
from hush.gradients.layers.cuda_rows import KeptRows, kept_rows, worth_keeping
from hush.gradients.layers.products import Products
from hush.gradients.sums.per_example import Weights
from hush.kernels.gradients import row_products, rows, stored

SHAPES = [(3, 40, 136, 208), (5, 70, 128, 304), (1, 33, 144, 128), (2, 64, 272, 136)]
"""Batch, rows, inputs, outputs: tiles that are full and tiles that are not, rows that fill no block."""
ULP = torch.finfo(HALF).eps / 2


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("programs", [1, 3, 100])
def test_what_is_kept_is_rounded_once_in_pieces_of_whole_tiles(
    shape: tuple[int, ...], programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    batch, length, i, j = shape
    monkeypatch.setattr(rows, "programs_of", lambda _: programs)
    x, g = halves(batch, length, i), halves(batch, length, j)
    for pieces in (1, 2, 9):
        kept, norms = row_products.kept_products(x, g, pieces)
        assert [piece.shape[1] for piece in kept] == row_products.shares(j, pieces)
        whole = torch.cat(kept, 1)
        assert whole.dtype == HALF and whole.shape == (batch, j, i)
        torch.testing.assert_close(whole.double(), per_example(x, g), rtol=1.01 * ULP, atol=1e-5)
        torch.testing.assert_close(norms.double(), whole.double().square().flatten(1).sum(1), rtol=1e-6, atol=0)


def test_the_norm_is_that_of_the_rounded_numbers() -> None:
    """2049 rounds to 2048: the norm that is not rounded is half a thousandth larger, far more than sums in fp32 err."""
    x, g = torch.ones(2, 3, 128, device=DEVICE, dtype=HALF), torch.ones(2, 3, 128, device=DEVICE, dtype=HALF)
    g[:, 0], g[:, 1] = 1024, 1024
    (kept,), norms = row_products.kept_products(x, g, 1)
    assert bool((kept == 2048).all())
    torch.testing.assert_close(norms, torch.full_like(norms, 128**2 * 2048.0**2), rtol=1e-6, atol=0)


@pytest.mark.parametrize("outputs, pieces, want", [(3072, 2, [1536, 1536]), (3072, 1, [3072]), (300, 2, [256, 44])])
def test_shares_of_the_rows_of_a_matrix(outputs: int, pieces: int, want: list[int]) -> None:
    assert row_products.shares(outputs, pieces) == want


def test_no_more_pieces_than_the_kernel_takes() -> None:
    for outputs in (128, 1000, 50272):
        shares = row_products.shares(outputs, 100)
        assert len(shares) <= stored.PIECES and sum(shares) == outputs


@pytest.mark.parametrize("columns", [1, 100, 8192, 20001])
def test_norms_of_what_is_stored(columns: int) -> None:
    torch.manual_seed(0)
    values = halves(3, columns)
    norms = stored.squared_norms(values)
    assert norms.dtype == torch.float32
    torch.testing.assert_close(norms.double(), values.double().square().sum(1), rtol=1e-6, atol=0)
    values[1, -1] = float("inf")
    assert stored.squared_norms(values).isfinite().tolist() == [True, False, True]


@pytest.mark.parametrize("wide", [1, stored._WIDE], ids=["one by one", "many at once"])
def test_sums_of_half_precision_gradients_are_taken_in_fp32(wide: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(stored, "_WIDE", wide)
    values, factors = halves(7, 300), torch.rand(7, device=DEVICE)
    for block, cut in ((1, 300), (3, 130), (7, 299)):
        sums = stored.weighted_rows(values.split(cut, 1), factors, block)
        want = [
            (values[s : s + block].double() * factors[s : s + block, None].double()).sum(0) for s in range(0, 7, block)
        ]
        assert sums.dtype == torch.float32
        torch.testing.assert_close(sums.double(), torch.stack(want), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("busy", [True, False], ids=["kernel", "library"])
@pytest.mark.parametrize("i, j", [(130, 150), (256, 128)], ids=["padded, in pieces", "as they are"])
def test_a_contribution_that_is_kept(i: int, j: int, busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(row_products, "keeps_busy", lambda *_: busy)
    x, g, factors = halves(3, 40, i), halves(3, 40, j), torch.rand(3, device=DEVICE)
    part = kept_rows(x, g)
    assert len(part.pieces) == (2 if j > 128 and busy else 1)
    kept = part.per_example()
    assert kept.shape == (3, j, i) and kept.dtype == torch.float32
    torch.testing.assert_close(kept.double(), per_example(x, g), rtol=2.1 * ULP, atol=1e-2 * (not busy) + 1e-5)
    torch.testing.assert_close(
        part.squared_norms().double(), kept.double().square().flatten(1).sum(1), rtol=1e-6, atol=0
    )
    want = torch.einsum("b,bji->ji", factors.double(), kept.double())
    torch.testing.assert_close(part.weighted_sum(Weights(factors)).double(), want, rtol=1e-5, atol=1e-5)
    turned = part.t()
    torch.testing.assert_close(turned.weighted_sum(Weights(factors)).double(), want.t(), rtol=1e-5, atol=1e-5)
    assert torch.equal(turned.per_example(), kept.transpose(1, 2)) and turned.t() == part


@pytest.mark.parametrize("busy, links", [(True, 128 + 256 + 3 * 2), (False, 64 + 128 + 384 * 272 // 8192 + 1)])
def test_the_chain_of_additions_behind_a_norm(busy: bool, links: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile's squares over its columns and rows, then the tiles; two more for a square and its sum."""
    monkeypatch.setattr(row_products, "keeps_busy", lambda *_: busy)
    assert kept_rows(halves(1, 8, 272), halves(1, 8, 384)).chain((384, 272)) == 2 + links


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # infinities, in the interpreter
@pytest.mark.parametrize("busy", [True, False], ids=["kernel", "library"])
def test_an_example_that_is_not_finite_touches_no_other(busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(row_products, "keeps_busy", lambda *_: busy)
    x, g = halves(3, 40, 128), halves(3, 40, 130)
    factors = torch.tensor([0.3, 0.0, 1.0], device=DEVICE)
    want = kept_rows(x, g).weighted_sum(Weights(factors))
    x[1, 2, 5] = float("inf")
    part = kept_rows(x, g)
    assert part.squared_norms().isfinite().tolist() == [True, False, True]
    assert torch.equal(part.weighted_sum(Weights(factors)), want)


def test_a_last_round_that_is_nearly_empty_is_left_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "programs_of", lambda _: 132)

    def busy(batch: int, i: int, j: int) -> bool:
        return row_products.keeps_busy(torch.empty(batch, 1, i), torch.empty(batch, 1, j))

    assert busy(16, 768, 3072) and busy(16, 768, 2304) and busy(4, 768, 2304) and busy(16, 768, 50272)
    assert busy(16, 768, 768) and not busy(5, 768, 768) and not busy(4, 768, 768)


def test_what_is_kept_takes_hardly_more_memory_than_what_it_is_made_of() -> None:
    assert worth_keeping(512, 768, 3072) and worth_keeping(2048, 768, 50257)
    assert not worth_keeping(512, 768, 50257), "half as large again, while all activations are still there"
    assert not worth_keeping(128, 768, 3072), "four times the memory"
    assert not worth_keeping(512, 768, 16), "too small to be worth kernels of its own"


class Twice(nn.Module):
    """One matrix that is used once, and one that is used by two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.once, self.tied, self.last = nn.Linear(130, 144), nn.Linear(144, 144), nn.Linear(144, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tied(self.once(x).tanh()).tanh()
        return self.last(self.tied(hidden).tanh().mean(1))


def keep_halves(monkeypatch: pytest.MonkeyPatch, made: list[KeptRows]) -> None:
    """The way that bfloat16 goes on a GPU, for the half precision of the tests."""

    def keep(inputs: Tensor, gradients: Tensor) -> KeptRows:
        made.append(kept_rows(inputs, gradients))
        return made[-1]

    monkeypatch.setattr(cuda_rows, "_LEAST", 1)
    monkeypatch.setattr(cuda_rows, "_MEMORY", 100)
    monkeypatch.setattr(Products, "_brain", property(lambda self: self._length > 1))
    monkeypatch.setattr(products, "kept_rows", keep)


def test_clipped_sums_of_what_is_kept_equal_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    made: list[KeptRows] = []
    compare_clipped_sums(Twice(), halves(5, 12, 130), lambda: keep_halves(monkeypatch, made))
    assert made


def test_only_a_matrix_that_is_used_once_is_kept_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cross terms of two uses come from factors that are not rounded: norms would be those of other numbers."""
    torch.manual_seed(0)
    model, made = Twice().to(DEVICE, HALF), []
    keep_halves(monkeypatch, made)
    losses = model(halves(5, 12, 130)).float().square().sum(1) * 4096  # as the gradients of float16 want it
    clipped_sum(losses, dict(model.named_parameters()), FlatClip(1.0))
    assert {part.sizes for part in made} == {(144, 130)}


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: the interpreter multiplies no bfloat16")
@pytest.mark.parametrize("busy", [True, False], ids=["kernel", "library"])
def test_layers_in_bfloat16_are_as_near_to_float64_as_in_pytorch(busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    made: list[KeptRows] = []
    monkeypatch.setattr(products, "kept_rows", lambda x, g: made.append(kept_rows(x, g)) or made[-1])
    monkeypatch.setattr(row_products, "keeps_busy", lambda *_: busy)
    model = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 384)).to(DEVICE)
    x, params = torch.randn(6, 192, 256, device=DEVICE), dict(model.named_parameters())

    def losses(model: nn.Module, batch: Sequence[Tensor], half: bool = True) -> Tensor:
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=half):
            out = model(batch[0])
        return (out if out.dtype == torch.float64 else out.float()).square().mean(1).sum(1)

    exact = per_example_gradients(model, (x,), partial(losses, half=False))
    total = {name: values.sum(0) for name, values in exact.items()}
    bound = float(torch.stack(list(squared_norms(exact).values())).sum(0).sqrt().median())
    plain = torch.autograd.grad(losses(model, (x,)).sum(), list(params.values()))
    allowed = 2 * distance(dict(zip(params, plain, strict=True)), total)
    assert allowed < 0.03
    assert distance(clipped_sum(losses(model, (x,)), params, FlatClip(1e3)).tensors, total) <= allowed
    clipped = clipped_sum(losses(model, (x,)), params, FlatClip(bound)).tensors
    assert distance(clipped, oracle_sum(exact, bound)) <= allowed + 0.005, "rounding may lower a factor"
    assert {part.sizes for part in made} == {(512, 256), (384, 512)}
    assert {len(part.pieces) for part in made} == ({2, 3} if busy else {1})
    for one in range(6):
        mask = torch.arange(6, device=DEVICE) == one
        alone = clipped_sum(losses(model, (x,)), params, FlatClip(bound / 3), mask=mask).tensors
        norm = float(torch.stack([value.double().square().sum() for value in alone.values()]).sum().sqrt())
        assert 0.97 * bound / 3 <= norm <= bound / 3


def distance(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    gap = sum(float((found[name].double() - wanted[name]).square().sum()) for name in wanted)
    return (gap / sum(float(value.square().sum()) for value in wanted.values())) ** 0.5
