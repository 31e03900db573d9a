"""Parameters change by private.step alone: a forward pass that writes into one carries data past clip and noise."""

import pytest
import torch
from torch import Tensor, nn

import hush


def losses_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum(1)


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
    plan = hush.Plan(
        lots=hush.PoissonLots(examples=40, lot_size=20), steps=2, clip=hush.FlatClip(1.0), noise_multiplier=1.0
    )
    private = hush.Private(model, plan, losses_of, **options)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for lot in private.lots():
        for batch in lot.batches(8):
            private.add(batch, x[batch.index])
        private.step(optimizer)


@pytest.mark.parametrize("kind", MODELS)
def test_a_parameter_that_the_forward_pass_writes_is_refused(kind: str) -> None:
    """The rows of a table that are scaled down tell which words are in the data; a kept mean tells the data."""
    build, x = MODELS[kind]
    with pytest.raises((RuntimeError, ValueError), match="was written between the start of the lot"):
        train(build(), x)


class Secretly(nn.Module):
    """Keeps something of its inputs where version counters do not see it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer, self.way = nn.Linear(3, 2), way
        self.register_buffer("kept", torch.zeros(3))
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        if self.way == "buffer.data":
            self.kept.data.add_(mean)
        elif self.way == "another buffer.data":
            self.kept.data = self.kept + mean
        elif self.way == "numpy":
            self.kept.numpy()[:] = mean.numpy()
        elif self.way == "parameter.data":
            self.frozen.data.copy_(mean)
        elif self.way == "weight.data":
            self.layer.weight.data.add_(mean)
        elif not hasattr(self, "new"):
            self.register_buffer("new", mean)
        return self.layer(x)


@pytest.mark.parametrize(
    "way", ["buffer.data", "another buffer.data", "numpy", "parameter.data", "weight.data", "new buffer"]
)
def test_what_is_written_without_a_trace_is_seen_at_the_first_batch(way: str) -> None:
    model, x = Secretly(way), torch.randn(40, 3) + 1
    plan = hush.Plan(
        lots=hush.PoissonLots(examples=40, lot_size=20), steps=2, clip=hush.FlatClip(1.0), noise_multiplier=1.0
    )
    with pytest.raises((RuntimeError, ValueError), match=r"changed by the forward pass|was written between"):
        hush.Private(model, plan, losses_of, data=x)
    assert not hasattr(model, "new") or way == "new buffer"


@pytest.mark.parametrize("way", ["buffer.data", "another buffer.data", "numpy", "parameter.data"])
def test_what_is_written_later_without_a_trace_is_seen_before_the_state_is_saved(way: str) -> None:
    model, x = Secretly("none yet"), torch.randn(40, 3) + 1
    model.register_buffer("new", torch.zeros(3))
    plan = hush.Plan(
        lots=hush.PoissonLots(examples=40, lot_size=20), steps=9, clip=hush.FlatClip(1.0), noise_multiplier=1.0
    )
    private, optimizer = hush.Private(model, plan, losses_of, data=x), torch.optim.SGD(model.layer.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="was changed"):
        for lot in private.lots():
            if lot.step == 3:
                model.way = way
            for batch in lot.batches(40):
                private.add(batch)
            private.step(optimizer)
    assert private.steps_done in (3, 4)
    if private.steps_done == 4:  # else it was seen in the forward pass itself, and the lot is still open
        with pytest.raises(RuntimeError, match="was changed during the run"):
            private.state_dict()


def test_weights_may_be_loaded_before_the_first_lot() -> None:
    model, x = Secretly("none"), torch.randn(40, 3)
    model.register_buffer("new", torch.zeros(3))
    plan = hush.Plan(
        lots=hush.PoissonLots(examples=40, lot_size=20), steps=2, clip=hush.FlatClip(1.0), noise_multiplier=1.0
    )
    private, optimizer = hush.Private(model, plan, losses_of), torch.optim.SGD(model.layer.parameters(), lr=0.1)
    model.layer.weight.data.mul_(3)
    for lot in private.lots():
        for batch in lot.batches(40):
            private.add(batch, x[batch.index])
        private.step(optimizer)
    assert private.steps_done == 2


@pytest.mark.parametrize("build, x", [*MODELS.values(), (lambda: Centred(True), torch.randn(40, 3))])
def test_the_check_finds_it_and_leaves_the_model_as_it_was(build, x: Tensor) -> None:
    model = build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match="was written between"):
        hush.check(model, losses_of, x[:8])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_frozen_parameter_may_be_declared_public() -> None:
    train(Centred(False), torch.randn(40, 3), public_buffers=("mean",))


def test_weights_may_be_changed_between_lots() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2), torch.randn(40, 3)
    plan = hush.Plan(
        lots=hush.PoissonLots(examples=40, lot_size=20), steps=3, clip=hush.FlatClip(1.0), noise_multiplier=1.0
    )
    private, optimizer = hush.Private(model, plan, losses_of), torch.optim.SGD(model.parameters(), lr=0.1)
    for lot in private.lots():
        for batch in lot.batches(8):
            private.add(batch, x[batch.index])
        private.step(optimizer)
        with torch.no_grad():
            model.weight.clamp_(-1, 1)
    assert private.steps_done == 3
