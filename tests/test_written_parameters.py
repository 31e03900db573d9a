"""Parameters change by private.step alone: a forward pass that writes into one carries data past clip and noise."""

import pytest
import torch
from torch import Tensor, nn

import hush


class Centred(nn.Module):
    """Keeps a mean of its inputs in a frozen parameter, for later."""

    def __init__(self, through_data: bool) -> None:
        super().__init__()
        self.layer, self.mean = nn.Linear(3, 2), nn.Parameter(torch.zeros(3), requires_grad=False)
        self.through_data = through_data

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            (self.mean.data if self.through_data else self.mean).lerp_(x.float().mean(0), 0.1)
        return self.layer(x)


def bounded_table() -> nn.Module:
    model = nn.Sequential(nn.Embedding(9, 4, max_norm=1.0), nn.Flatten(), nn.Linear(12, 2))
    with torch.no_grad():
        model[0].weight.mul_(5)
    return model


MODELS = {
    "max_norm": (bounded_table, torch.randint(0, 5, (40, 3))),
    "frozen": (lambda: Centred(False), torch.randn(40, 3) + 7),
}


def train(model: nn.Module, x: Tensor, **options: object) -> None:
    plan = hush.Plan(lots=hush.PoissonLots(40, 20), steps=2, clip=hush.FlatClip(1.0), noise_multiplier=1.0)
    private = hush.Private(model, plan, **options)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for lot in private.lots():
        for index in lot.batches(8):
            private.backward(model(x[index]).square().sum(1))
        private.step(optimizer)


@pytest.mark.parametrize("kind", MODELS)
def test_a_parameter_that_the_forward_pass_writes_is_refused(kind: str) -> None:
    """The rows of a table that are scaled down tell which words are in the data; a kept mean tells the data."""
    build, x = MODELS[kind]
    with pytest.raises(RuntimeError, match="was written between the start of the lot and backward"):
        train(build(), x)


@pytest.mark.parametrize("build, x", [*MODELS.values(), (lambda: Centred(True), torch.randn(40, 3))])
def test_the_check_finds_it_and_leaves_the_model_as_it_was(build, x: Tensor) -> None:
    model = build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match="was written between"):
        hush.check(model, lambda x: model(x).square().sum(1), x[:8])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_frozen_parameter_may_be_declared_public() -> None:
    train(Centred(False), torch.randn(40, 3), public_buffers=("mean",))


def test_weights_may_be_changed_between_lots() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2), torch.randn(40, 3)
    plan = hush.Plan(lots=hush.PoissonLots(40, 20), steps=3, clip=hush.FlatClip(1.0), noise_multiplier=1.0)
    private, optimizer = hush.Private(model, plan), torch.optim.SGD(model.parameters(), lr=0.1)
    for lot in private.lots():
        for index in lot.batches(8):
            private.backward(model(x[index]).square().sum(1))
        private.step(optimizer)
        with torch.no_grad():
            model.weight.clamp_(-1, 1)
    assert private.steps_done == 3
