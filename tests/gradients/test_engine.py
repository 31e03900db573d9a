"""Gradients: what is learnt on slices, what is looked up, what is refused, and what is left as it was."""

import logging
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from oracles import gradients as oracle
from torch import Tensor, nn

from hush.clipping import FlatClip, PerLayerClip, QuantileClip
from hush.errors import MixedExamples, NotSupported
from hush.gradients.analysis import plan as plans
from hush.gradients.engine import Gradients, Inputs
from hush.gradients.layers import table
from hush.gradients.sums.per_example import Rule


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def squares(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x).flatten(1)
    return (out.square() * torch.linspace(0.5, 2, out.shape[1], dtype=out.dtype)).sum(1) + out.sin().sum(1)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def agrees(gradients: Gradients, losses: Callable[..., Tensor], *batch: Tensor) -> None:
    exact = oracle.per_example_gradients(gradients.model, batch, lambda m, b: losses(m, *b))
    ours = gradients.per_example(batch)
    for name, value in exact.items():
        torch.testing.assert_close(ours[name].double(), value, rtol=1e-4, atol=1e-6)


# The contract ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [FlatClip(0.3), PerLayerClip(0.2), QuantileClip(initial=0.3)])
def test_the_fast_engine_is_the_reference(clip: Any) -> None:
    model, x = mlp(), torch.randn(7, 4)
    mask = torch.tensor([True] * 5 + [False] * 2)
    fast, slow = (Gradients(squares, model, engine=e).clipped_sum((x,), clip, mask=mask) for e in ("fast", "reference"))
    for name, value in slow.tensors.items():
        torch.testing.assert_close(fast.tensors[name].double(), value, rtol=1e-3, atol=1e-5)
    assert fast.groups == slow.groups
    assert (fast.count is None) == (slow.count is None)
    if fast.count is not None and slow.count is not None:
        assert float(fast.count.tensors["count"]) == float(slow.count.tensors["count"])


def test_the_reference_is_the_papers_sum() -> None:
    model, x = mlp(), torch.randn(5, 4)
    exact = oracle.clipped_sum(oracle.per_example_gradients(model, (x,), lambda m, b: squares(m, *b)), 0.5)
    ours = Gradients(squares, model, engine="reference").clipped_sum((x,), FlatClip(0.5)).tensors
    for name, value in exact.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6)


def test_every_bound_is_the_same_number() -> None:
    """An empty batch, one row, padding alone, and a long batch: the noise must not know which it was."""
    model = mlp()
    gradients = Gradients(squares, model)
    batches = [torch.randn(9, 4), torch.randn(1, 4), torch.randn(0, 4), torch.randn(700, 4)]
    sums = [gradients.clipped_sum((x,), FlatClip(1.0)) for x in batches]
    sums.append(gradients.clipped_sum((batches[0],), FlatClip(1.0), mask=torch.zeros(9)))
    assert len({total.groups for total in sums}) == 1
    assert all(not tensor.any() for total in (sums[2], sums[4]) for tensor in total.tensors.values())


def test_named_inputs_views_and_what_passes_through() -> None:
    model, x = mlp(), torch.randn(5, 4)

    def losses(model: nn.Module, batch: dict[str, Any], scale: float, note: None = None) -> Tensor:
        return torch.stack([squares(model, batch["x"]["deep"] * scale), squares(model, batch["x"]["deep"])], 1)

    inputs = {"batch": {"x": {"deep": x}, "name": "a"}, "scale": 2.0}
    one = Gradients(losses, model).per_example(inputs)
    both = [Gradients(squares, model).per_example((x * scale,)) for scale in (2.0, 1.0)]
    for name, value in one.items():
        torch.testing.assert_close(value, (both[0][name] + both[1][name]) / 2, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "inputs, what",
    [
        ((torch.randn(4, 4), torch.randn(3)), r"inputs\[1\]: expected 4 rows"),
        ({"x": torch.randn(4, 4), "edge": [torch.randn(2)]}, r'inputs\["edge"\]\[0\]: expected 4 rows'),
        ((1.0,), "hold no tensor with a dimension"),
        ((torch.randn(3, 3).to_sparse(),), "expected a dense one"),
    ],
)
def test_inputs_that_do_not_agree_are_refused_by_their_place(inputs: Any, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        Gradients(lambda model, *a, **k: torch.zeros(1), mlp()).clipped_sum(inputs, FlatClip(1.0))


@pytest.mark.parametrize(
    "losses, what",
    [
        (lambda m, x: squares(m, x).mean(), "got a scalar"),
        (lambda m, x: squares(m, x)[:2], r"losses of shape \(5,\)"),
        (lambda m, x: squares(m, x)[:, None, None], r"losses of shape \(5,\)"),
        (lambda m, x: squares(m, x).detach(), "do not depend on any parameter"),
    ],
)
def test_losses_that_are_not_one_for_each_row_are_refused(losses: Any, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        Gradients(losses, mlp()).clipped_sum((torch.randn(5, 4),), FlatClip(1.0))


def test_state_between_calls_is_refused() -> None:
    calls = [0]

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        calls[0] += 1
        return squares(model, x) * (1 + calls[0])

    with pytest.raises(ValueError, match="keeps state between calls"):
        Gradients(losses, mlp()).clipped_sum((torch.randn(5, 4),), FlatClip(1.0))


def test_parameters_that_no_loss_or_no_model_holds() -> None:
    model, stray = mlp(), nn.Parameter(torch.ones(4))
    with pytest.raises(ValueError, match="that are not among the 4 given"):
        Gradients(lambda m, x: squares(m, x * stray), model).clipped_sum((torch.randn(5, 4),), FlatClip(1.0))
    model.register_parameter("idle", nn.Parameter(torch.ones(2)))
    with pytest.raises(NotSupported, match="no loss depends on the trainable parameters idle"):
        Gradients(squares, model).clipped_sum((torch.randn(5, 4),), FlatClip(1.0))
    model.register_parameter("wave", nn.Parameter(torch.ones(2, dtype=torch.complex64)))
    with pytest.raises(NotSupported, match="wave: complex parameters"):
        Gradients(squares, model).clipped_sum((torch.randn(5, 4),), FlatClip(1.0))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameter"):
        Gradients(squares, model).clipped_sum((torch.randn(5, 4),), FlatClip(1.0))


def test_a_parameter_that_one_batch_does_not_use_gets_zero() -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low, self.high = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            out = torch.zeros(len(x), 2, dtype=x.dtype)
            for layer, mine in ((self.low, x[:, 0] <= 0), (self.high, x[:, 0] > 0)):
                if bool(mine.any()):
                    out = out.index_put((mine.nonzero()[:, 0],), layer(x[mine]))
            return out

    model = Router()
    gradients = Gradients(squares, model)
    x = torch.randn(6, 4)
    x[:3, 0], x[3:, 0] = -1.0, 1.0
    for batch in (x, x[torch.tensor([5, 0, 3, 1, 4, 2])], x[:3], x[3:]):
        agrees(gradients, squares, batch)
    assert not any(tensor.any() for name, tensor in gradients.per_example((x[:3],)).items() if name.startswith("high"))


# What is learnt, and what is looked up --------------------------------------------------------------------------------


def test_sizes_that_vary_are_learnt_once() -> None:
    """Forty lengths and as many batch sizes: three analyses, and no batch looked up."""

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.at = nn.Embedding(9, 8), nn.Embedding(64, 8)
            self.layer = nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.table(tokens) + self.at(torch.arange(tokens.shape[1]))
            return self.layer(x).mean(1)

    model = Reader()
    gradients = Gradients(squares, model)
    for length in range(3, 43):
        gradients.clipped_sum((torch.randint(9, (3 + length % 5, length)),), FlatClip(1.0))
        if length % 9 == 0:
            agrees(gradients, squares, torch.randint(9, (4, length)))
    assert gradients._analyst.analyses <= 3 and gradients._analyst.lookups == 0


def test_a_size_that_numbers_do_not_follow_is_learnt_too() -> None:
    """Strides: sizes of images are halved and rounded down, which no straight line gives."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3, 2), nn.ReLU(), nn.Conv2d(3, 3, 2, 2), nn.AdaptiveAvgPool2d(1))
    gradients = Gradients(squares, model)
    for size in (9, 12, 13, 10, 11, 14, 15, 16):
        agrees(gradients, squares, torch.randn(4, 2, size, size + 1))


@pytest.mark.parametrize("first", ["sorted", "shuffled"])
def test_rows_that_values_move_are_looked_up(first: str) -> None:
    """Rows sorted by value before a layer and put back after it: regular on slices by chance, not in the next batch."""

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        hidden = torch.tanh(model[0](x[order]))
        return model[2](hidden[order.argsort()]).square().sum(1)

    model = mlp()
    gradients = Gradients(losses, model)
    x = torch.randn(6, 4)
    if first == "sorted":
        x = x[x[:, 0].argsort()]
    agrees(gradients, losses, x)
    for _ in range(40):
        agrees(gradients, losses, torch.randn(6, 4))


@pytest.mark.parametrize("pool", ["product", "mask", "attention", "where"])
def test_rows_that_a_matrix_moves_are_looked_up(pool: str) -> None:
    """A matrix of zeros and ones made from the data sends rows away and back."""

    def away(order: Tensor, h: Tensor) -> Tensor:
        matrix = F.one_hot(order, len(order)).to(h.dtype)
        if pool == "product":
            return matrix @ h
        if pool == "mask":
            return (matrix[:, :, None] * h[None]).sum(1)
        if pool == "where":
            return torch.where(matrix[:, :, None] > 0, h[None], 0.0).sum(1)
        return F.scaled_dot_product_attention(h[None], h[None], h[None], attn_mask=matrix[None] > 0)[0]

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        x = x.nan_to_num(0, 0, 0).clamp(-5, 5)  # 0 times infinity would mix
        order = x[:, 0].argsort()
        back = away(order.argsort(), torch.tanh(model[0](x[order])))
        return model[2](back).square().sum(1)

    model = mlp()
    gradients = Gradients(losses, model)
    start = torch.randn(6, 4)
    agrees(gradients, losses, start[start[:, 0].argsort()])
    for _ in range(10):
        agrees(gradients, losses, torch.randn(6, 4))


def test_a_node_is_called_outside_the_running_pass() -> None:
    """Inside one, a node answers None for weights that the pass does not ask for, and None is no zero."""

    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.temperature = nn.Linear(4, 6), nn.Parameter(torch.tensor(1.5))
            self.pairs = nn.Bilinear(6, 6, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            return self.pairs(h, h) / self.temperature

    model = Scores()
    gradients = Gradients(squares, model)
    agrees(gradients, squares, torch.randn(5, 4))
    assert all(bool(value.any()) for value in gradients.per_example((torch.randn(5, 4),)).values())


def test_a_rule_that_is_wrong_is_found_and_named(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Whatever a rule says, the definition has the last word: the parameter goes one by one."""

    def wrong(site: Any) -> Any:
        found = table.RULES["MmBackward0"].contributions(site)
        return {k: replace(v, gradients=v.gradients * 1.01) for k, v in found.items()}

    monkeypatch.setattr(plans, "RULES", {**table.RULES, "MmBackward0": Rule(wrong, table.RULES["MmBackward0"].saved)})
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Unflatten(1, (2, 3)), nn.Linear(3, 2))
    gradients = Gradients(squares, model)
    with caplog.at_level(logging.WARNING, "hush"):
        agrees(gradients, squares, torch.randn(5, 4))
    assert "0.weight" in caplog.text
    assert {row.name: row.how for row in gradients.explain().rows}["0.weight"] == "one by one"


@pytest.mark.parametrize(
    "node", ["AddmmBackward0", "NativeLayerNormBackward0", "ConvolutionBackward0", "EmbeddingBackward0"]
)
def test_a_field_that_this_torch_does_not_have_makes_a_layer_slow_and_not_wrong(
    node: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = table.RULES[node]
    gone = Rule(rule.contributions, tuple(f"gone_{name}" for name in rule.saved))
    monkeypatch.setattr(plans, "RULES", {**table.RULES, node: gone})
    model = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 4), nn.LayerNorm(4), nn.Conv1d(5, 2, 3))
    agrees(Gradients(squares, model), squares, torch.randint(7, (4, 5)))


def test_an_example_that_is_not_finite_is_no_evidence_of_mixing() -> None:
    """0 times inf is NaN in rows that a loss does not reach."""

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).relu().sqrt().sum(1)

    model, x = mlp(), torch.randn(6, 4)
    x[2] = float("inf")
    total = Gradients(losses, model).clipped_sum((x,), FlatClip(1.0))
    kept = Gradients(losses, model).clipped_sum((x[[0, 1, 3, 4, 5]],), FlatClip(1.0))
    for name, tensor in total.tensors.items():
        assert bool(tensor.isfinite().all())
        torch.testing.assert_close(tensor, kept.tensors[name], rtol=1e-4, atol=1e-6)


# What is met later ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how, met", [("another graph", 6), ("another value", 8)])
def test_mixing_that_begins_later_is_met(how: str, met: int) -> None:
    """A share that is annealed from zero: refused where the graph is new, or on the next batch that is looked at."""
    share = [0.0]

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        hidden = torch.tanh(model[0](x))
        other = hidden.roll(1, 0).nan_to_num()
        mixed = hidden + share[0] * other if share[0] or how == "another value" else hidden
        return model[2](mixed).square().sum(1)

    gradients = Gradients(losses, mlp(), look_seed=0)
    with pytest.raises(MixedExamples):
        for step in range(9):
            share[0] = 0.1 * (step > 4)
            gradients.clipped_sum((torch.randn(8, 4),), FlatClip(1.0))
    assert gradients._batches == met


def test_freezing_between_batches_is_a_graph_of_its_own() -> None:
    model = mlp()
    gradients = Gradients(squares, model)
    agrees(gradients, squares, torch.randn(5, 4))
    model[0].weight.requires_grad_(False)
    agrees(gradients, squares, torch.randn(5, 4))
    assert set(gradients.clipped_sum((torch.randn(5, 4),), FlatClip(1.0)).tensors) == {"0.bias", "2.weight", "2.bias"}


# What is left as it was -----------------------------------------------------------------------------------------------


def test_generators_buffers_weights_and_modes_are_as_before() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3)))
    model.train()
    torch.manual_seed(3)
    x = torch.randn(6, 4)
    gradients = Gradients(squares, model)
    gradients._analyst.test(Inputs.of((x,)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    numpys = np.random.get_state()[1].tolist()  # noqa: NPY002 - the generator that old code draws from
    states = torch.get_rng_state(), random.getstate()
    gradients._analyst.tests.rows = 0
    gradients._analyst.test(Inputs.of((x,)))
    gradients.look_again((x,))
    assert torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate()
    assert numpys == np.random.get_state()[1].tolist()  # noqa: NPY002
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules())
    gradients.clipped_sum((x,), FlatClip(1.0))
    assert all(parameter.grad is None and not parameter._backward_hooks for parameter in model.parameters())


def test_an_analysis_changes_no_seeded_run() -> None:
    """The draws of the first batch's forward pass are those that they are without an analysis."""

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        return squares(model, x) * torch.rand(len(x))

    model, x = mlp(), torch.randn(6, 4)
    fresh, known = (Gradients(losses, model, look_seed=0) for _ in range(2))
    known.clipped_sum((x,), FlatClip(1.0))
    results = []
    for gradients in (fresh, known):
        torch.manual_seed(5)
        results.append((gradients.clipped_sum((x,), FlatClip(1.0)).tensors["0.weight"], torch.rand(3)))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_a_compiled_model_stays_compiled() -> None:
    """An eager call under a dispatch mode would make Dynamo skip the frame for good, in silence."""
    ran = [0]

    def counting(graph: Any, example_inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            ran[0] += 1
            return graph.forward(*args)

        return run

    model = mlp()
    compiled = torch.compile(model, backend=counting)
    x = torch.randn(6, 4)
    compiled(x)
    gradients = Gradients(squares, compiled)
    gradients.clipped_sum((x,), FlatClip(1.0))
    before = ran[0]
    agreed = gradients.per_example((x,))
    assert ran[0] == before + 1
    plain = Gradients(squares, model).per_example((x,))
    for name, value in plain.items():
        torch.testing.assert_close(agreed[f"_orig_mod.{name}"], value, rtol=1e-4, atol=1e-6)


def test_a_traced_step_is_the_step() -> None:
    """What a compiler records is the same function: plans are made before, and nothing looks at values."""
    from torch.fx.experimental.proxy_tensor import make_fx

    model, x = mlp(), torch.randn(6, 4)
    gradients = Gradients(squares, model)
    gradients.clipped_sum((x,), FlatClip(0.5))

    def step(x: Tensor, mask: Tensor) -> list[Tensor]:
        return list(gradients.clipped_sum((x,), FlatClip(0.5), mask=mask).tensors.values())

    traced = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(x, torch.ones(6))
    assert not [node for node in traced.graph.nodes if "_local_scalar_dense" in str(node.target)]
    other, mask = torch.randn(6, 4), torch.tensor([1.0, 1, 0, 1, 1, 0])
    for one, two in zip(traced(other, mask), step(other, mask), strict=True):
        torch.testing.assert_close(one, two)


def test_reentrant_checkpoints_are_refused_by_name() -> None:
    def losses(model: nn.Module, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(model, x.requires_grad_(), use_reentrant=True).sum(1)

    with pytest.raises(ValueError, match="use_reentrant=False"):
        Gradients(losses, mlp()).clipped_sum((torch.randn(5, 4),), FlatClip(1.0))


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), 3e38])
@pytest.mark.parametrize("kind", ["rule", "by example", "one by one", "looked up", "alone"])
def test_an_example_that_is_not_finite_spoils_no_other(kind: str, bad: float) -> None:
    """0 times infinity is NaN: what is isolated by zeros is taken by passes of its own instead."""

    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.pairs = nn.Linear(4, 4), nn.Bilinear(4, 4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.pairs(self.first(x), x) if kind == "by example" else self.first(x)

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        order = x[:, 0].nan_to_num(0, 0, 0).argsort() if kind == "looked up" else torch.arange(len(x))
        return model(x[order])[order.argsort()].square().sum(1)

    model, x = Pairs(), torch.randn(6, 4)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(kind == "by example" or name.startswith("first"))
    gradients = Gradients(losses, model)
    rows = torch.tensor([0, 1, 3, 4, 5])
    expected = gradients.clipped_sum((x[rows],), FlatClip(1.0)).tensors
    if kind == "one by one":
        for known in (one for kept in gradients._analyst._known.values() for one in kept):
            known.slow = frozenset(name for name, _ in model.named_parameters())
        gradients._analyst._settled.clear()
    x[2] = bad
    found = gradients.clipped_sum((x,), FlatClip(1.0)).tensors
    for name, value in expected.items():
        assert bool(found[name].isfinite().all()) and bool(found[name].any())
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
    if kind == "alone":
        assert not any(tensor.any() for tensor in gradients.clipped_sum((x[2:3],), FlatClip(1.0)).tensors.values())


def test_tied_modules_shared_weights_and_recurrent_layers_are_put_back() -> None:
    """A module under two names, a weight in two modules: after a trial every place holds what it held."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = nn.Embedding(7, 4)
            self.encoder, self.decoder = nn.ModuleDict({"table": self.shared}), nn.ModuleDict({"table": self.shared})
            self.cells = nn.LSTM(4, 4, batch_first=True)
            self.head = nn.Linear(4, 7)
            self.head.weight = self.shared.weight
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, tokens: Tensor) -> Tensor:
            self.calls = self.calls + 1
            h = self.cells(self.encoder["table"](tokens))[0] + self.decoder["table"](tokens.flip(1))
            return self.head(h)

    model, tokens = Tied(), torch.randint(7, (5, 3))
    before = {name: id(tensor) for name, tensor in model.named_parameters(remove_duplicate=False)}
    buffer, flat = model.calls, list(map(id, model.cells._flat_weights))
    Gradients(squares, model).check((tokens,))
    assert {name: id(tensor) for name, tensor in model.named_parameters(remove_duplicate=False)} == before
    assert list(map(id, model.cells._flat_weights)) == flat
    assert float(model.calls) == 1.0 and buffer is not model.calls  # the one pass of the batch itself
    agrees(Gradients(squares, model), squares, tokens)
