"""The networks: sizes counted by hand, initial weights, no mixing of examples."""

import math

import pytest
import torch
from torch import nn

from hush.recipes.networks import WideResNet, paper_cifar10, paper_mnist, scattering_head


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_sizes_counted_by_hand() -> None:
    assert count(paper_mnist(inputs=60)) == 60 * 1000 + 1000 * 10
    assert count(paper_cifar10()) == (75 * 64 + 64) + (1600 * 64 + 64) + (2304 * 384 + 384) + (384 * 384 + 384) + 3850
    assert count(scattering_head()) == 81 * 49 * 10 + 10
    assert count(scattering_head(widths=(32, 16))) == (81 * 9 * 32 + 32) + (32 * 9 * 16 + 16) + (16 * 9 * 10 + 10)
    # WRN-16-4 has 2.75 million weights with batch norm (Zagoruyko and Komodakis 2016, table 5: 2.8 M for 16-4)
    assert 2.70e6 < count(WideResNet(depth=16, width=4)) < 2.80e6


def test_initial_weights_are_those_asked_for() -> None:
    model = paper_mnist(gain=(0.5, 2.0), generator=torch.Generator().manual_seed(0))
    first, last = (m.weight for m in model if isinstance(m, nn.Linear))
    assert abs(first.std().item() * math.sqrt(60) / 0.5 - 1) < 0.02
    assert abs(last.std().item() * math.sqrt(1000) / 2.0 - 1) < 0.04
    again = paper_mnist(gain=(0.5, 2.0), generator=torch.Generator().manual_seed(0))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert scattering_head(widths=(4, 4))[-1].weight.abs().max() == 0


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (paper_mnist(), (60,)),
        (paper_cifar10(), (3, 24, 24)),
        (scattering_head(widths=(8, 8)), (81, 7, 7)),
        (WideResNet(depth=10, width=1), (3, 32, 32)),
    ],
    ids=["paper_mnist", "paper_cifar10", "scattering_head", "wide_resnet"],
)
def test_examples_do_not_mix_and_no_state_changes(model: nn.Module, shape: tuple[int, ...]) -> None:
    g = torch.Generator().manual_seed(1)
    model.train()
    if isinstance(last := list(model.modules())[-1], nn.Linear):
        nn.init.normal_(last.weight, generator=g)
    x = torch.randn(3, *shape, generator=g, requires_grad=True)
    buffers = [b.clone() for b in model.buffers()]
    (gradient,) = torch.autograd.grad(model(x)[1].sum(), x)
    assert gradient[[0, 2]].abs().max() == 0 and gradient[1].abs().max() > 0
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), buffers, strict=True))


def test_wrong_depth_is_refused() -> None:
    with pytest.raises(ValueError, match="6 n \\+ 4"):
        WideResNet(depth=15)
