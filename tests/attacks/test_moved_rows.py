"""Rows that change their places from batch to batch: the plan of the first batch must not be used for the next."""

import pytest
import torch
from torch import Tensor, nn

from hush.gradients.clipped import squared_norms

pytestmark = [
    pytest.mark.usefixtures("fresh_plans", "any_memory"),
    pytest.mark.filterwarnings("ignore:where the examples lie"),
    pytest.mark.filterwarnings("ignore:no rule for parameters"),
]


def test_masks_of_several_dimensions_are_guarded() -> None:
    """Time comes first, a mask of times and examples picks rows: the same number of them, of other examples."""
    torch.manual_seed(0)
    one, two = nn.Linear(5, 5), nn.Linear(5, 5)
    params = dict(one.named_parameters(prefix="one")) | dict(two.named_parameters(prefix="two"))
    regular, other = torch.zeros(2, 6, 4, dtype=torch.bool)
    regular[:2] = True
    other[:, 0], other[0, 1], other[3, 2] = True, True, True
    for mask in (regular, other):
        hidden = torch.tanh(one(torch.randn(6, 4, 5)))
        picked = hidden.clone()
        picked[mask] = two(hidden[mask])
        losses = picked.square().sum((0, 2))
        exact = [torch.autograd.grad(loss, two.weight, retain_graph=True)[0].square().sum() for loss in losses]
        found = squared_norms(losses, params)["two.weight"]
        torch.testing.assert_close(found, torch.stack(exact), rtol=2e-5, atol=1e-9)


class Moved(torch.autograd.Function):
    """Puts rows where an index says, as libraries for mixtures of experts do."""

    @staticmethod
    def forward(ctx, hidden: Tensor, index: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(index)
        return hidden[index]

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        return torch.empty_like(gradient).index_copy(0, ctx.saved_tensors[0], gradient), None


def written(hidden: Tensor, index: Tensor) -> Tensor:
    out = torch.zeros_like(hidden)
    for place, row in zip(index.tolist(), hidden, strict=True):
        out[place] = row
    return out


MOVES = {
    "slices": written,
    "own function": Moved.apply,
    "negative dimension": lambda hidden, index: hidden[None].index_select(-2, index)[0],
    "negative dimension of a stack": lambda hidden, index: torch.stack([hidden, hidden]).index_select(-2, index)[1],
}


@pytest.mark.parametrize("move", MOVES)
def test_rows_that_move_are_followed(move: str) -> None:
    torch.manual_seed(0)
    model, last = nn.Linear(4, 3), nn.Linear(3, 1)
    params = dict(model.named_parameters(prefix="model")) | dict(last.named_parameters(prefix="last"))
    for index in (torch.arange(4), torch.tensor([1, 0, 3, 2])):
        data = torch.randn(4, 4) * torch.tensor([[9.0], [0.1], [1.0], [1.0]])
        losses = last(torch.tanh(MOVES[move](model(data), index))).square().sum(1)  # type: ignore[no-untyped-call]
        exact = [torch.autograd.grad(loss, model.weight, retain_graph=True)[0].square().sum() for loss in losses]
        found = squared_norms(losses, params)["model.weight"]
        torch.testing.assert_close(found, torch.stack(exact), rtol=2e-5, atol=1e-9)
