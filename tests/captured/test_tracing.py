"""A function as one compiled graph: the same results, parameters seen as they are now, randomness left alone."""

import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.finished import clipped_sum
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from hush.captured import compiled as tracing
from hush.captured.compiled import compiled, once, opened, with_input_gradients_as_convolutions
from hush.clipping import FlatClip


def sums_of(model: nn.Module) -> object:
    params = dict(model.named_parameters())

    def run(inputs: list[Tensor]) -> list[Tensor]:
        x, y, mask = inputs
        with torch.enable_grad():
            losses = F.cross_entropy(model(x), y, reduction="none")
        return list(clipped_sum(losses, params, FlatClip(0.1), mask=mask).tensors.values())

    return run


def batch() -> list[Tensor]:
    return [torch.randn(6, 5), torch.randint(0, 3, (6,)), torch.tensor([1, 1, 1, 0, 1, 1]).bool()]


def test_a_graph_that_draws_random_numbers_is_not_compiled() -> None:
    run = sums_of(nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.5), nn.Linear(4, 3)))
    run(batch())
    assert compiled(run, batch()) is run


def test_advice_of_the_compiler_is_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def chatty(graph: GraphModule, inputs: list[Tensor], options: object = None) -> GraphModule:
        warnings.warn("online softmax is disabled", UserWarning, stacklevel=1)
        return graph

    monkeypatch.setattr(torch._inductor, "compile", chatty)
    compiled(lambda tensors: [tensors[0] + 1], [torch.zeros(3)])  # a warning would be an error here


def test_what_was_compiled_before_is_found_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def misses_and_hits() -> tuple[int, int]:
        counters.clear()
        fast = compiled(lambda tensors: [tensors[0] + 1], [torch.zeros(3)])
        torch.testing.assert_close(fast([torch.ones(3)]), [torch.full((3,), 2.0)])
        return counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"]

    assert [misses_and_hits(), misses_and_hits()] == [(1, 0), (0, 1)]
    monkeypatch.setattr(tracing, "_own_code", lambda: "kernels of another version")
    assert misses_and_hits() == (1, 0)


def test_places_of_maxima_are_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are looked for again, a gradient cannot take the place of its activation (142 MiB for cnn24)."""
    from torch._inductor import lowering

    class Places:
        realized = False

        def realize(self) -> None:
            self.realized = True

    pool, places = torch.ops.prims._low_memory_max_pool_with_offsets.default, Places()

    def lower(images: str) -> tuple[str, Places]:
        return f"maxima of {images}", places

    def compile(graph: GraphModule, inputs: list[Tensor], options: object = None) -> GraphModule:
        assert lowering.lowerings[pool]("images") == ("maxima of images", places)
        return graph

    monkeypatch.setitem(lowering.lowerings, pool, lower)
    monkeypatch.setattr(torch._inductor, "compile", compile)
    compiled(lambda tensors: [tensors[0] + 1], [torch.zeros(3)])
    assert places.realized
    assert lowering.lowerings[pool] is lower, "other graphs of the process are compiled as before"


def test_compiled_sums_follow_parameters_and_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph itself, not what Inductor makes of it: that takes a compiler, and half a minute."""
    monkeypatch.setattr(torch._inductor, "compile", lambda graph, inputs, options: lambda given: graph(given))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    run = sums_of(model)
    run(batch())
    fast = compiled(run, batch())
    for _ in range(3):
        given = batch()
        given[2] = torch.rand(6) < 0.5
        torch.testing.assert_close(fast(given), run(given), rtol=1e-6, atol=1e-7)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.3)


def convolutions() -> nn.Module:
    first = nn.Conv2d(3, 8, 3, padding=1)
    second = nn.Conv2d(8, 6, (2, 3), stride=(4, 3), dilation=(1, 2), padding=(0, 1), groups=2, bias=False)
    last = (nn.ConvTranspose2d(6, 4, 2), nn.Flatten(), nn.LazyLinear(3))
    return nn.Sequential(first, nn.GroupNorm(2, 8), nn.ReLU(), second, *last)


def test_input_gradients_of_convolutions_as_transposed_convolutions() -> None:
    """Strides that leave pixels unread, dilation, groups; transposed convolutions stay as they are."""
    torch.manual_seed(0)
    model, given = convolutions().double(), [torch.randn(6, 3, 8, 7).double(), *batch()[1:]]
    model(given[0])
    run = sums_of(model)
    want = run(given)
    with torch.autograd.set_multithreading_enabled(False):
        graph = make_fx(run)(given)
    before = [node.target for node in graph.graph.nodes].count(torch.ops.aten.convolution_backward.default)
    assert with_input_gradients_as_convolutions(graph)
    after = [node.target for node in graph.graph.nodes].count(torch.ops.aten.convolution_backward.default)
    assert after == before - 1
    torch.testing.assert_close(graph(given), want, rtol=1e-12, atol=1e-14)
    plain = make_fx(lambda tensors: [tensors[0] * 2])(given)
    assert not with_input_gradients_as_convolutions(plain)


def sums_over_pixels(graph: GraphModule) -> int:
    nodes = [node for node in graph.graph.nodes if node.target is torch.ops.aten.sum.dim_IntList]
    return sum(tuple(node.args[1]) == (2,) and node.args[0].meta["val"].shape[2] == 9 * 8 for node in nodes)


def test_sums_of_a_norm_layer_and_of_its_backward_pass_are_taken_once() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(576, 3))
    given = [torch.randn(6, 3, 9, 8), *batch()[1:]]
    run = sums_of(model)
    want = run(given)
    with torch.autograd.set_multithreading_enabled(False):
        graph = make_fx(run, decomposition_table=opened())(given)
    assert sums_over_pixels(graph) == 4
    once(graph)
    assert sums_over_pixels(graph) == 2
    torch.testing.assert_close(graph(given), want, rtol=1e-5, atol=1e-6)


def test_a_repeated_forward_pass_and_writes_in_place_stay_as_they_are() -> None:
    for function in (lambda x: (x[0] @ x[0]) + (x[0] @ x[0]), lambda x: x[0].exp().add_(x[0].exp())):
        graph = make_fx(function)([torch.randn(3, 3)])
        before = len(graph.graph.nodes)
        once(graph)
        assert len(graph.graph.nodes) == before


def test_operators_that_read_images_exist_under_their_names() -> None:
    pytest.importorskip("triton")
    import hush.kernels.gradients.convolutions
    import hush.kernels.gradients.windows  # noqa: F401

    for name in tracing._IMAGES:
        assert getattr(torch.ops.hush, name).default._opname == name


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # by the compiler's own imports
@pytest.mark.parametrize("images", [False, True])
def test_inductor_gives_the_same_sums(images: bool) -> None:
    torch.manual_seed(0)
    model = convolutions() if images else nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    given = [torch.randn(6, 3, 8, 7) if images else torch.randn(6, 5), *batch()[1:]]
    model(given[0])
    run = sums_of(model)
    want = run(given)
    torch.testing.assert_close(compiled(run, given)(given), want, rtol=1e-5, atol=1e-6)
