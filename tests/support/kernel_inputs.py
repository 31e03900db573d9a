"""What tests of the kernels for linear layers have in common: where they run, half precision numbers, comparisons."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from hush.clipping import FlatClip
from support.finished import clipped_sum

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.float16  # the interpreter multiplies no bfloat16


def halves(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(HALF)


def per_example(inputs: Tensor, gradients: Tensor) -> Tensor:
    """[batch, j, i] in float64: the gradients of a linear layer, one example at a time."""
    return torch.stack([g.double().t() @ x.double() for x, g in zip(inputs, gradients, strict=True)])


def compare_clipped_sums(model: nn.Module, x: Tensor, use_kernels: Callable[[], None]) -> None:
    """Clipped sums of five examples are the same with the kernels as without; no example alone is above the bound."""
    model.to(DEVICE, HALF)
    params = dict(model.named_parameters())

    def total(mask: Tensor) -> dict[str, Tensor]:
        losses = model(x).float().square().sum(1) * 4096
        return dict(clipped_sum(losses, params, FlatClip(0.01), mask=mask).tensors)

    some = torch.tensor([1, 1, 0, 1, 1], device=DEVICE).bool()
    want = total(some)
    use_kernels()
    got = total(some)
    for name in params:
        torch.testing.assert_close(got[name], want[name], rtol=2e-3, atol=2e-5)
    for one in range(5):
        alone = total(torch.arange(5, device=DEVICE) == one)
        assert sum(float(t.double().square().sum()) for t in alone.values()) <= 0.01**2
