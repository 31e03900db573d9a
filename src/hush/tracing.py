"""A function of tensors as one compiled graph: traced once, with all walks and rules behind it, then fused by Inductor.

What the function reads besides its inputs (parameters, buffers) stays where it is: the graph refers to the tensors, so
an update in place is seen by the next call.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

Function = Callable[[list[Tensor]], list[Tensor]]


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
    with torch.no_grad():
        fused = torch._inductor.compile(graph, list(inputs))

    def run(given: list[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return list(fused(given))

    return run


def _replays(target: object) -> bool:
    """Attention is marked as random for its dropout; without dropout it is not."""
    return "scaled_dot_product" in str(target)
