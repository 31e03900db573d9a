"""Where the examples lie is found whatever the size of their gradients."""

import pytest
import torch
from torch import Tensor, nn

from hush.gradients import probe, squared_norms


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


class Mixing(nn.Module):
    """Two layers; what reaches the second is the example's own, or also a part of all others."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 5)
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(torch.tanh(self.first(x)))
        return hidden - self.share * hidden.mean(0)


@pytest.mark.parametrize("noise", [0.0, 2.0**-9, 0.03])
@pytest.mark.parametrize("share", [0.0, 1.0, 0.5])
def test_mixing_is_refused_also_where_passes_differ(
    share: float, noise: float, monkeypatch: pytest.MonkeyPatch, fresh_plans: None
) -> None:
    """Where two equal passes differ the probe tolerates more, and must still tell examples apart from their mixture."""
    torch.manual_seed(1)
    steady = probe._gradients

    def unsteady(losses: Tensor, edges: object, weights: Tensor) -> list[Tensor | None]:
        found = steady(losses, edges, weights)  # type: ignore[arg-type]
        return [None if one is None else one * (1 + noise * torch.randn_like(one)) for one in found]

    monkeypatch.setattr(probe, "_gradients", unsteady)
    monkeypatch.setattr(probe, "_may_differ", lambda losses: True)
    model = Mixing(share)
    losses = model(torch.randn(16, 6)).square().sum(1)
    if share == 0:
        norms = squared_norms(losses, dict(model.named_parameters()))
        assert all(bool(norm.isfinite().all()) for norm in norms.values())
    else:
        with pytest.raises(ValueError, match="cannot be told apart by example"):
            squared_norms(losses, dict(model.named_parameters()))
