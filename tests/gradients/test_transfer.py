"""Plans are carried over to other batch sizes only where every size follows from two that were probed."""

import pytest
import torch
from oracles import gradients as oracle
from oracles.models import CASES
from torch import Tensor, nn

from hush.gradients import plan
from hush.gradients.clipped import squared_norms
from hush.gradients.transfer import follows


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch, fresh_plans: None) -> list[int]:
    """The batch sizes that were probed."""
    sizes: list[int] = []
    real = plan._make
    monkeypatch.setattr(plan, "_make", lambda graph, losses: sizes.append(graph.batch) or real(graph, losses))
    return sizes


def norms_at(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    return squared_norms(model(x).square().flatten(1).sum(1), dict(model.named_parameters()))


def test_the_third_size_is_not_probed(probes: list[int]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    for batch in (4, 6, 7, 9, 4, 30):
        x = torch.randn(batch, 6, 3)
        found = norms_at(model, x)
        exact = oracle.per_example_gradients(model, (x,), lambda m, b: m(b[0]).square().flatten(1).sum(1))
        for name, value in oracle.squared_norms(exact).items():
            torch.testing.assert_close(found[name].double(), value, rtol=2e-5, atol=1e-9)
    assert probes == [4, 6]


def test_one_probed_size_is_not_enough(probes: list[int]) -> None:
    """With one size alone, a length that happens to equal the batch could be taken for it."""
    model = nn.Linear(3, 2)
    for batch in (4, 8):
        norms_at(model, torch.randn(batch, 4, 3))
    assert probes == [4, 8]


def test_another_length_is_probed(probes: list[int]) -> None:
    model = nn.Linear(3, 2)
    for batch, length in ((4, 5), (6, 5), (7, 5), (7, 9)):
        norms_at(model, torch.randn(batch, length, 3))
    assert probes == [4, 6, 7]


def test_numbers_follow_if_constant_or_proportional() -> None:
    assert follows((4, (8, 3)), (6, (12, 3)), 4, 6)
    assert not follows((4, (8, 3)), (6, (8 + 2, 3)), 4, 6)
    assert not follows((True, 4), (False, 6), 4, 6)
    assert not follows((4, 5), (6,), 4, 6)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_model_at_a_size_that_was_not_probed(case, fresh_plans: None) -> None:
    torch.manual_seed(1)
    model = case.build()
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    batch = case.batch()
    for size in (5, 3, 4):
        part = tuple(tensor[:size] for tensor in batch)
        found = squared_norms(case.losses(model, part), params)
    exact = oracle.squared_norms(oracle.per_example_gradients(model, part, case.losses))
    whole = sum(exact.values())
    for name, values in exact.items():
        scale = values + 1e-3 * whole
        torch.testing.assert_close(found[name].double() / scale, values / scale, rtol=0, atol=1e-5)
