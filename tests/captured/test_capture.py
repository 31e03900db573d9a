"""Which updates may be captured in a CUDA graph, and what a captured region depends on."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

pytest.importorskip("triton")

from hush.captured.step import _capturable, _settings


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(3))]


def test_only_optimizers_whose_state_lies_on_the_device_are_captured() -> None:
    assert _capturable(torch.optim.SGD(parameters(), lr=0.1, momentum=0.9))
    assert _capturable(torch.optim.Adam(parameters(), capturable=True))
    assert not _capturable(torch.optim.Adam(parameters())), "its count of steps lies on the host"
    assert not _capturable(torch.optim.RMSprop(parameters()))

    class Own(torch.optim.SGD):
        pass

    assert not _capturable(Own(parameters(), lr=0.1)), "it may do more than is recorded"


def test_an_optimizer_with_code_around_its_step_is_not_captured() -> None:
    for register in ("register_step_pre_hook", "register_step_post_hook"):
        watched = torch.optim.SGD(parameters(), lr=0.1)
        getattr(watched, register)(lambda *_: None)
        assert not _capturable(watched), "a replay would not call its hooks"
    patched = torch.optim.SGD(parameters(), lr=0.1)
    patched.step = lambda closure=None: None  # type: ignore[method-assign]
    assert not _capturable(patched)
    scheduled = torch.optim.SGD(parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(scheduled, 5)
    assert "step" in vars(scheduled) and _capturable(scheduled), "a scheduler only counts calls"


@pytest.fixture
def hook_for_all() -> Iterator[None]:
    handle = torch_optimizer.register_optimizer_step_pre_hook(lambda *_: None)
    yield
    handle.remove()


def test_an_optimizer_under_a_global_hook_is_not_captured(hook_for_all: None) -> None:
    assert not _capturable(torch.optim.SGD(parameters(), lr=0.1))


def test_new_settings_are_seen() -> None:
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    before = _settings(optimizer)
    assert before == _settings(optimizer)
    optimizer.param_groups[0]["lr"] = 0.2
    assert before != _settings(optimizer)
    optimizer.param_groups[0]["lr"] = 0.1
    assert before == _settings(optimizer)
    optimizer.param_groups[0]["params"] = parameters()
    assert before != _settings(optimizer), "other parameters"
    optimizer = torch.optim.SGD(parameters(), lr=torch.tensor(0.1))
    before = _settings(optimizer)
    optimizer.param_groups[0]["lr"].fill_(0.2)
    assert before != _settings(optimizer), "a host tensor is a constant to a graph"
