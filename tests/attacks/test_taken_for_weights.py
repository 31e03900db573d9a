"""Data that looks like a weight: as many rows as examples, rows picked for all of them, rows of a weight by chance."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from hush.gradients.clipped import squared_norms

pytestmark = [
    pytest.mark.usefixtures("fresh_plans", "any_memory"),
    pytest.mark.filterwarnings("ignore:where the examples lie"),
    pytest.mark.filterwarnings("ignore:no rule for parameters"),
]


@pytest.mark.parametrize("size", [7, 8, 16])
@pytest.mark.parametrize("product", ["matrix", "vector", "bias"])
def test_mixing_is_refused_when_the_batch_is_as_large_as_the_input(size: int, product: str) -> None:
    """Eight features, eight examples: the first layer's output has the shape of its weight, and is none."""
    torch.manual_seed(0)
    weight = torch.randn(8, 1 if product == "vector" else 5, requires_grad=True)
    bias, data = torch.randn(weight.shape[1], requires_grad=True), torch.randn(size, 8)
    params = {"weight": weight} | ({"bias": bias} if product == "bias" else {})
    hidden = torch.addmm(bias, data, weight) if product == "bias" else data @ weight
    hidden = data @ weight[:, 0] if product == "vector" else hidden
    losses = (hidden - hidden.mean(0)).flatten(0).reshape(size, -1).sub(1).square().sum(1)
    with pytest.raises(ValueError, match="cannot be told apart by example"):
        squared_norms(losses, params)


def test_a_square_constant_that_changes_is_data() -> None:
    """A constant times a weight may be a fixed rotation, or a batch that is mixed by another constant afterwards."""
    torch.manual_seed(0)
    weight, mixing = torch.randn(8, 5, requires_grad=True), torch.softmax(torch.randn(8, 8), 1)
    rotation, data = torch.randn(8, 8), torch.randn(8, 8)
    for _ in range(2):
        fixed = squared_norms((data @ (rotation @ weight)).square().sum(1), {"weight": weight})
    assert fixed["weight"].shape == (8,)
    squared_norms((mixing @ (torch.randn(8, 8) @ weight)).sin().sum(1), {"weight": weight})
    with pytest.raises(ValueError, match="joins parameters with an index or a matrix that was another one"):
        squared_norms((mixing @ (torch.randn(8, 8) @ weight)).sin().sum(1), {"weight": weight})
    other = torch.randn(8, 5, requires_grad=True)  # another model has constants of its own
    squared_norms((data @ (torch.randn(8, 8) @ other)).square().sum(1), {"weight": other})


@pytest.mark.parametrize("size", [4, 6, 12])
def test_a_vector_of_fewer_examples_than_features_is_data(size: int) -> None:
    weight, mixing = torch.randn(8, requires_grad=True), torch.softmax(torch.randn(size, size), 1)
    with pytest.raises(ValueError, match="cannot be told apart by example"):
        squared_norms((mixing @ (torch.randn(size, 8) @ weight)).sin(), {"weight": weight})


@pytest.mark.parametrize("size", [8, 16])
def test_negatives_from_the_batch_are_refused(size: int) -> None:
    """Two towers: the loss of an example looks at the rows of all others, however they were picked."""
    users, items = torch.randn(20, 4, requires_grad=True), torch.randn(20, 4, requires_grad=True)
    one, two = torch.randint(20, (2, size))
    params, features = {"users": users, "items": items}, torch.randn(size, 4)
    for scores in (users[one] @ items[two].t(), users[one] @ items.index_select(0, two).t()):
        with pytest.raises(ValueError, match="cannot be told apart by example"):
            squared_norms(F.cross_entropy(scores, torch.arange(size), reduction="none"), params)
    with pytest.raises(ValueError, match="cannot be told apart by example"):
        losses = F.cross_entropy(features @ items[two].t(), torch.arange(size), reduction="none")
        squared_norms(losses, {"items": items})


def test_a_fixed_table_may_be_read_by_all_examples() -> None:
    """Relative positions: the same index for every batch and every size of it."""
    table, index, query = torch.randn(9, requires_grad=True), torch.randint(9, (6, 6)), torch.randn(4, 4)
    weight = query.requires_grad_()
    for size in (3, 6, 3, 2):
        scores = torch.tanh(torch.randn(size, 6, 4) @ weight) @ torch.randn(4, 6) + table[index]
        losses = scores.softmax(2).square().sum((1, 2))
        exact = [torch.autograd.grad(loss, table, retain_graph=True)[0].square().sum() for loss in losses]
        found = squared_norms(losses, {"table": table, "weight": weight})["table"]
        torch.testing.assert_close(found, torch.stack(exact), rtol=2e-5, atol=1e-9)


def masked(out: Tensor, first: bool) -> Tensor:
    return out * F.one_hot(torch.arange(4) if first else torch.zeros(4, dtype=torch.long), 4)


def rectified(out: Tensor, first: bool) -> Tensor:
    return torch.relu(out)


@pytest.mark.parametrize("choose", [masked, rectified])
def test_rows_of_a_weight_that_are_one_examples_each_by_chance(choose) -> None:  # type: ignore[no-untyped-def]
    """As many channels as examples, and each example looks at its own channel: the next batch does not."""
    torch.manual_seed(0)
    net = nn.Conv1d(4, 4, 1, bias=False)
    with torch.no_grad():
        net.weight.copy_(torch.eye(4)[:, :, None])
    weight_norm(net)
    params = dict(net.named_parameters())
    for first in (True, False):
        data = 2 * torch.eye(4) - 1 if first else torch.randn(4, 4) + 1
        losses = (choose(net(data[:, :, None])[:, :, 0], first).sum(1) - 3).square()
        exact = [
            sum(g.square().sum() for g in torch.autograd.grad(loss, list(params.values()), retain_graph=True))
            for loss in losses
        ]
        found = sum(squared_norms(losses, params).values())
        torch.testing.assert_close(found, torch.stack(exact), rtol=2e-5, atol=1e-9)  # type: ignore[arg-type]
