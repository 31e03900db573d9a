"""A function of tensors as one compiled graph: traced once, with all walks and rules behind it, then fused by Inductor.

What the function reads besides its inputs (parameters, buffers) stays where it is: the graph refers to the tensors, so
an update in place is seen by the next call.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

Function = Callable[[list[Tensor]], list[Tensor]]

_RECOMPUTE = {"realize_reads_threshold": 8, "realize_opcount_threshold": 80, "realize_acc_reads_threshold": 16}
"""For networks of convolutions: what a norm layer and an activation make of a stored tensor is computed again in the
backward pass. Inductor's own limits keep it, in fp32, since nothing tells it where the forward pass ends."""


def compiled(function: Function, inputs: Sequence[Tensor]) -> Function:
    """The function, compiled for inputs of these shapes.

    A graph that draws random numbers (dropout) is handed back as it was: a compiled one would draw other numbers.
    """
    with torch.autograd.set_multithreading_enabled(False):  # the tracer sees only this thread
        graph = make_fx(function)(list(inputs))
    for node in graph.graph.nodes:
        tags = getattr(node.target, "tags", ())
        if torch.Tag.nondeterministic_seeded in tags and not _replays(node.target):
            return function
    images = with_input_gradients_as_convolutions(graph)
    _read_channels_last(graph)
    with torch.no_grad():
        fused = torch._inductor.compile(graph, list(inputs), options=_options() if images else {})

    def run(given: list[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return list(fused(given))

    return run


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


def _read_channels_last(graph: GraphModule) -> None:
    """Our own operators take images in any layout; Inductor is told which one they read without a copy."""
    targets = {node.target for node in graph.graph.nodes if getattr(node.target, "namespace", "") == "hush"}
    targets = {target for target in targets if torch.Tag.flexible_layout in target.tags}
    if not targets:
        return
    from torch._inductor import ir, lowering

    def constraint(node: Node, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        images = [isinstance(arg, ir.IRNode) and len(arg.get_size()) == 4 for arg in args]
        wanted = (
            ir.ExternKernel.require_channels_last(arg) if is_image else arg
            for arg, is_image in zip(args, images, strict=True)
        )
        return tuple(wanted), kwargs

    for target in targets:
        lowering.add_layout_constraint(target, constraint)
