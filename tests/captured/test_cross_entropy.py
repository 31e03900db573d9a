"""Cross entropy of a traced step, rewritten for its kernels: the same losses, gradients and clipped sums."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

pytest.importorskip("triton")

from support.finished import clipped_sum

from hush.captured import cross_entropy
from hush.captured.cross_entropy import with_fused_cross_entropy
from hush.clipping import FlatClip
from hush.gradients.layers import products

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.float16  # the interpreter multiplies no bfloat16
CLASSES = 150


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a CPU, through the interpreter, and for few classes."""
    monkeypatch.setattr(cross_entropy, "_on_gpu", lambda node: True)
    monkeypatch.setattr(cross_entropy, "_MANY", 100)
    monkeypatch.setattr(products, "on_matrix_units", lambda *tensors: all(one.dtype == HALF for one in tensors))
    monkeypatch.setattr(products.Products, "_small", False)


class Model(nn.Module):
    def __init__(self, classes: int, bias: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, 130)
        self.out = nn.Linear(130, classes, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.first(x).tanh())


def traced(classes: int = CLASSES, bias: bool = False, bad: bool = False) -> tuple[GraphModule, list[Tensor]]:
    """Clipped sums of sequences of 5 tokens, 3 in a batch; some tokens do not count."""
    torch.manual_seed(0)
    model = Model(classes, bias).to(DEVICE, HALF)
    params = dict(model.named_parameters())
    x, y = torch.randn(3, 5, 8, device=DEVICE).to(HALF), torch.randint(0, classes, (3, 5), device=DEVICE)
    y[0, 1] = y[2, 4] = -100
    if bad:
        x[1, 2] = float("inf")

    def sums(inputs: list[Tensor]) -> list[Tensor]:
        x, y = inputs
        with torch.enable_grad():
            logits = model(x).float()
            losses = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view(y.shape).mean(1)
        total = clipped_sum(losses * 4096, params, FlatClip(0.1))
        return [losses.detach(), *total.tensors.values()]

    sums([x, y])
    with torch.autograd.set_multithreading_enabled(False):
        return make_fx(sums)([x, y]), [x, y]


def run(graph: GraphModule, inputs: list[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        return graph(inputs)


def targets(graph: GraphModule) -> list[str]:
    """The operators that are left when what nobody reads is gone."""
    graph.graph.eliminate_dead_code()
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("classes, bias", [(CLASSES, False), (CLASSES, True), (144, False)])
def test_the_rewritten_step_computes_the_same(classes: int, bias: bool) -> None:
    graph, inputs = traced(classes, bias)
    want = run(graph, inputs)
    assert with_fused_cross_entropy(graph)
    left = targets(graph)
    assert left.count("hush.log_sums.default") == left.count("hush.logit_gradients.default") == 1
    assert not [name for name in left if "softmax" in name or "nll" in name]
    got = run(graph, inputs)
    torch.testing.assert_close(got[0], want[0], rtol=1e-4, atol=1e-5)
    for one, other in zip(got[1:], want[1:], strict=True):
        scale = float(other.abs().max())
        torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-3 * scale)


def test_the_gradient_is_written_once_with_room_and_read_by_all() -> None:
    graph, _ = traced()
    padded = targets(graph).count("aten.constant_pad_nd.default")
    with_fused_cross_entropy(graph)
    left = targets(graph)
    # The inputs of the last layer need room too. Of the gradient's padding only that of the weight is left.
    assert left.count("aten.constant_pad_nd.default") == padded
    pads = [node for node in graph.graph.nodes if str(node.target) == "aten.constant_pad_nd.default"]
    assert all(node.args[0].meta["val"].shape[-1] != CLASSES for node in pads)
    products = [node for node in graph.graph.nodes if node.target is torch.ops.aten.mm.default]
    assert [str(node.args[0].target) for node in products].count("hush.logit_gradients.default") == 1


def test_tokens_that_do_not_count_add_nothing() -> None:
    graph, inputs = traced()
    with_fused_cross_entropy(graph)
    before = run(graph, inputs)
    inputs[0][0, 1] += 1.0  # only its own row reads it
    after = run(graph, inputs)
    assert torch.equal(before[0], after[0])
    assert all(torch.equal(one, other) for one, other in zip(before[1:], after[1:], strict=True))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # infinities, in the interpreter
def test_an_example_that_is_not_finite_still_adds_exactly_zero() -> None:
    graph, inputs = traced(bad=True)
    want = run(graph, inputs)
    with_fused_cross_entropy(graph)
    got = run(graph, inputs)
    assert got[0].isfinite().tolist() == [True, False, True]
    for one, other in zip(got[1:], want[1:], strict=True):
        assert bool(one.isfinite().all())
        torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-3 * float(other.abs().max()))


@pytest.mark.parametrize("what", ["few classes", "part of the loss", "also handed out", "weights", "fp32", "mean"])
def test_what_is_not_plain_cross_entropy_of_many_classes_stays(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if what == "few classes":
        monkeypatch.setattr(cross_entropy, "_MANY", CLASSES + 1)
    kind = torch.float32 if what == "fp32" else HALF
    weight = torch.rand(CLASSES, device=DEVICE) if what == "weights" else None
    x = torch.randn(6, CLASSES, device=DEVICE).to(kind)
    y = torch.randint(0, CLASSES, (6,), device=DEVICE)

    def run(inputs: list[Tensor]) -> list[Tensor]:
        with torch.enable_grad():
            leaf = inputs[0].detach().requires_grad_()
            logs = F.log_softmax(leaf.float(), 1)
            losses = F.nll_loss(logs, inputs[1], weight, reduction="mean" if what == "mean" else "none")
            if what == "part of the loss":
                losses = losses + logs.exp().square().sum(1)
            (gradient,) = torch.autograd.grad(losses, leaf, torch.ones_like(losses))
        return [gradient, logs.detach()] if what == "also handed out" else [gradient]

    graph = make_fx(run)([x, y])
    want = graph([x, y])[0]
    assert not with_fused_cross_entropy(graph)
    torch.testing.assert_close(graph([x, y])[0], want, rtol=0, atol=0)
