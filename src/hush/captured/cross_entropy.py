"""Cross entropy over many classes in a traced step, rewritten for the kernels of a GPU.

For a language model the logits are by far the largest tensor of a step. Traced as it is, cross entropy reads them four
times and writes their gradient twice: as it is for the product with the weight, and with room for block copies for the
norms. Here logits are read twice and the gradient is written once; both are the same up to rounding.
"""

from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from hush import kernels

_MANY = 4096
"""Classes from which on it pays."""
_HALF = (torch.bfloat16, torch.float16)
_aten = torch.ops.aten
_VIEWS = (_aten.view.default, _aten._unsafe_view.default, _aten.detach.default, _aten.alias.default)


@dataclass(frozen=True)
class _Found:
    """Cross entropy without reduction: its logits in half precision, and all that is made of them."""

    logits: Node
    """In half precision; the numbers of `shape`, perhaps in another one."""
    shape: tuple[int, int]
    losses: Node
    """nll_loss_forward"""
    gradients: tuple[tuple[Node, Node], ...]
    """nll_loss_backward, and the logits' gradient in half precision."""


def with_fused_cross_entropy(graph: GraphModule) -> bool:
    """Rewrite every cross entropy over many classes with half precision logits on a GPU; says whether there was one."""
    if not kernels.available():
        return False
    found = [match(node) for node in graph.graph.nodes if node.target is _aten._log_softmax.default]
    matches = [one for one in found if one is not None and _on_gpu(one.logits)]
    for one in matches:
        rewrite(graph.graph, one)
    if matches:
        graph.recompile()
    return bool(matches)


def _on_gpu(node: Node) -> bool:
    return bool(node.meta["val"].is_cuda)


def match(softmax: Node) -> _Found | None:
    """What is to be replaced, if everything that reads the logarithms is part of a cross entropy."""
    dim: Any = softmax.args[1]
    shape = tuple(softmax.meta["val"].shape)
    logits = _behind(_argument(softmax))
    if logits.target is not _aten._to_copy.default or len(shape) != 2 or dim != 1 or shape[1] < _MANY:
        return None
    logits = _argument(logits)
    if logits.meta["val"].dtype not in _HALF or softmax.meta["val"].dtype != torch.float32:
        return None
    losses: list[Node] = []
    gradients: list[tuple[Node, Node]] = []
    for user, place in _uses(softmax):
        if user.target is _aten.nll_loss_forward.default and place == 0 and _plain(user):
            losses.append(user)
        elif user.target is _aten.nll_loss_backward.default and place == 1 and _plain(user, first=1):
            found = [_halved(one, logits.meta["val"].dtype) for one, at in _uses(user) if _ends(one, at)]
            if len(found) != len(_uses(user)) or None in found:
                return None
            gradients += [(user, node) for nodes in found for node in nodes or []]
        elif user.target is not _aten._log_softmax_backward_data.default or place != 1:
            return None
    return _Found(logits, (shape[0], shape[1]), losses[0], tuple(gradients)) if len(losses) == 1 else None


def _plain(node: Node, first: int = 0) -> bool:
    """Whether classes weigh the same, and losses are not reduced."""
    weight, reduction = node.args[first + 2 : first + 4]
    return (weight, reduction) == (None, 0)


def _ends(node: Node, place: int) -> bool:
    return node.target is _aten._log_softmax_backward_data.default and place == 0


def _halved(gradient: Node, kind: torch.dtype) -> list[Node] | None:
    """Where the gradient is rounded to half precision; None if something else reads it."""
    users = [user for user, _ in _uses(gradient)]
    halved = all(user.target is _aten._to_copy.default and user.kwargs.get("dtype") == kind for user in users)
    return users if halved else None


def rewrite(graph: Graph, found: _Found) -> None:
    """Put the two kernels in place of what was found; what nobody reads any more is left to the compiler."""
    from hush.kernels.gradients.cross_entropy import wide_enough

    rows, columns = found.shape
    over = wide_enough(columns) - columns
    classes, ignored = found.losses.args[1], found.losses.args[4]
    padded: dict[Node, Node] = {}

    def call(target: Any, *args: Any, **kwargs: Any) -> Node:
        return graph.call_function(target, args, kwargs)

    with graph.inserting_before(found.losses):
        product, weight = _product(found.logits)
        if weight is not None and over:
            # Whole rows of block copies, in the product as well: the same sums, and columns that nobody looks at.
            padded[weight] = call(_aten.constant_pad_nd.default, weight, [0, 0, 0, over], 0.0)
            wide = call(_aten.mm.default, product.args[0], call(_aten.t.default, padded[weight]))
            logits = call(_aten.slice.Tensor, wide, 1, 0, columns)
        else:
            logits = call(_aten.view.default, found.logits, [rows, columns])
        sums = call(torch.ops.hush.log_sums.default, logits)
        counts = call(_aten.ne.Scalar, classes, ignored)
        chosen = call(_aten.unsqueeze.default, call(_aten.where.ScalarOther, counts, classes, 0), 1)
        chosen = call(_aten.squeeze.dim, call(_aten.gather.default, logits, 1, chosen), 1)
        chosen = call(_aten._to_copy.default, chosen, dtype=torch.float32)
        losses = call(_aten.where.ScalarOther, counts, call(_aten.sub.Tensor, sums, chosen), 0.0)
    for user in [user for user in found.losses.users if user.target is getitem and user.args[1] == 0]:
        user.replace_all_uses_with(losses)
    for backward, rounded in found.gradients:
        with graph.inserting_before(rounded):
            weights = call(_aten.where.ScalarOther, counts, backward.args[0], 0.0)
            whole = call(torch.ops.hush.logit_gradients.default, logits, sums, classes, weights)
            part = call(_aten.slice.Tensor, whole, 1, 0, columns) if over else whole
            seen = call(_aten.view.default, part, list(rounded.meta["val"].shape))
        readers = _uses(rounded)
        rounded.replace_all_uses_with(seen)
        for reader, place in readers if over else []:
            _read_whole(graph, whole, reader, place, (rows, columns, over), padded)


def _read_whole(
    graph: Graph, whole: Node, reader: Node, place: int, sizes: tuple[int, int, int], padded: dict[Node, Node]
) -> None:
    """A reader of the gradient that wants it padded, or does not mind, reads it as it was written."""
    rows, columns, over = sizes
    shape = list(reader.meta["val"].shape)
    with graph.inserting_before(reader):
        if reader.target is _aten.constant_pad_nd.default:
            zeros = not any(reader.args[2:])
            if zeros and reader.args[1] == [0, over] and shape[-1] == columns + over:
                reader.replace_all_uses_with(graph.call_function(_aten.view.default, (whole, shape)))
        elif reader.target is _aten.mm.default and place == 0 and shape[0] == rows:
            weight = _untwisted(_argument(reader, 1))
            if weight not in padded:
                more = (weight, [0, 0, 0, over], 0.0)
                padded[weight] = graph.call_function(_aten.constant_pad_nd.default, more)
            reader.args = (whole, padded[weight])


def _product(logits: Node) -> tuple[Node, Node | None]:
    """The node behind the logits, and if it is a product that nothing else reads, its weight [classes, inputs]."""
    product = _behind(logits)
    alone = [user for user, _ in _uses(product)] == [user for user, _ in _uses(logits)]
    if product.target is _aten.mm.default and alone and _argument(product, 1).target is _aten.t.default:
        return product, _argument(_argument(product, 1))
    return product, None


def _untwisted(node: Node) -> Node:
    """The matrix itself where it was transposed twice."""
    turned = node.target is _aten.t.default and _argument(node).target is _aten.t.default
    return _argument(_argument(node)) if turned else node


def _behind(node: Node) -> Node:
    """The node of which this one is only a view."""
    while node.target in _VIEWS:
        node = _argument(node)
    return node


def _argument(node: Node, place: int = 0) -> Node:
    found = node.args[place]
    assert isinstance(found, Node)
    return found


def _uses(node: Node) -> list[tuple[Node, int]]:
    """The nodes that read this one, or a view of it, and as which argument (-1: by name, or among others in a list)."""
    found: list[tuple[Node, int]] = []
    for user in node.users:
        if user.target in _VIEWS:
            found += _uses(user)
        else:
            found += [(user, place) for place, arg in enumerate(user.args) if arg is node] or [(user, -1)]
    return found
