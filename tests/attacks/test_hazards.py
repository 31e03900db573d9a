"""Privacy bugs that happened to others: the engine must not have them, or must refuse."""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from oracles import gradients as oracle
from support.finished import clipped_sum, squared_norms
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hush.clipping import AutomaticClip, FlatClip, PerLayerClip
from hush.errors import MixedExamples
from hush.gradients.engine import Gradients


def mlp(inputs: int = 6) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 8), nn.ReLU(), nn.Linear(8, 3))


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: param for name, param in model.named_parameters() if param.requires_grad}


def squares(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return model(batch[0]).square().flatten(1).sum(1)


def of(model, data, clip, losses=squares, **options):
    return Gradients(lambda model, x: losses(model, (x,)), model).clipped_sum((data,), clip, **options)


def norm(tensors) -> float:
    return float(sum(tensor.double().square().sum() for tensor in tensors.values())) ** 0.5


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def test_hazard_05_requires_grad_toggled_between_steps():
    """Unfreezing a layer after the first step: its part is clipped too, or forgetting it is an error."""
    model, data = mlp(), torch.randn(4, 6) * 100
    model[0].requires_grad_(False)
    frozen = of(model, data, FlatClip(1.0))
    assert list(frozen.tensors) == ["2.weight", "2.bias"]
    model[0].requires_grad_(True)
    thawed = of(model, data[:1], FlatClip(1.0))
    assert 0.99 < norm(thawed.tensors) <= 1.0
    model[2].requires_grad_(False)
    assert norm(of(model, data[:1], FlatClip(1.0)).tensors) <= 1.0


def test_hazard_05_parameters_of_another_model():
    model, other, data = mlp(), nn.Linear(3, 3), torch.randn(4, 6)
    with pytest.raises(ValueError, match="not among the 4 given"):
        of(model, data, FlatClip(1.0), lambda model, batch: other(model(batch[0])).sum(1))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 5)
        self.head = nn.Linear(5, 9, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.table(tokens))


@pytest.mark.parametrize("bound", [0.01, 1.0, 100.0])
def test_hazard_06_tied_weights(bound: float):
    model, tokens = Tied(), torch.randint(0, 9, (4, 6))
    exact = oracle.per_example_gradients(model, (tokens,), squares)
    norms = squared_norms(squares(model, (tokens,)), trainable(model))
    torch.testing.assert_close(
        norms["table.weight"].double(), oracle.squared_norms(exact)["table.weight"], rtol=1e-5, atol=0
    )
    ours = of(model, tokens, FlatClip(bound)).tensors["table.weight"]
    theirs = oracle.clipped_sum(exact, bound)["table.weight"]
    assert float((ours - theirs).norm()) <= 1e-5 * float(theirs.norm())
    alone = of(model, tokens[:1], FlatClip(bound))
    assert norm(alone.tensors) <= bound


@pytest.mark.parametrize(
    "norm_layer", [nn.BatchNorm1d(8), nn.BatchNorm1d(8, affine=False), nn.BatchNorm1d(8, track_running_stats=False)]
)
def test_hazard_07_batch_norm_in_training_mode(norm_layer: nn.Module):
    model = nn.Sequential(nn.Linear(6, 8), norm_layer, nn.Linear(8, 2))
    with pytest.raises(MixedExamples):
        of(model, torch.randn(4, 6), FlatClip(1.0))


def test_hazard_07_frozen_batch_norm_in_training_mode():
    norm_layer = nn.BatchNorm2d(3).requires_grad_(False)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), norm_layer, nn.Flatten(), nn.Linear(48, 2))
    with pytest.raises(MixedExamples):
        of(model, torch.randn(4, 2, 6, 6), FlatClip(1.0))


def test_hazard_08_losses_that_mix_examples():
    """Many more are in the zoo."""

    def centred(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return (model(batch[0]) - model(batch[0]).mean(0)).square().sum(1)

    def contrastive(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return (F.normalize(model(batch[0])) @ F.normalize(model(batch[0])).T).logsumexp(1)

    def whole(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return model(batch[0]).square().sum() * torch.ones(len(batch[0]))

    for losses in (centred, contrastive, whole):
        with pytest.raises(MixedExamples):
            of(mlp(), torch.randn(4, 6), FlatClip(1.0), losses)


@pytest.mark.parametrize(
    "clip", [FlatClip(1.0), PerLayerClip(1.0), AutomaticClip(1.0)], ids=lambda clip: type(clip).__name__
)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 1e25, 3e38])
@pytest.mark.parametrize("kind", ["linear", "time", "convolution", "embedding"])
def test_hazard_09_one_bad_example(kind: str, value: float, clip):
    """It adds exactly zero, and the others add what they add without it, bit for bit up to the order of summation."""
    if kind == "linear":
        model, data, bad = mlp(), torch.randn(5, 6), (2, 3)
    elif kind == "time":
        model, data, bad = (
            nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)),
            torch.randn(5, 4, 6),
            (2, 1, 3),
        )
    elif kind == "convolution":
        model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 3, 3))
        data, bad = torch.randn(5, 2, 7, 7), (2, 1, 3, 3)
    else:
        data, bad = torch.randint(0, 5, (5, 4)), (2, 3)
        model = nn.Sequential(nn.Embedding(6, 3), nn.Linear(3, 2))
    good = data[[0, 1, 3, 4]]
    if kind == "embedding":
        with torch.no_grad():
            model[0].weight[5] = value
        data[bad] = 5
    else:
        data[bad] = value
    with_bad = of(model, data, clip)
    without = of(model, good, clip)
    bound = 1.0 if clip != PerLayerClip(1.0) else len(with_bad.groups) ** 0.5
    assert all(bool(tensor.isfinite().all()) for tensor in with_bad.tensors.values())
    moved = {name: tensor - without.tensors[name] for name, tensor in with_bad.tensors.items()}
    # A normalising layer may bring a large input back to a finite gradient; that is clipped like any other.
    assert norm(moved) <= (bound if math.isfinite(value) and kind in ("time", "convolution") else 1e-5)
    assert norm(of(model, data[2:3], clip).tensors) <= bound


def test_hazard_09_underflow_does_not_hide_a_large_factor():
    """Tiny output gradients times a huge input: the squares of the first underflow, the product does not."""
    model = nn.Linear(4, 3, bias=False)
    data = torch.full((1, 4), 5e18)
    losses = model(data).sum(1) * 1e-23
    total = clipped_sum(losses, trainable(model), FlatClip(1e-6))
    assert norm(total.tensors) <= 1e-6


def test_hazard_09_padding_rows_may_hold_anything():
    model, data = mlp(), torch.randn(5, 6)
    padded = torch.cat([data, torch.full((2, 6), float("nan")), torch.full((2, 6), 3.0)])
    mask = torch.tensor([1.0] * 5 + [0.0] * 4)
    ours = of(model, padded, FlatClip(1.0), mask=mask)
    plain = of(model, data, FlatClip(1.0))
    for name in plain.tensors:
        torch.testing.assert_close(ours.tensors[name], plain.tensors[name], rtol=1e-6, atol=1e-7)


def test_hazard_19_microbatches_equal_one_batch():
    model, data = mlp(), torch.randn(12, 6)
    clip = FlatClip(0.5)
    whole = of(model, data, clip)
    for size in (1, 2, 5, 11):
        parts = [of(model, part, clip, rows=size) for part in data.split(size)]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        for name in whole.tensors:
            torch.testing.assert_close(total.tensors[name], whole.tensors[name].double(), rtol=1e-5, atol=1e-6)
        assert total.groups == parts[0].groups


def test_hazard_29_uncovered_parameters_are_named():
    model = nn.ModuleDict({"used": nn.Linear(6, 3), "left_out": nn.Linear(6, 3)})
    with pytest.raises(ValueError, match=r"no loss depends on .* left_out\.weight, left_out\.bias"):
        of(model, torch.randn(4, 6), FlatClip(1.0), lambda m, batch: m["used"](batch[0]).square().sum(1))


def test_hazard_29_reentrant_checkpoint_is_refused():
    def losses(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return model[2](checkpoint(model[0], batch[0].requires_grad_(), use_reentrant=True)).square().sum(1)

    with pytest.raises(ValueError, match="use_reentrant=False"):
        of(mlp(), torch.randn(4, 6), FlatClip(1.0), losses)


def test_hazard_31_scalar_losses_are_refused():
    labels = torch.tensor([0, 1, 2, 0])
    for reduction in ("mean", "sum"):
        with pytest.raises(ValueError, match="reduction='none'"):
            of(
                mlp(),
                torch.randn(4, 6),
                FlatClip(1.0),
                lambda m, batch, reduction=reduction: F.cross_entropy(m(batch[0]), labels, reduction=reduction),
            )


@pytest.mark.parametrize("kind", ["none", "weighted", "ignore_index", "token mean", "smoothed"])
def test_hazard_31_losses_of_all_kinds(kind: str):
    """The norm is that of the loss as it was given, whatever it averages over inside an example."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    data, labels = torch.randn(5, 7, 6), torch.randint(0, 4, (5, 7))
    labels[1, 3:] = -100
    labels[2, 1:] = -100

    def losses(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        logits, targets = model(batch[0]).transpose(1, 2), batch[1]
        if kind == "none":
            return F.cross_entropy(logits[:, :, 0], targets[:, 0], reduction="none")
        if kind == "weighted":
            weight = torch.tensor([1.0, 2.0, 0.5, 0.1], dtype=logits.dtype)
            return F.cross_entropy(logits, targets, weight, reduction="none").sum(1)
        if kind == "smoothed":
            return F.cross_entropy(logits, targets, reduction="none", label_smoothing=0.1).sum(1)
        per_token = F.cross_entropy(logits, targets, reduction="none")
        return per_token.sum(1) if kind == "ignore_index" else per_token.sum(1) / (targets >= 0).sum(1)

    exact = oracle.per_example_gradients(model, (data, labels), losses)
    ours = squared_norms(losses(model, (data, labels)), trainable(model))
    for name, theirs in oracle.squared_norms(exact).items():
        torch.testing.assert_close(ours[name].double(), theirs, rtol=1e-5, atol=1e-9)


def test_hazard_33_nothing_stale():
    """Extra forwards, forwards without gradient, partial graphs and failed calls leave nothing behind."""
    model, data = mlp(), torch.randn(4, 6)
    clean = of(model, data, FlatClip(1.0))

    def check() -> None:
        again = of(model, data, FlatClip(1.0))
        assert all(torch.equal(again.tensors[name], clean.tensors[name]) for name in clean.tensors)

    model(torch.randn(9, 6))
    with torch.no_grad():
        model(data)
    check()
    model[0](data).sum().backward()
    model.zero_grad()
    check()
    with pytest.raises(ValueError):
        of(model, data, FlatClip(1.0), lambda m, batch: squares(m, batch).sum())
    check()

    def fail(gradient: Tensor) -> Tensor:
        raise RuntimeError("in the middle of the backward pass")

    def failing(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        hidden = model[0](batch[0])
        hidden.register_hook(fail)
        return model[2](hidden.relu()).square().sum(1)

    with pytest.raises(RuntimeError, match="in the middle"):
        of(model, data, FlatClip(1.0), failing)
    check()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check()
