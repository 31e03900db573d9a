"""A function of tensors as one compiled graph: traced once, with all walks and rules behind it, then fused by Inductor.

What the function reads besides its inputs (parameters, buffers) stays where it is: the graph refers to the tensors, so
an update in place is seen by the next call.
"""

import contextlib
import functools
import hashlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from hush.captured.cross_entropy import with_fused_cross_entropy

Function = Callable[[list[Tensor]], list[Tensor]]

_RECOMPUTE = {"realize_reads_threshold": 48, "realize_opcount_threshold": 240, "realize_acc_reads_threshold": 48}
"""For networks of convolutions: what a norm layer and an activation make of a stored tensor is computed again in the
backward pass. Inductor's own limits keep it, in fp32, since nothing tells it where the forward pass ends."""
_IMAGES = ("convolution_squares", "convolution_gradients", "convolution_sums", "window_sums")
"""Our own operators that read images: any layout is right, channels last is read without a copy."""


def compiled(function: Function, inputs: Sequence[Tensor]) -> Function:
    """The function, compiled for inputs of these shapes.

    A graph that draws random numbers (dropout) is handed back as it was: a compiled one would draw other numbers.
    """
    with torch.autograd.set_multithreading_enabled(False):  # the tracer sees only this thread
        graph = make_fx(function, decomposition_table=opened())(list(inputs))
    for node in graph.graph.nodes:
        tags = getattr(node.target, "tags", ())
        if torch.Tag.nondeterministic_seeded in tags and not _replays(node.target):
            return function
    once(graph)
    with_fused_cross_entropy(graph)
    images = with_input_gradients_as_convolutions(graph)
    _read_channels_last(graph)
    with torch.no_grad(), _kept_on_disk(), _places_of_maxima_kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice on how to be faster still, and on parts of torch itself
        fused = torch._inductor.compile(graph, list(inputs), options=_options() if images else {})

    def run(given: list[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return list(fused(given))

    return run


@contextlib.contextmanager
def _kept_on_disk() -> Iterator[None]:
    """Lets Inductor find what another process compiled from the same graph: seconds instead of a minute.

    It looks only where a trace is under way in which sizes could be symbols; here they are all numbers. The key of what
    it keeps names our operators but not what they are made of: our own code is added.
    """
    from torch._guards import TracingContext, tracing
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    config: Any = torch.compiler.config
    mode = FakeTensorMode(shape_env=ShapeEnv(assume_static_by_default=True), allow_non_fake_inputs=True)
    with tracing(TracingContext(mode)), config.patch(cache_key_tag=f"{config.cache_key_tag} hush {_own_code()}"):
        yield


@contextlib.contextmanager
def _places_of_maxima_kept() -> Iterator[None]:
    """Lets Inductor write down where the maxima of a pool were, one byte each, as it does between two graphs.

    In one graph it would look for them again, in windows of the pool's input, and then cannot write the gradient of
    that input over the input itself: one large tensor more.
    """
    from torch._inductor import lowering

    pool = torch.ops.prims._low_memory_max_pool_with_offsets
    lower = lowering.lowerings.get(pool.default)
    if lower is None:  # another version of torch: nothing but memory is at stake
        yield
        return

    def lower_and_keep(*args: Any, **kwargs: Any) -> Any:
        values, places = lower(*args, **kwargs)
        places.realize()
        return values, places

    with patch.dict(lowering.lowerings, {pool.default: lower_and_keep}):
        yield


@functools.cache
def _own_code() -> str:
    """A digest of the kernels, and of how Inductor is told about them."""
    files = [Path(__file__), *sorted(Path(__file__).parents[1].glob("kernels/**/*.py"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _replays(target: object) -> bool:
    """Attention is marked as random for its dropout; without dropout it is not."""
    return "scaled_dot_product" in str(target)


def _options() -> dict[str, Any]:
    from torch._inductor import config

    return {name: value for name, value in _RECOMPUTE.items() if hasattr(config, name)}


def with_input_gradients_as_convolutions(graph: GraphModule) -> bool:
    """Input gradients of convolutions become transposed convolutions, the same numbers; says whether there were any.

    For the kernel's sake the backward operator also names the convolution's input. It is not read for an input
    gradient, but Inductor lays it out as it was in the trace, and copies it wherever a convolution wants it otherwise.
    """
    aten = torch.ops.aten
    nodes = [node for node in graph.graph.nodes if node.target is aten.convolution_backward.default]
    for node in nodes:
        gradient, pixels, weight, _, stride, padding, dilation, transposed, _, groups, mask = node.args
        if transposed or list(mask) != [True, False, False]:
            continue
        sizes = zip(*(_shape(graph, one)[2:] for one in (pixels, gradient, weight)), strict=True)
        # Pixels at the end that no window reached.
        rest = [
            size - ((outputs - 1) * stride[axis] - 2 * padding[axis] + dilation[axis] * (taps - 1) + 1)
            for axis, (size, outputs, taps) in enumerate(sizes)
        ]
        with graph.graph.inserting_before(node):
            settings = (None, stride, padding, dilation, True, rest, groups)
            found = graph.graph.call_function(aten.convolution.default, (gradient, weight, *settings))
        found.meta = {**node.meta, "val": node.meta["val"][0]}
        for user in list(node.users):
            if user.args[1] == 0:
                user.replace_all_uses_with(found)
            graph.graph.erase_node(user)
        graph.graph.erase_node(node)
    graph.recompile()
    return bool(nodes)


def _shape(graph: GraphModule, node: Node) -> Sequence[int]:
    value = getattr(graph, str(node.target)) if node.op == "get_attr" else node.meta["val"]
    return tuple(value.shape)


def opened() -> dict[Any, Callable[..., Any]]:
    """Operators that are traced as what they are made of: our rules take the same sums, and they are taken once."""
    from torch._decomp import get_decompositions

    found: dict[Any, Callable[..., Any]] = get_decompositions([torch.ops.aten.native_group_norm_backward])
    return found


def once(graph: GraphModule) -> None:
    """What is computed twice is computed once, in a graph that writes into no tensor.

    Not where products are among it: a forward pass that is repeated on purpose, to save memory, stays repeated.
    """
    from torch._functorch.compile_utils import fx_graph_cse

    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    if any(isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable for target in targets):
        return
    graph.graph.eliminate_dead_code()
    found = fx_graph_cse(graph.graph)
    if _products(found) == _products(graph.graph):
        found.set_codegen(graph.graph._codegen)  # which knows that the inputs come as a list
        graph.graph = found
        graph.recompile()


def _products(graph: Graph) -> int:
    aten = torch.ops.aten
    kinds = (aten.convolution.default, aten.mm.default, aten.addmm.default, aten.bmm.default)
    return sum(node.target in kinds for node in graph.nodes)


def _read_channels_last(graph: GraphModule) -> None:
    """Tells Inductor in which layout our operators want their images; by itself it would keep that of the trace."""
    targets = {node.target for node in graph.graph.nodes if getattr(node.target, "namespace", "") == "hush"}
    targets = {target for target in targets if target._opname in _IMAGES}
    if not targets:
        return
    from torch._inductor import ir, lowering

    def constraint(node: Node, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return tuple(laid_out(arg) for arg in args), kwargs

    def laid_out(arg: Any) -> Any:
        if not isinstance(arg, ir.IRNode) or len(arg.get_size()) != 4:
            return arg
        arg.realize()  # a tensor that is only an expression yet would be copied
        return ir.ExternKernel.require_channels_last(arg)

    for target in targets:
        if target not in lowering.lowerings:
            lowering.make_fallback(target, layout_constraint=constraint)
