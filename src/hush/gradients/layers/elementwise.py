"""Parameters that meet data element by element: biases, scales, gates, learned tokens and positions, slopes."""

from collections.abc import Callable

from torch import Tensor

from hush.gradients.sums.per_example import Contribution, Layout, Rule, Site, Stored, wide


def reduce(values: Tensor, layout: Layout, shape: tuple[int, ...]) -> Tensor | None:
    """[output shape] -> [batch, *shape]: sums by example over all along which a tensor of `shape` was broadcast.

    None if the tensor has entries of its own for each example (it was not broadcast along their dimension).
    """
    padded = (1,) * (values.dim() - len(shape)) + shape
    if len(padded) != values.dim() or padded[layout.dim] != 1:
        return None
    split = layout.split(values)
    rest = [size for dim, size in enumerate(padded) if dim != layout.dim]
    collapsed = [1, *[dim for dim, size in enumerate(rest, 2) if size == 1 and split.shape[dim] != 1]]
    if split.shape[1] == 1:
        collapsed = collapsed[1:]
    return (split.sum(collapsed) if collapsed else split).reshape(layout.batch, *shape)


def _rule(factor: Callable[[Site, int], Tensor | float | None], saved: tuple[str, ...]) -> Rule:
    """The gradient of input k is factor(site, k) times that of the output, summed to the shape of the input."""

    def contributions(site: Site) -> dict[int, Contribution] | None:
        found: dict[int, Contribution] = {}
        for index in site.wanted:
            shape, by = site.shapes[index], factor(site, index)
            if shape is None or by is None:
                return None
            gradient = wide(site.grad)
            if isinstance(by, Tensor) or by != 1:
                gradient = gradient * (wide(by) if isinstance(by, Tensor) else by)
            if gradient.shape != site.grad.shape:
                return None
            values = reduce(gradient, site.layout, shape)
            if values is None:
                return None
            found[index] = Stored(values)
        return found

    return Rule(contributions, saved)


def _alpha(site: Site, index: int) -> float:
    return 1 if index == 0 else site.saved["alpha"]


def _minus_alpha(site: Site, index: int) -> float:
    return 1 if index == 0 else -site.saved["alpha"]


def _other_factor(site: Site, index: int) -> Tensor | None:
    return site.saved["other"] if index == 0 else site.saved["self"]


def _one(site: Site, index: int) -> float:
    return 1


def _negative_part(site: Site, index: int) -> Tensor | None:
    return site.saved["self"].clamp(max=0) if index == 1 else None


def _repeat(site: Site) -> dict[int, Contribution] | None:
    """A repeated tensor: the gradient of one example is split into the copies, and these are added up."""
    shape, repeats, layout = site.shapes[0], tuple(site.saved["repeats"]), site.layout
    if shape is None or len(shape) != len(repeats):
        return None
    dim, size = layout.dim, shape[layout.dim]
    rows = layout.outer * layout.batch * layout.inner
    if layout.order is not None or layout.inner % size or rows != repeats[dim] * size:
        return None
    split = wide(layout.split(site.grad))
    split = split.unflatten(1, (-1, size)).sum(1)
    split = split.movedim(1, dim + 1)
    for other, (times, width) in enumerate(zip(repeats, shape, strict=True), 1):
        if other != dim + 1 and times != 1:
            split = split.unflatten(other, (times, width)).sum(other)
    return {0: Stored(split)}


RULES = {
    "AddBackward0": _rule(_alpha, saved=("alpha",)),
    "SubBackward0": _rule(_minus_alpha, saved=("alpha",)),
    "MulBackward0": _rule(_other_factor, saved=("self", "other")),
    "ExpandBackward0": _rule(_one, saved=()),
    "PreluKernelBackward0": _rule(_negative_part, saved=("self",)),
    "RepeatBackward0": Rule(_repeat, saved=("repeats",)),
}
