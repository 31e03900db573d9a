"""Losses and gradients of cross entropy by kernels, through Triton's interpreter where there is no GPU."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from hush.kernels.gradients import cross_entropy
from hush.kernels.gradients.cross_entropy import log_sums, logit_gradients, wide_enough

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # infinities, in the interpreter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several parts to a row without long rows."""
    monkeypatch.setattr(cross_entropy, "_COLUMNS", 32)
    monkeypatch.setattr(cross_entropy, "_SUMMED", 64)


def some(rows: int, columns: int, kind: torch.dtype = torch.float16) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of very different sizes, classes (the first and the last among them), weights."""
    torch.manual_seed(0)
    logits = (
        torch.randn(rows, columns, device=DEVICE)
        * torch.tensor([0.1, 1.0, 30.0], device=DEVICE).repeat(rows)[:rows, None]
    )
    classes = torch.randint(0, columns, (rows,), device=DEVICE)
    classes[:2] = torch.tensor([0, columns - 1])
    return logits.to(kind), classes, torch.rand(rows, device=DEVICE)


def wanted(logits: Tensor, classes: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Losses and gradients in float64 by autograd."""
    exact = logits.double().requires_grad_()
    losses = F.cross_entropy(exact, classes, reduction="none")
    (gradient,) = torch.autograd.grad(losses, exact, weights.double())
    return losses.detach(), gradient


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [5, 32, 97, 160])
def test_losses_and_gradients_are_those_of_autograd(columns: int, kind: torch.dtype) -> None:
    logits, classes, weights = some(7, columns, kind)
    losses, gradient = wanted(logits, classes, weights)
    sums = log_sums(logits)
    assert sums.dtype == torch.float32
    chosen = logits.double().gather(1, classes[:, None])[:, 0]
    torch.testing.assert_close(sums.double() - chosen, losses, rtol=1e-6, atol=1e-5)
    got = logit_gradients(logits, sums, classes, weights)
    assert got.dtype == kind and got.shape == (7, wide_enough(columns))
    # Rounded once, and a little for the fp32 numbers behind it; the interpreter cuts bfloat16 off.
    units = 0.51 if kind == torch.float16 or DEVICE == "cuda" else 1.01
    torch.testing.assert_close(got[:, :columns].double(), gradient, rtol=units * torch.finfo(kind).eps, atol=1e-6)
    assert not got[:, columns:].any()


@pytest.mark.parametrize("shift", [-3000.0, 3000.0])
def test_logits_far_from_zero_are_as_good_as_others(shift: float) -> None:
    _, classes, weights = some(3, 97)
    logits = (torch.randint(-8, 8, (3, 97), device=DEVICE) + shift).to(torch.float16)
    losses, gradient = wanted(logits, classes, weights)
    sums = log_sums(logits)
    chosen = logits.double().gather(1, classes[:, None])[:, 0]
    torch.testing.assert_close(sums.double() - chosen, losses, rtol=0, atol=1e-3)
    got = logit_gradients(logits, sums, classes, weights)[:, :97]
    torch.testing.assert_close(got.double(), gradient, rtol=2e-3, atol=1e-5)


def test_rows_with_room_between_them_are_read_where_they_lie() -> None:
    logits, classes, weights = some(5, 45)
    sums = log_sums(logits)
    want = logit_gradients(logits, sums, classes, weights)
    for room, vectors in ((3, True), (8, False), (19, True)):
        apart = F.pad(logits, (0, room), value=float("nan"))[:, :45]
        assert cross_entropy._vectors(apart) is vectors
        torch.testing.assert_close(log_sums(apart), sums, rtol=1e-6, atol=0)
        assert torch.equal(logit_gradients(apart, sums, classes, weights), want)
    torch.testing.assert_close(log_sums(logits.t().contiguous().t()), sums, rtol=1e-6, atol=0)


def test_nothing_is_read_behind_the_last_row() -> None:
    logits, _, _ = some(5, 48)
    tight = logits.flatten()[: 5 * 48 - 3].clone().as_strided((5, 45), (48, 1))
    assert not cross_entropy._vectors(tight)
    torch.testing.assert_close(log_sums(tight), log_sums(logits[:, :45]), rtol=1e-6, atol=0)


def test_logits_of_minus_infinity_are_classes_that_cannot_be() -> None:
    logits, _, weights = some(4, 97)
    logits[:, :64] = float("-inf")
    classes = torch.full((4,), 70, device=DEVICE)
    _, gradient = wanted(logits, classes, weights)
    got = logit_gradients(logits, log_sums(logits), classes, weights)
    torch.testing.assert_close(got[:, :97].double(), gradient, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")], ids=str)
@pytest.mark.parametrize("place", [0, 40, 96])
def test_a_row_that_is_not_finite_shows_it_and_touches_no_other(bad: float, place: int) -> None:
    logits, classes, weights = some(3, 97)
    want = logit_gradients(logits, log_sums(logits), classes, weights)
    logits[1, place] = bad
    sums = log_sums(logits)
    assert sums.isfinite().tolist() == [True, False, True]
    got = logit_gradients(logits, sums, classes, weights)
    assert not got[1, :97].isfinite().any()
    assert torch.equal(got[::2], want[::2])


def test_a_row_of_minus_infinities_is_not_finite() -> None:
    logits, classes, weights = some(2, 40)
    logits[1] = float("-inf")
    sums = log_sums(logits)
    assert sums.isfinite().tolist() == [True, False]
    assert not logit_gradients(logits, sums, classes, weights)[1, :40].isfinite().any()
