"""Masks, gates and maxima as ordinary models have them: values change, but not whose a row is. Probed once."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hush.gradients import plan
from hush.gradients.clipped import squared_norms

pytestmark = pytest.mark.usefixtures("fresh_plans")
BATCH, LENGTH, WIDTH = 6, 5, 8


class Reader(nn.Module):
    """Words with padding, read by one of the usual ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.words = nn.Embedding(20, WIDTH)
        self.one, self.two, self.three = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        real, x = tokens > 3, self.words(tokens)
        if self.way == "mean":
            return self.one((x * real[:, :, None]).sum(1) / real.sum(1, keepdim=True).clamp(min=1))
        if self.way == "maximum":
            return self.one(torch.tanh(x).masked_fill(~real[:, :, None], -9.0).amax(1))
        if self.way == "attention":
            scores = self.one(x) @ self.two(x).transpose(1, 2)
            return (scores.masked_fill(~real[:, None], -1e9).softmax(2) @ self.three(x)).mean(1)
        if self.way == "swiglu":
            return self.three(F.silu(self.one(x)) * self.two(x)).mean(1)
        if self.way == "dropout":
            return self.two(F.dropout(torch.relu(self.one(x)), 0.5)).mean(1)
        share = self.one(x)[:, :, :2].softmax(2)  # each word goes to the better of two experts
        share = share * torch.zeros_like(share).scatter(2, share.argmax(2, keepdim=True), 1.0)
        return (share[:, :, :1] * self.two(x) + share[:, :, 1:2] * self.three(x)).mean(1)


@pytest.mark.parametrize("way", ["mean", "maximum", "attention", "swiglu", "dropout", "experts"])
def test_they_are_probed_once(way: str) -> None:
    model = Reader(way)
    used = torch.autograd.grad(model(torch.full((1, LENGTH), 9)).sum(), list(model.parameters()), allow_unused=True)
    params = {
        name: p for (name, p), gradient in zip(model.named_parameters(), used, strict=True) if gradient is not None
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            losses = model(torch.randint(0, 20, (BATCH, LENGTH))).square().sum(1)
            exact = [torch.autograd.grad(loss, model.words.weight, retain_graph=True)[0] for loss in losses]
            found = squared_norms(losses, params)["words.weight"]
            torch.testing.assert_close(found, torch.stack(exact).square().sum((1, 2)), rtol=1e-4, atol=1e-9)
    assert sum(map(len, plan._cache.values())) == 1
