"""The quick look at a model between lots sees everything that the thorough one would."""

from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import nn

from hush.checks.guards import Guard
from hush.sampling.batches import first_rows, padded, whole


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3).eval(), nn.Dropout(0.5), nn.Linear(3, 1))


def swap_parameter(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())


def swap_child(model: nn.Sequential) -> None:
    model[3] = nn.Linear(3, 1)


def swap_buffer(model: nn.Sequential) -> None:
    model[1].running_mean = model[1].running_mean.clone()


def move_buffer(model: nn.Sequential) -> None:
    model[1].running_mean.data = model[1].running_mean.clone()


def add_child(model: nn.Sequential) -> None:
    model.append(nn.Linear(1, 1))


def rename(model: nn.Sequential) -> None:
    weight, bias = model[0]._parameters.pop("weight"), model[0]._parameters.pop("bias")
    model[0].register_parameter("other", weight)
    model[0].register_parameter("bias", bias)


def change_class(model: nn.Sequential) -> None:
    class Other(nn.Linear):
        pass

    model[0].__class__ = Other


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "frozen": lambda model: model[0].weight.requires_grad_(False),
    "mode": lambda model: model[2].eval(),
    "forward hook": lambda model: model[0].register_forward_hook(lambda *_: None),
    "forward pre-hook": lambda model: model[0].register_forward_pre_hook(lambda *_: None),
    "parameter": swap_parameter,
    "child": swap_child,
    "buffer": swap_buffer,
    "buffer's memory": move_buffer,
    "more children": add_child,
    "name": rename,
    "class": change_class,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_every_change_of_the_model_is_another_state(change: Callable[[nn.Sequential], object]) -> None:
    model = network()
    guard = Guard(model)
    guard.begin_lot()
    before = guard.state()
    assert guard.begin_lot() is guard.begin_lot() and guard.state() == before, "nothing changed"
    change(model)
    found = guard.begin_lot()
    assert guard.state() != before
    assert found == {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert all(found[name] is p for name, p in model.named_parameters() if p.requires_grad)


def test_modules_that_a_quick_look_cannot_read_are_new_in_every_lot() -> None:
    model = network()
    model[0]._parameters = OrderedDict(model[0]._parameters)  # as in models saved by old versions of PyTorch
    guard = Guard(model)
    states = [(guard.begin_lot(), guard.state())[1] for _ in range(3)]
    assert len(set(states)) == 3


def test_a_model_that_looks_the_same_again_is_the_same() -> None:
    model = network()
    guard = Guard(model)
    guard.begin_lot()
    before = guard.state()
    model.eval()
    model[0].train(), model[2].train(), model[3].train(), model.__setattr__("training", True)
    guard.begin_lot()
    assert guard.state() == before


def test_layers_that_mix_are_refused_in_every_lot() -> None:
    model = network()
    guard = Guard(model)
    guard.begin_lot()
    guard.begin_lot()
    model[1].train()
    with pytest.raises(RuntimeError, match="BatchNorm1d at '1' is in training mode"):
        guard.begin_lot()
    with pytest.raises(RuntimeError, match="BatchNorm1d at '1' is in training mode"):
        guard.begin_lot()
    model[1].eval()
    guard.begin_lot()
    model[1].track_running_stats = False  # no flag that the quick look compares
    with pytest.raises(RuntimeError, match="BatchNorm1d at '1' is in training mode"):
        guard.begin_lot()


@pytest.mark.parametrize("public", [False, True])
def test_a_buffer_that_changes_between_lots_is_refused_unless_it_is_declared(public: bool) -> None:
    model = network()
    guard = Guard(model, ("1.running_*",) if public else ())
    guard.begin_lot()
    model[1].running_mean.add_(1)
    if public:
        guard.begin_lot(1)
        guard.must_hold_nothing_new()
        return
    with pytest.raises(RuntimeError, match=r"'1.running_mean' of BatchNorm1d was changed during the run"):
        guard.begin_lot(1)


def test_what_is_written_without_a_trace_is_seen_at_lots_1_2_4_8_and_when_the_state_is_saved() -> None:
    model, found = network(), []
    model[0].bias.requires_grad_(False)
    guard = Guard(model)
    for step in range(5):
        guard.begin_lot(step)
    model[0].bias.data.add_(1)
    for step in range(5, 9):
        try:
            guard.begin_lot(step)
        except RuntimeError:
            found.append(step)
    assert found == [8]
    with pytest.raises(RuntimeError, match=r"'0.bias' of Linear was changed during the run"):
        guard.must_hold_nothing_new()


def test_rows_of_a_buffer_that_change_places_are_seen() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_buffer("bank", torch.arange(6.0).view(3, 2))
    guard = Guard(model)
    guard.begin_lot()
    model.bank.data = model.bank.flip(0)
    with pytest.raises(RuntimeError, match="'bank' of Sequential was changed"):
        guard.must_hold_nothing_new()


def test_a_forward_pass_that_writes_into_a_buffer_is_refused() -> None:
    model = network()
    guard = Guard(model)
    guard.begin_lot()
    model[1].running_mean.add_(1)
    with pytest.raises(RuntimeError, match=r"buffer '1.running_mean' of BatchNorm1d was changed"):
        guard.after_forward()


def test_a_parameter_that_is_frozen_again_after_it_was_trained_is_no_stranger() -> None:
    model = network()
    guard = Guard(model)
    for frozen in (True, False, True, False):
        model[0].weight.requires_grad_(not frozen)
        guard.begin_lot()
        with torch.no_grad():
            for p in guard.begin_lot().values():
                p.add_(1)  # a step
    guard.must_hold_nothing_new()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripted_and_shared_modules_are_looked_at_too() -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    scripted = nn.Sequential(nn.Linear(3, 3), torch.jit.script(Inside()))
    guard = Guard(scripted)
    assert set(guard.begin_lot()) == {"0.weight", "0.bias", "1.weight"}
    before = guard.state()
    guard.begin_lot()
    assert guard.state() == before
    scripted[1].weight.requires_grad_(False)
    assert set(guard.begin_lot()) == {"0.weight", "0.bias"} and guard.state() != before
    scripted[0] = torch.jit.script(Inside())
    assert set(guard.begin_lot()) == {"0.weight"}
    later = nn.Sequential(nn.Linear(3, 3))
    guard = Guard(later)
    guard.begin_lot()
    later.append(torch.jit.script(Inside()))
    assert set(guard.begin_lot()) == {"0.weight", "0.bias", "1.weight"}
    later[1].weight.requires_grad_(False)
    assert set(guard.begin_lot()) == {"0.weight", "0.bias"}
    layer = nn.Linear(2, 2)
    shared = nn.Sequential(layer, nn.ReLU(), layer)
    guard = Guard(shared)
    guard.begin_lot()
    layer.bias.requires_grad_(False)
    assert set(guard.begin_lot()) == {"0.weight"}


# Masks -----------------------------------------------------------------------------------------------------------


def test_masks_are_windows_that_nobody_can_write_into() -> None:
    for filled in range(6):
        assert first_rows(filled, 5).tolist() == [row < filled for row in range(5)]
    (batch,) = padded([torch.tensor([7, 3])], 5)
    assert batch.index.tolist() == [7, 3, 7, 7, 7] and len(batch) == 5 and batch.alone
    batch.mask[:] = True
    cpu = torch.device("cpu")
    assert batch.mask.tolist() == [True, True, False, False, False], "padding never counts"
    assert torch.equal(batch.counting(cpu), batch.mask)  # type: ignore[arg-type]
    (plain,) = whole([torch.tensor([7, 3])], 5)
    assert plain.mask.tolist() == [True, True] and plain.counting(cpu) is None and plain.size == 5
