"""Convolution gradients of examples by kernels, through Triton's interpreter where there is no GPU."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("triton")

from support.finished import clipped_sum

from hush.captured.compiled import compiled
from hush.clipping import FlatClip
from hush.gradients.layers.convolution import on_cuda as conv_cuda
from hush.gradients.layers.convolution import rule as conv
from hush.gradients.sums.blocks import BLOCK
from hush.gradients.sums.norms import upper_squared_norms
from hush.gradients.sums.per_example import Weights
from hush.kernels.gradients import convolutions, stored
from hush.kernels.gradients.convolutions import Window, block_of, gradients, squared_norms, weighted_sums
from hush.kernels.gradients.products import LONGEST
from hush.kernels.gradients.stored import weighted_rows
from hush.kernels.gradients.windows import window_norms

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.float16  # the interpreter multiplies no bfloat16


def halves(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(HALF)


def whole(*shape: int) -> Tensor:
    """Small whole numbers: every order in which a machine adds up their products gives the same bits."""
    return halves(*shape).mul(3).round()


def per_example(pixels: Tensor, gradient: Tensor, window: Window) -> Tensor:
    """[batch, outputs * taps * channels] in float64 by autograd, one example at a time."""
    shape = (gradient.shape[1], pixels.shape[1], *window.kernel)
    kernel = torch.zeros(shape, dtype=torch.float64, device=DEVICE, requires_grad=True)
    found = []
    for x, g in zip(pixels.double(), gradient.double(), strict=True):
        out = F.conv2d(x[None], kernel, None, window.stride, window.padding, window.dilation)
        (answer,) = torch.autograd.grad(out, kernel, g[None])
        found.append(answer.flatten(2).transpose(2, 1).flatten())
    return torch.stack(found)


CASES = {
    "one tap": ((3, 24, 5, 8), (3, 70, 5, 8), Window()),
    "3 x 3": ((3, 20, 7, 6), (3, 18, 7, 6), Window((3, 3), (1, 1), (1, 1))),
    "5 x 5, three channels": ((2, 3, 7, 8), (2, 20, 7, 8), Window((5, 5), (1, 1), (2, 2))),
    "many outputs": ((2, 16, 4, 4), (2, 140, 4, 4), Window((3, 3), (1, 1), (1, 1))),
    "strided": ((2, 33, 8, 8), (2, 17, 4, 4), Window((3, 3), (2, 2), (1, 1))),
    "one tap, strided": ((2, 16, 8, 8), (2, 17, 4, 4), Window((1, 1), (2, 2))),
    "dilated, uneven": ((3, 5, 6, 7), (3, 40, 5, 3), Window((2, 3), (1, 1), (0, 0), (1, 2))),
    "one axis": ((3, 16, 1, 30), (3, 18, 1, 15), Window((1, 3), (1, 2), (0, 1))),
    "long": ((2, 16, 20, 20), (2, 16, 20, 20), Window((3, 3), (1, 1), (1, 1))),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_gradients_norms_and_sums_are_those_of_autograd(name: str, layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    shape, out, window = CASES[name]
    pixels, gradient = halves(*shape).contiguous(memory_format=layout), halves(*out).contiguous(memory_format=layout)
    want = per_example(pixels, gradient, window)
    pieces, norms = gradients(pixels, gradient, window)
    kept = torch.cat(pieces)
    torch.testing.assert_close(kept.double().flatten(1), want, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(norms.double(), want.square().sum(1), rtol=1e-6, atol=0)
    torch.testing.assert_close(squared_norms(pixels, gradient, window), norms, rtol=1e-6, atol=0)
    factors = torch.rand(shape[0], device=DEVICE)
    for block in (1, 2, shape[0]):
        sums = weighted_sums(pixels, gradient, factors, window, block)
        assert sums.shape == (-(-shape[0] // block), *kept.shape[1:])
        torch.testing.assert_close(sums.double().sum(0).flatten(), factors.double() @ want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("numbers", [whole, *([halves] if DEVICE == "cuda" else [])])
def test_what_is_summed_is_what_was_measured(name: str, numbers: Callable[..., Tensor]) -> None:
    """Bit for bit: of any numbers on a GPU; of whole ones where the interpreter multiplies with the BLAS it finds."""
    torch.manual_seed(0)
    shape, out, window = CASES[name]
    pixels, gradient = numbers(*shape), numbers(*out)
    pieces, norms = gradients(pixels, gradient, window)
    assert torch.equal(squared_norms(pixels, gradient, window), norms)
    ones = torch.ones(shape[0], device=DEVICE)
    assert torch.equal(weighted_sums(pixels, gradient, ones, window, 1), torch.cat(pieces))


@pytest.mark.parametrize("some", [1, 2, 3])
def test_kept_gradients_come_in_pieces_of_a_few_examples(some: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    window, shape = Window((3, 3), (1, 1), (1, 1)), (18, 20, 3, 3)
    pixels, gradient = whole(5, 20, 4, 4), whole(5, 18, 4, 4)
    (together,), norms = gradients(pixels, gradient, window)
    monkeypatch.setattr(convolutions, "_PIECE", some * together[0].nbytes)
    pieces, same = gradients(pixels, gradient, window)
    assert max(map(len, pieces)) <= some
    assert torch.equal(torch.cat(pieces), together)
    assert torch.equal(same, norms)
    weights = Weights(torch.rand(5, device=DEVICE))
    total = conv_cuda.by_way(conv_cuda.Way.KEEP, pixels, gradient, window, shape).weighted_sum(weights)
    want = torch.einsum("b,bjn->jn", weights.factors.double(), together.double()).unflatten(1, (9, 20)).transpose(1, 2)
    torch.testing.assert_close(total.double().flatten(2), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in CASES if name != "long"])
def test_norms_from_pairs_of_windows(name: str) -> None:
    torch.manual_seed(0)
    shape, out, window = CASES[name]
    pixels, gradient = halves(*shape), halves(*out)
    norms, masses = window_norms(pixels, gradient, window)
    want = per_example(pixels, gradient, window)
    torch.testing.assert_close(norms.double(), want.square().sum(1), rtol=2e-6, atol=0)
    patches = F.unfold(pixels.double(), window.kernel, window.dilation, window.padding, window.stride)
    sizes = patches.norm(dim=1) * gradient.double().flatten(2).norm(dim=1)
    torch.testing.assert_close(masses.double(), sizes.sum(1).square(), rtol=1e-5, atol=0)


def test_pairs_of_windows_are_refused_where_one_tile_cannot_hold_them() -> None:
    with pytest.raises(ValueError, match="at most 64 outputs"):
        window_norms(halves(2, 16, 9, 9), halves(2, 16, 9, 9), Window((3, 3), (1, 1), (1, 1)))


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # by the interpreter
def test_an_example_without_weight_is_not_even_read() -> None:
    torch.manual_seed(0)
    window = Window((3, 3), (1, 1), (1, 1))
    pixels, gradient = halves(3, 16, 4, 4), halves(3, 16, 4, 4)
    pixels[1], gradient[1, 0, 3] = float("nan"), float("inf")
    factors = torch.tensor([1.0, 0.0, 1.0], device=DEVICE)
    assert bool(weighted_sums(pixels, gradient, factors, window, 3).isfinite().all())
    (kept,), norms = gradients(pixels, gradient, window)
    assert norms.isfinite().tolist() == [True, False, True]
    assert window_norms(pixels, gradient, window)[0].isfinite().tolist() == [True, False, True]
    total = weighted_rows([kept.flatten(1)], factors, 3)
    torch.testing.assert_close(total[0], kept[0].flatten() + kept[2].flatten())


def test_weighted_rows_in_blocks() -> None:
    torch.manual_seed(0)
    values, factors = torch.randn(70, 300, device=DEVICE), torch.rand(70, device=DEVICE)
    for block in (1, 3, 33, 64, 70):
        sums = weighted_rows([values], factors, block)
        assert len(sums) == -(-70 // block)
        torch.testing.assert_close(sums.double().sum(0), factors.double() @ values.double(), rtol=1e-5, atol=1e-6)


def test_no_chain_of_additions_is_longer_than_the_bound_says() -> None:
    for batch in (1, 7, 128, 129, 2000):
        for outputs, columns, positions in ((16, 27, 1024), (64, 576, 1), (64, 1600, 144), (512, 4608, 49)):
            assert 1 <= block_of(batch, outputs, columns, positions) <= LONGEST
            assert 1 <= stored.block_of(batch, outputs * columns, BLOCK) <= BLOCK


def test_large_and_small_kernels_take_the_way_that_suits_them() -> None:
    """The choice by shapes; `benchmarks/choices.py` compares it with measured times."""
    wanted = {
        (256, 64, 64, 9, 1024, 64 * 1024): conv_cuda.Way.KEEP,  # wrn16-4, stage by stage
        (256, 128, 64, 1, 256, 64 * 1024): conv_cuda.Way.KEEP,  # a shortcut: what launches cost decides
        (256, 128, 128, 9, 256, 128 * 256): conv_cuda.Way.TWICE,
        (256, 256, 256, 9, 64, 256 * 64): conv_cuda.Way.WINDOWS,
        (2000, 64, 3, 25, 576, 3 * 576): conv_cuda.Way.KEEP,  # cnn24
        (2000, 64, 64, 25, 144, 64 * 144): conv_cuda.Way.TWICE,
    }
    for sizes, way in wanted.items():
        assert conv_cuda.cheapest_way(conv_cuda.Sizes(*sizes)) is way


def test_norms_from_windows_are_bounded_by_the_mass_of_what_was_added_up() -> None:
    """Inner products of windows cancel where gradients do: rounding is relative to the mass, and the bound says so."""
    torch.manual_seed(0)
    window, shape = Window((3, 3), (1, 1), (1, 1)), (16, 16, 3, 3)
    gradient = halves(2, 16, 4, 4)
    pixels, gradient = halves(2, 16, 1, 1).expand(2, 16, 4, 4), gradient - gradient.mean((2, 3), keepdim=True)
    exact = per_example(pixels, gradient, window).square().sum(1)
    part = conv_cuda.by_way(conv_cuda.Way.WINDOWS, pixels, gradient, window, shape)
    masses = window_norms(pixels, gradient, window)[1]
    assert part.terms == 2 * 16  # matrix units cut off
    assert torch.equal(part.squared_mass(), masses)
    assert bool((masses > 4 * exact).all())
    upper = upper_squared_norms([(part, shape)])
    assert bool((upper.double() >= exact + 16 * 2.0**-24 * masses.double()).all())
    kept = conv_cuda.by_way(conv_cuda.Way.KEEP, pixels, gradient, window, shape)
    assert kept.terms == 1
    torch.testing.assert_close(kept.squared_norms().double(), exact, rtol=1e-5, atol=0)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.GroupNorm(4, 16)
        self.second = nn.Conv2d(16, 20, 3, padding=1, stride=2)
        self.third = nn.Conv1d(20, 8, 3)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = self.second(self.norm(self.first(x)).relu())
        return self.last(self.third(out.tanh().flatten(2)).mean(2))


@pytest.mark.parametrize("way", [None, *conv_cuda.Way])
def test_clipped_sums_with_the_kernels_equal_those_without(
    way: conv_cuda.Way | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Network().to(DEVICE, HALF)
    x, mask = halves(5, 3, 8, 8), torch.tensor([1, 1, 0, 1, 1], device=DEVICE).bool()
    params = dict(model.named_parameters())

    def total(bound: float, mask: Tensor) -> dict[str, Tensor]:
        return dict(clipped_sum(model(x).float().square().sum(1) * 4096, params, FlatClip(bound), mask=mask).tensors)

    want = total(0.01, mask)
    used: list[int] = []
    monkeypatch.setattr(conv, "on_matrix_units", lambda *ts: used.append(1) or all(t.dtype == HALF for t in ts))
    if way is not None:
        monkeypatch.setattr(conv_cuda, "cheapest_way", lambda sizes: way)
    got = total(0.01, mask)
    assert used
    for name in params:
        torch.testing.assert_close(got[name], want[name], rtol=2e-3, atol=2e-5)
    for one in range(5):
        alone = total(0.01, torch.arange(5, device=DEVICE) == one)
        assert sum(float(t.double().square().sum()) for t in alone.values()) <= 0.01**2


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.GroupNorm(4, 16).float()
        self.inside = nn.Conv2d(16, 32, 3, padding=1, stride=2)
        self.past = nn.Conv2d(16, 32, 1, stride=2)
        self.last = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.first(x).float()).relu().to(x.dtype)
        return self.last((self.inside(out) + self.past(out)).mean((2, 3)))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # by the compiler's own imports
def test_the_compiled_step_with_the_kernels_equals_the_eager_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor hands images over in channels last; operators run through the interpreter where there is no GPU."""
    torch.manual_seed(0)
    model = Residual().to(DEVICE, HALF)
    model.norm.float()
    params = dict(model.named_parameters())
    monkeypatch.setattr(conv, "on_matrix_units", lambda *tensors: all(tensor.dtype == HALF for tensor in tensors))

    def sums(given: list[Tensor]) -> list[Tensor]:
        with torch.enable_grad():
            losses = F.cross_entropy(model(given[0]).float(), given[1], reduction="none") * 256
        return list(clipped_sum(losses, params, FlatClip(1.0), mask=given[2]).tensors.values())

    labels, mask = torch.randint(0, 3, (4,), device=DEVICE), torch.tensor([1, 1, 0, 1], device=DEVICE).bool()
    given = [halves(4, 3, 8, 8), labels, mask]
    want = sums(given)
    run = compiled(sums, given)
    for got, expected in zip(run(given), want, strict=True):
        assert got.shape == expected.shape
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-3)
    alone = run([*given[:2], torch.arange(4, device=DEVICE) == 1])
    assert sum(float(total.double().square().sum()) for total in alone) <= 1.0
