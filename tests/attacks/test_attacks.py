"""Batches built to move the sum further than its bound says: each of them once did, or could have."""

import pytest
import torch
from support.finished import clipped_sum
from torch import Tensor, nn

from hush.clipping import FlatClip
from hush.gradients.layers import products


def norm(tensors) -> float:
    return float(sum(tensor.double().square().sum() for tensor in tensors.values())) ** 0.5


LAYERS = {
    "inner products of windows": (lambda: nn.Conv2d(64, 64, 3, padding=1, bias=False), (64, 6, 6), (64, 6, 6)),
    "kernels": (lambda: nn.Conv2d(4, 4, 3, bias=False), (4, 9, 9), (4, 7, 7)),
    "inner products of rows": (lambda: nn.Linear(200, 300, bias=False), (24, 200), (24, 300)),
    "products": (lambda: nn.Linear(48, 40, bias=False), (64, 48), (64, 40)),
    "one row": (lambda: nn.Linear(48, 40), (48,), (40,)),
}


@pytest.mark.parametrize(
    "sizes", [(1e-23, 1e17), (1e-22, 1e17), (1e-25, 1e18), (1e17, 1e-24), (1e-19, 1e19), (1.0, 1.0)]
)
@pytest.mark.parametrize("layer", LAYERS)
def test_squares_that_underflow_do_not_hide_a_gradient(layer: str, sizes: tuple[float, float]) -> None:
    """Tiny inputs and huge output gradients: the norm from inner products is zero, the gradient itself is not."""
    torch.manual_seed(0)
    build, inputs, outputs = LAYERS[layer]
    model = build()
    x, g = torch.rand(2, *inputs) * sizes[0], (torch.rand(2, *outputs) + 0.5) * sizes[1]
    losses = (model(x) * g).flatten(1).sum(1)
    total = clipped_sum(losses, dict(model.named_parameters()), FlatClip(1e-6), mask=torch.tensor([True, False]))
    assert norm(total.tensors) <= 1e-6
    if sizes == (1.0, 1.0):
        assert norm(total.tensors) > 0.99e-6


@pytest.mark.parametrize("value", [5.0, -3.0, 0.5, float("nan"), 7])
def test_a_mask_says_who_counts_and_never_how_much(value: float) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    sums = []
    for mask in (torch.tensor([value, 0, value, 0]), torch.tensor([True, False, True, False])):
        losses = model(x).square().sum(1)
        sums.append(clipped_sum(losses, dict(model.named_parameters()), FlatClip(1e-2), mask=mask).tensors)
    assert all(torch.equal(sums[0][name], sums[1][name]) for name in sums[0])


@pytest.mark.parametrize("bound", [1e-2, 1e-4, 1e-6])
def test_scaled_gradients_too_small_for_float16_are_not_rounded_to_it(
    bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on the matrix units of a GPU: below 6e-5 float16 rounds to whole steps, up to twice the number itself."""
    monkeypatch.setattr(products, "on_matrix_units", lambda *tensors: True)
    model = nn.Linear(768, 1, bias=False).half()
    for size in torch.linspace(1, 40, 20):
        losses = model(torch.rand(1, 768).mul(size).half()).float().sum(1)
        total = clipped_sum(losses, dict(model.named_parameters()), FlatClip(bound))
        assert norm(total.tensors) <= bound


class TwoPrecisions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.single, self.double_ = nn.Linear(3, 4), nn.Linear(4, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.double_(torch.tanh(self.single(x)).double())


def test_one_layer_in_float64_does_not_make_the_others_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pieces of a batch are those of the widest rounding in the group."""
    model, seen = TwoPrecisions(), []
    monkeypatch.setattr("hush.gradients.sums.clipped.pieces_needed", lambda _, examples, dtype: seen.append(dtype) or 1)
    clipped_sum(model(torch.randn(256, 3)).square().sum(1), dict(model.named_parameters()), FlatClip(1.0))
    assert seen == [torch.float32]


def test_infinite_rows_of_one_example_touch_no_other() -> None:
    """In every rule at once: a sequence model with an embedding, norms, a convolution, some of it not finite."""
    torch.manual_seed(1)

    class Everything(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.norm = nn.Embedding(11, 24), nn.LayerNorm(24)
            self.mix, self.conv = nn.Linear(24, 40), nn.Conv1d(40, 16, 3)
            self.out = nn.Linear(16, 3)

        def forward(self, tokens: Tensor, scale: Tensor) -> Tensor:
            hidden = torch.tanh(self.mix(self.norm(self.words(tokens)) * scale[:, None, None]))
            return self.out(self.conv(hidden.transpose(1, 2)).mean(2)) * scale[:, None]

    model, tokens = Everything(), torch.randint(0, 11, (6, 8))
    params = dict(model.named_parameters())
    for bad in (float("inf"), float("nan"), 1e38):
        scale = torch.ones(6)
        scale[2] = bad
        total = clipped_sum(model(tokens, scale).square().sum(1), params, FlatClip(0.1)).tensors
        kept = torch.arange(6) != 2
        alone = clipped_sum(model(tokens, torch.ones(6)).square().sum(1), params, FlatClip(0.1), mask=kept).tensors
        assert all(torch.equal(total[name], alone[name]) for name in params)
