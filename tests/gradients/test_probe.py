"""Where the examples lie is found whatever the size of their gradients."""

import pytest
import torch
from torch import Tensor, nn

from hush.gradients import squared_norms


@pytest.mark.filterwarnings("ignore:where the examples lie")  # the next batch is probed again
def test_gradients_near_underflow_are_told_apart(fresh_plans: None) -> None:
    """Scaling by a power of two rounds among the smallest numbers of fp32; such rows must not count as mixed."""
    torch.manual_seed(0)
    first, second = nn.Linear(3, 4), nn.Linear(4, 1)
    x = torch.randn(5, 3)
    sizes = torch.tensor([1.0, 3e-43, 0.5, 2e-44, 7e-42])

    def losses() -> Tensor:
        return second(first(x))[:, 0] * sizes

    norms = squared_norms(losses(), dict(nn.ModuleDict({"a": first, "b": second}).named_parameters()))
    torch.testing.assert_close(norms["b.bias"], sizes.square(), rtol=1e-5, atol=1e-30)
    expected = (second.weight.norm() * sizes).square() * x.square().sum(1)
    torch.testing.assert_close(norms["a.weight"], expected.detach(), rtol=1e-5, atol=1e-27)
