"""The heads of the experiments: clipped sums against plain torch modules, one example at a time."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "experiments"))
from heads import Features, Head, clipped_sums, layer_shapes, train_head

from hush.models import scattering_head


def as_modules(weights: list[Tensor], channels: int, side: int, classes: int) -> nn.Module:
    """The shipped model with these matrices copied into its layers."""
    widths = tuple(w.shape[1] for w in weights[:-1])
    model = scattering_head(channels=channels, side=side, classes=classes, widths=widths, groups=1).double()
    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    with torch.no_grad():
        for layer, weight in zip(layers, weights, strict=True):
            layer.weight.copy_(weight[:-1].T.reshape(layer.weight.shape))
            assert layer.bias is not None
            layer.bias.copy_(weight[-1])
    return nn.Sequential(*list(model.children())[1:])  # without the norm of the features, which is computed once


@pytest.mark.parametrize("widths", [(), (4, 5)])
@pytest.mark.parametrize("views", [1, 3])
def test_clipped_sums_equal_a_loop_over_the_shipped_model(widths: tuple[int, ...], views: int) -> None:
    g = torch.Generator().manual_seed(6)
    channels, side, classes, examples = 3, 7, 4, 6
    x = torch.randn(examples, views, channels, side, side, generator=g, dtype=torch.float64)
    y = torch.randint(classes, (examples,), generator=g)
    shapes = layer_shapes(channels, side, classes, widths)
    weights = [torch.randn(s, generator=g, dtype=torch.float64) / s[0] ** 0.5 for s in shapes]
    present = torch.tensor([1, 1, 0, 1, 1, 1.0], dtype=torch.float64)
    clip = 2.0
    ours = clipped_sums(x, y, weights, clip, present)
    model = as_modules(weights, channels, side, classes)
    totals = [torch.zeros_like(p) for p in model.parameters()]
    clipped = 0
    for k in range(examples):
        if not present[k]:
            continue
        loss = F.cross_entropy(model(x[k]), y[k].expand(views))  # the mean over the views
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        norm = torch.sqrt(sum(grad.square().sum() for grad in gradients)).item()
        clipped += norm > clip
        for total, gradient in zip(totals, gradients, strict=True):
            total += gradient * min(1.0, clip / norm)
    assert clipped > 0
    for total, (weight, bias) in zip(ours, zip(totals[::2], totals[1::2], strict=True), strict=True):
        torch.testing.assert_close(total[:-1].T.reshape(weight.shape), weight, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(total[-1], bias, rtol=1e-9, atol=1e-12)


def test_learns() -> None:
    g = torch.Generator().manual_seed(1)
    centres = torch.randn(3, 4, 6, 6, generator=g)
    y = torch.randint(3, (300,), generator=g)
    x = (centres[y] + 0.3 * torch.randn(300, 4, 6, 6, generator=g))[None]
    features = Features(x, y, x[0, :90], y[:90])
    for widths in ((), (4, 4)):
        head = Head(steps=40, noise=0.5, clip=0.5, lot_size=100, rate=1.0, averaging=0.9, widths=widths)
        assert train_head(head, features, seed=5) > 0.9
        assert train_head(head, features, seed=5) == train_head(head, features, seed=5)
