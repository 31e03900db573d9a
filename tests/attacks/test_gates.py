"""What a plan must not take for granted: that a closed gate stays closed, that zeros stay where they were."""

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracles import gradients as oracle
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from hush.clipping import FlatClip
from hush.gradients import plan, probe
from hush.gradients.clipped import clipped_sum, squared_norms

pytestmark = [
    pytest.mark.usefixtures("fresh_plans", "any_memory"),
    pytest.mark.filterwarnings("ignore:where the examples lie"),
    pytest.mark.filterwarnings("ignore:index_reduce"),
    pytest.mark.filterwarnings("ignore:no rule for parameters"),
]


class Gated(nn.Module):
    """Adds something of the batch's mean to each example, through a gate that is closed at first."""

    def __init__(self, gate: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)
        self.gate = gate
        if gate in ("weight", "autocast"):
            self.closed = nn.Linear(5, 5, bias=False)
            nn.init.zeros_(self.closed.weight)
        elif gate == "columns":
            self.closed = nn.Linear(10, 5, bias=False)
            with torch.no_grad():
                self.closed.weight[:, 5:] = 0
        elif gate == "weight norm":
            self.closed = weight_norm(nn.Linear(5, 5, bias=False))
            nn.init.zeros_(self.closed.parametrizations.weight.original0)  # type: ignore[union-attr, arg-type]
        else:
            self.scale = nn.Parameter(torch.full((5,), 1e-6) if gate == "tiny" else torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        mean = hidden.mean(0).expand_as(hidden)
        if self.gate == "columns":
            return self.last(hidden + self.closed(torch.cat([hidden, mean], 1)))
        if hasattr(self, "closed"):
            return self.last(hidden + self.closed(mean))
        return self.last(hidden + (self.scale.tanh() if self.gate == "tanh" else self.scale) * mean)


@pytest.mark.parametrize("gate", ["weight", "columns", "weight norm", "autocast", "scale", "tanh", "tiny"])
def test_mixing_behind_a_closed_gate_is_refused_before_the_first_step(gate: str) -> None:
    """A weight of zero lets no gradient through, but its own gradient already holds all other examples."""
    model = Gated(gate)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.autocast("cpu", torch.bfloat16, enabled=gate == "autocast"):
        losses = model(torch.randn(6, 4)).float().square().sum(1)
    with pytest.raises(ValueError, match="cannot be told apart by example"):
        clipped_sum(losses, dict(model.named_parameters()), FlatClip(1.0))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_weights_and_the_random_numbers_are_untouched() -> None:
    """Gates are opened for the probe alone: what comes out belongs to the weights as they are."""
    torch.manual_seed(0)
    model, data = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2), nn.Linear(2, 2)), torch.randn(5, 4)
    with torch.no_grad():
        model[2].weight.zero_()
        model[2].weight[0, 0] = 1e-9
    before = {name: value.clone() for name, value in model.state_dict().items()}
    versions = [parameter._version for parameter in model.parameters()]

    def losses(m: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return (m(batch[0]) - 1).square().sum(1)

    state = torch.get_rng_state()
    ours = squared_norms(losses(model, (data,)), dict(model.named_parameters()))
    assert torch.equal(state, torch.get_rng_state())
    assert versions == [parameter._version for parameter in model.parameters()]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for name, exact in oracle.squared_norms(oracle.per_example_gradients(model, (data,), losses)).items():
        torch.testing.assert_close(ours[name].double(), exact, rtol=2e-5, atol=1e-24)


def test_a_layer_without_outputs_is_left_alone() -> None:
    params = {"some": torch.randn(3, 4, requires_grad=True), "none": torch.empty(0, 4, requires_grad=True)}
    data = torch.randn(5, 4)
    losses = F.linear(data, params["some"]).square().sum(1) + F.linear(data, params["none"]).sum(1)
    assert squared_norms(losses, params)["none"].tolist() == [0.0] * 5


def mixed_up(hidden: Tensor, share: float) -> Tensor:
    return (1 - share) * hidden + share * hidden.flip(0)


def chosen(hidden: Tensor, share: float) -> Tensor:
    return torch.where(torch.arange(len(hidden))[:, None] >= share * len(hidden), hidden, hidden.flip(0))


def added(hidden: Tensor, share: float) -> Tensor:
    return torch.add(hidden, hidden.mean(0), alpha=share)


@pytest.mark.parametrize("mix", [mixed_up, chosen, added])
def test_a_share_that_is_zero_at_first_is_seen_when_it_is_not(mix) -> None:
    """Mixup with probability one half, a schedule that starts at zero: no plan of such a batch is kept."""
    model, data = nn.Linear(4, 3), torch.randn(6, 4)
    params = dict(model.named_parameters())
    alone = squared_norms(torch.tanh(model(data)).square().sum(1), params)
    unmixed = squared_norms(mix(torch.tanh(model(data)), 0.0).square().sum(1), params)
    torch.testing.assert_close(unmixed, alone)
    with pytest.raises(ValueError, match="cannot be told apart by example"):
        squared_norms(mix(torch.tanh(model(data)), 0.5).square().sum(1), params)


def one_hot(owner: Tensor) -> Tensor:
    return F.one_hot(owner, 3).float().t()


def attended(hidden: Tensor, owner: Tensor) -> Tensor:
    same = (owner[:, None] == owner)[None]
    return F.scaled_dot_product_attention(hidden[None], hidden[None], hidden[None], attn_mask=same)[0]


def looped(pick):  # type: ignore[no-untyped-def]
    return lambda hidden, owner: torch.stack([pick(hidden, owner == i) for i in range(3)])


def chosen_rows(hidden: Tensor, mine: Tensor) -> Tensor:
    return torch.where(mine[:, None], hidden, 0.0).sum(0)


POOLS = {
    "loop of masks": looped(lambda hidden, mine: (hidden * mine[:, None]).sum(0)),
    "loop of float masks": looped(lambda hidden, mine: (hidden * mine[:, None].float()).sum(0)),
    "loop of whole masks": looped(lambda hidden, mine: (hidden * mine[:, None].long()).sum(0)),
    "loop of choices": looped(chosen_rows),
    "loop of filled rows": looped(lambda hidden, mine: hidden.masked_fill(~mine[:, None], 0.0).sum(0)),
    "loop of rows": looped(lambda hidden, mine: hidden[mine].sum(0)),
    "loop of maxima": looped(lambda hidden, mine: torch.where(mine[:, None], hidden, -9.0).amax(0)),
    "repeated": lambda hidden, owner: (hidden.repeat(3, 1, 1) * (owner == torch.arange(3)[:, None])[:, :, None]).sum(1),
    "product": lambda hidden, owner: one_hot(owner) @ hidden,
    "einsum": lambda hidden, owner: torch.einsum("br,rd->bd", one_hot(owner), hidden),
    "columns": lambda hidden, owner: (hidden.t() @ one_hot(owner).t()).t(),
    "vector": lambda hidden, owner: (one_hot(owner) @ hidden.sum(1))[:, None],
    "sparse product": lambda hidden, owner: torch.sparse.mm(one_hot(owner).to_sparse(), hidden),
    "mask": lambda hidden, owner: (one_hot(owner)[:, :, None] * hidden).sum(1),
    "segments": lambda hidden, owner: torch.segment_reduce(hidden, "sum", lengths=owner.bincount(), axis=0),
    "bags": lambda hidden, owner: F.embedding_bag(
        torch.arange(9), hidden, torch.searchsorted(owner, torch.arange(3)), mode="sum"
    ),
    "reduction": lambda hidden, owner: torch.zeros(3, 3).index_reduce(0, owner, hidden, "mean", include_self=False),
    "attention": lambda hidden, owner: one_hot(owner) @ attended(hidden, owner),
}


@pytest.mark.parametrize("pool", POOLS)
def test_rows_that_values_give_to_examples_are_probed_each_time(pool: str) -> None:
    """Graphs in one batch, sentences in one row: equal shapes, the first batch looks regular, the next one is not."""
    torch.manual_seed(0)
    model, data = nn.Linear(4, 3), torch.randn(9, 4)
    params = dict(model.named_parameters())
    for counts in ([3, 3, 3], [2, 4, 3], [1, 1, 7]):
        owner = torch.arange(3).repeat_interleave(torch.tensor(counts))
        losses = POOLS[pool](torch.tanh(model(data)), owner).square().sum(1)
        exact = [torch.autograd.grad(loss, model.weight, retain_graph=True)[0].square().sum() for loss in losses]
        torch.testing.assert_close(squared_norms(losses, params)["weight"], torch.stack(exact), rtol=2e-5, atol=1e-9)


def test_strides_are_part_of_the_key() -> None:
    model, data = nn.Linear(4, 1), torch.randn(9, 4)
    for strides in ((3, 1), (1, 3)):
        losses = model(data)[:, 0].as_strided((3, 3), strides).square().sum(1)
        exact = [torch.autograd.grad(loss, model.weight, retain_graph=True)[0].square().sum() for loss in losses]
        ours = squared_norms(losses, dict(model.named_parameters()))["weight"]
        torch.testing.assert_close(ours, torch.stack(exact), rtol=2e-5, atol=1e-9)


@pytest.mark.parametrize("first", [True, False])
def test_ordinary_attention_is_probed_once(first: bool) -> None:
    model = nn.MultiheadAttention(4, 2, batch_first=first)
    params = dict(model.named_parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            x = torch.randn(5, 7, 4) if first else torch.randn(7, 5, 4)
            squared_norms(model(x, x, x)[0].square().sum((1, 2) if first else (0, 2)), params)
    assert sum(map(len, plan._cache.values())) == 1


class Beside(nn.Module):
    """A branch that starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
        nn.init.zeros_(self.two.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(torch.relu(self.one(x)))


def test_casts_of_opened_weights_are_not_kept() -> None:
    """A checkpointed part runs again inside the probe, and autocast remembers what it cast."""
    torch.manual_seed(0)
    model, data = nn.Sequential(nn.Linear(6, 6), Beside(), nn.Linear(6, 1)), torch.randn(4, 6)
    found = []
    for _ in range(2):  # the first batch is probed, the second is not
        with torch.autocast("cpu", torch.bfloat16):
            hidden = checkpoint(model[1], model[0](data), use_reentrant=False)
            losses = model[2](hidden).squeeze(1).float().square()
        with torch.autocast("cpu", torch.bfloat16):
            found.append(squared_norms(losses, dict(model.named_parameters())))
    for name, first in found[0].items():
        assert torch.equal(first, found[1][name]), name


def test_nodes_that_no_gradient_reaches_are_found_whatever_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    first, dead, last = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)
    found: list[set[int]] = []
    look = plan.silent

    def twice(*asked: Any) -> set[int]:
        for free in (1e12, 0.0):
            monkeypatch.setattr(probe, "_free", lambda device, free=free: free)
            found.append(look(*asked))
        return found[-1]

    monkeypatch.setattr(plan, "silent", twice)
    hidden = torch.tanh(first(torch.randn(6, 4)))
    losses = last(hidden + torch.relu(dead(hidden) - 100)).square().sum(1)
    params = dict(nn.ModuleDict({"first": first, "dead": dead, "last": last}).named_parameters())
    assert not any(
        tensor.any() for name, tensor in clipped_sum(losses, params, FlatClip(1.0)).tensors.items() if "dead" in name
    )
    assert found[0] == found[1] and len(found[0]) >= 2, "what subtracts 100, and the layer before it"
