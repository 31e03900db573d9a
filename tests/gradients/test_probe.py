"""Where the examples lie is found whatever the size of their gradients."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from hush.gradients import probe
from hush.gradients.clipped import squared_norms


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
        return hidden - self.share * hidden.mean(0) if self.share else hidden


class Leaking(nn.Module):
    """A part of each example goes to its neighbour, and no example is larger than another."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 32)
        self.share = share
        self.directions = torch.linalg.qr(torch.randn(32, 16))[0].t()

    def losses(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        return ((hidden + self.share * hidden.roll(1, 0)) * self.directions).sum(1)


@pytest.fixture(params=[0.0, 2.0**-9, 0.03])
def unsteady_passes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that differ from pass to pass by so much of themselves."""
    noise, steady = request.param, probe._gradients

    def unsteady(losses: Tensor, edges: object, weights: Tensor) -> list[Tensor | None]:
        found = steady(losses, edges, weights)  # type: ignore[arg-type]
        return [None if one is None else one * (1 + noise * torch.randn_like(one)) for one in found]

    monkeypatch.setattr(probe, "_gradients", unsteady)
    monkeypatch.setattr(probe, "_may_differ", lambda losses: True)


@pytest.mark.usefixtures("unsteady_passes", "fresh_plans")
@pytest.mark.parametrize("share", [0.0, 1.0, 0.5])
def test_mixing_is_refused_also_where_passes_differ(share: float) -> None:
    """Where two equal passes differ the probe tolerates more, and must still tell examples apart from their mixture."""
    torch.manual_seed(1)
    model = Mixing(share)
    losses = model(torch.randn(16, 6)).square().sum(1)
    if share == 0:
        norms = squared_norms(losses, dict(model.named_parameters()))
        assert all(bool(norm.isfinite().all()) for norm in norms.values())
    else:
        with pytest.raises(ValueError, match="cannot be told apart by example"):
            squared_norms(losses, dict(model.named_parameters()))


@pytest.mark.usefixtures("unsteady_passes", "fresh_plans")
@pytest.mark.parametrize("share", [0.05, 0.08, 0.12, 0.16, 0.3, 0.45, 0.6, -0.05, -0.12, -0.5])
def test_a_weak_mixture_with_one_neighbour_is_refused(share: float) -> None:
    """A twentieth of one other example is enough to be seen, with gradients that differ from pass to pass as well.

    The weights of two examples differ by up to 8, so that a share s of another shows as 7 s of a row.
    """
    torch.manual_seed(2)
    model = Leaking(share)
    losses = model.losses(torch.randn(16, 6))
    with pytest.raises(ValueError, match="cannot be told apart by example"):
        squared_norms(losses, dict(model.named_parameters()))


@pytest.mark.usefixtures("fresh_plans")
@pytest.mark.parametrize("noise", [0.0, 0.03])
@pytest.mark.parametrize("share", [0.0, 0.3])
def test_little_memory_changes_nothing(noise: float, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each edge by itself, a few numbers of its gradient at a time: the same findings, a pass more for each edge."""
    torch.manual_seed(3)
    model = Leaking(share)
    nodes: list[GradientEdge] = []
    steady, passes = probe._gradients, []

    def gradients(losses: Tensor, edges: Sequence[GradientEdge], weights: Tensor) -> list[Tensor | None]:
        passes.append(len(edges))
        generator = torch.Generator().manual_seed(len(passes))
        found = steady(losses, edges, weights)
        return [
            one if one is None else one * (1 + noise * torch.randn(one.shape, generator=generator)) for one in found
        ]

    monkeypatch.setattr(probe, "_gradients", gradients)
    monkeypatch.setattr(probe, "_may_differ", lambda losses: noise > 0)
    losses = model.losses(torch.randn(16, 6))
    node = losses.grad_fn
    while node is not None and node.next_functions:
        nodes.append(GradientEdge(node, 0))
        node = node.next_functions[0][0]
    monkeypatch.setattr(probe, "_free", lambda device: 1e9)
    at_once = probe.probe(losses, nodes)
    assert set(passes) == {len(nodes)}
    monkeypatch.setattr(probe, "_free", lambda device: 0.0)
    monkeypatch.setattr(probe, "_PIECE", 50)
    one_by_one = probe.probe(losses, nodes)
    assert passes[-1] == 1 and len(passes) == (len(nodes) + 1) * passes.count(len(nodes))
    assert one_by_one == at_once
    assert [finding.layout is None for finding in at_once].count(True) == (0 if share == 0 else 1)


def test_groups_fill_the_share_of_memory_that_they_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(10, 10, requires_grad=True)
    edges = [GradientEdge(x.exp().grad_fn, 0) for _ in range(5)]
    for free, want in ((0, [1] * 5), (8 * 800, [2, 2, 1]), (8 * 799, [1] * 5), (8 * 1200, [3, 2]), (1e9, [5])):
        monkeypatch.setattr(probe, "_free", lambda device, free=free: free)
        assert [len(group) for group in probe.in_groups(edges, x.device)] == want
    assert list(probe.in_groups([], x.device)) == []
