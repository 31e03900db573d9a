"""A function as one compiled graph: the same results, parameters seen as they are now, randomness left alone."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hush.gradients import FlatClip, clipped_sum
from hush.tracing import compiled


def sums_of(model: nn.Module) -> object:
    params = dict(model.named_parameters())

    def run(inputs: list[Tensor]) -> list[Tensor]:
        x, y, mask = inputs
        with torch.enable_grad():
            losses = F.cross_entropy(model(x), y, reduction="none")
        return list(clipped_sum(losses, params, FlatClip(0.1), mask=mask).tensors.values())

    return run


def batch() -> list[Tensor]:
    return [torch.randn(6, 5), torch.randint(0, 3, (6,)), torch.tensor([1, 1, 1, 0, 1, 1]).bool()]


def test_a_graph_that_draws_random_numbers_is_not_compiled() -> None:
    run = sums_of(nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.5), nn.Linear(4, 3)))
    run(batch())
    assert compiled(run, batch()) is run


def test_compiled_sums_follow_parameters_and_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph itself, not what Inductor makes of it: that takes a compiler, and half a minute."""
    monkeypatch.setattr(torch._inductor, "compile", lambda graph, inputs: lambda given: graph(given))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    run = sums_of(model)
    run(batch())
    fast = compiled(run, batch())
    for _ in range(3):
        given = batch()
        given[2] = torch.rand(6) < 0.5
        torch.testing.assert_close(fast(given), run(given), rtol=1e-6, atol=1e-7)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.3)


@pytest.mark.long
def test_inductor_gives_the_same_sums() -> None:
    torch.manual_seed(0)
    run = sums_of(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)))
    given = batch()
    want = run(given)
    torch.testing.assert_close(compiled(run, given)(given), want, rtol=1e-5, atol=1e-6)
