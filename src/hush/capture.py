"""A step in two regions, captured in CUDA graphs where there are any: the clipped sum of a batch; noise and update.

The region reads the batch and its mask from fixed buffers, so its shapes must not change; a lot is padded to full
batches for that. On other devices the region simply runs, with the same results.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hush import kernels
from hush.gradients.bounded import BoundedSum
from hush.gradients.clip import Clip, QuantileClip
from hush.gradients.clipped import clipped_sum
from hush.guards import check_losses
from hush.loading import leaves_of, map_leaves
from hush.noise import Part
from hush.normals import Normals
from hush.padding import Handed
from hush.tracing import compiled

_WARM_UP = 3  # runs before the capture, in which libraries choose their kernels and the engine makes its plan


@dataclass
class _Graph:
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    total: BoundedSum


class Region:
    """The clipped sum of a batch as a function of the batch; `losses_of(*batch)` gives one loss per row and copy."""

    def __init__(
        self, losses_of: Callable[..., Tensor], *, copies: int = 1, allow_unused: bool = False, compile: bool = False
    ) -> None:
        self._losses_of = losses_of
        self._copies = copies
        self._allow_unused = allow_unused
        self._compile = compile
        self.replayed = False
        """Whether the last call was a replay, in which no code of the model ran."""
        self._graphs: dict[object, _Graph] = {}

    def __call__(
        self, parameters: Mapping[str, nn.Parameter], clip: Clip, batch: Sequence[Any], handed: Handed
    ) -> BoundedSum:
        """The sum over the rows that count, in tensors that the next call may overwrite."""
        leaves = leaves_of(tuple(batch))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        fixed = handed.mask is not None and len(tensors) == len(leaves) and all(tensor.is_cuda for tensor in tensors)
        self.replayed = False
        if not fixed or isinstance(clip, QuantileClip):  # its bound moves from lot to lot, that of a graph does not
            return self._run(parameters, clip, batch, handed)
        assert handed.mask is not None
        given = [*tensors, handed.mask]
        traits = tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in given)
        key = (traits, clip, handed.size, tuple((name, id(p), p.data_ptr()) for name, p in parameters.items()))
        found = self._graphs.get(key)
        self.replayed = found is not None
        if found is None:
            found = self._graphs[key] = self._capture(parameters, clip, batch, handed, given)
        torch._foreach_copy_(found.inputs, given)
        found.graph.replay()
        return found.total

    def _run(
        self, parameters: Mapping[str, nn.Parameter], clip: Clip, batch: Sequence[Any], handed: Handed
    ) -> BoundedSum:
        with torch.enable_grad():
            losses = self._losses_of(*batch)
            check_losses(losses, handed.rows, self._copies)
            if self._copies > 1:
                losses = losses.reshape(handed.rows, self._copies).mean(1)
        return clipped_sum(
            losses, parameters, clip, mask=handed.mask, rows=handed.size, allow_unused=self._allow_unused
        )

    def _capture(
        self,
        parameters: Mapping[str, nn.Parameter],
        clip: Clip,
        batch: Sequence[Any],
        handed: Handed,
        given: Sequence[Tensor],
    ) -> _Graph:
        inputs = [tensor.clone() for tensor in given]

        def whole(tensors: list[Tensor]) -> BoundedSum:
            places = iter(tensors)
            static = tuple(map_leaves(lambda _: next(places), part) for part in batch)
            return self._run(parameters, clip, static, handed._replace(mask=tensors[-1]))

        def sums(tensors: list[Tensor]) -> list[Tensor]:
            return list(whole(tensors).tensors.values())

        side = torch.cuda.Stream(inputs[0].device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP):
                groups = whole(inputs).groups
            function = compiled(sums, inputs) if self._compile else sums
            function(inputs)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tensors = function(inputs)
        return _Graph(graph, inputs, BoundedSum(dict(zip(parameters, tensors, strict=True)), groups))


class PlannedRelease(NamedTuple):
    """What is released in a step, and from which numbers the noise is made."""

    parts: Sequence[Part]
    scale: float
    normals: Normals
    step: int


class Update:
    """Noise and optimizer as one CUDA graph, for sums that come in the same tensors step after step.

    Guarantee: the numbers of a step are read from a table in device memory, which is written before each replay; they
    are the same as those of the step outside a graph, and no replay repeats those of another step. A combination of
    tensors and settings is captured the second time that it is seen, so learning rates that change in every step are
    never captured.
    """

    def __init__(self) -> None:
        self._seen: object = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._release: Any = None

    def prepare(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[nn.Parameter],
        planned: "PlannedRelease",
    ) -> Callable[[], None] | None:
        """The update of this step, ready to run; None where it cannot be captured, or not yet."""
        parts, scale, normals, step = planned
        if not (_capturable(optimizer) and kernels.available() and all(part.total.is_cuda for part in parts)):
            return None
        from hush.kernels.gaussian import Release, fits

        same = all(part.out.dtype == parameter.dtype for parameter, part in zip(parameters, parts, strict=True))
        if not (fits(parts) and same):
            return None
        subkey = normals.subkey(0)
        tensors = [tensor for pair in zip(parameters, parts, strict=True) for tensor in (pair[0], pair[1].total)]
        state = [value for values in optimizer.state.values() for value in values.values()]
        if not all(isinstance(value, Tensor) and value.is_cuda for value in state if value is not None):
            return None
        tensors += [value for value in state if value is not None]
        key = (subkey, scale, _settings(optimizer), tuple(tensor.data_ptr() for tensor in tensors))
        if key != self._seen or optimizer is not self._optimizer:
            self._seen, self._optimizer, self._graph = key, optimizer, None
            return None
        if self._graph is None:
            self._release = Release(parts, scale=scale, subkey=subkey, step=step)
        normals.begin(step)
        deviations = [part.deviation for part in parts]

        def run() -> None:
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.grad = part.out
            self._release.at(step, deviations)
            if self._graph is None:
                self._graph = _captured(self._release, optimizer)
            self._graph.replay()

        return run


def _captured(release: Any, optimizer: torch.optim.Optimizer) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        release.launch()
        optimizer.step()
    return graph


def _capturable(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a replay does what a call would: all state on the device, no hooks."""
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return False
    kind = type(optimizer)
    return kind is torch.optim.SGD or (
        kind in (torch.optim.Adam, torch.optim.AdamW) and all(group["capturable"] for group in optimizer.param_groups)
    )


def _settings(optimizer: torch.optim.Optimizer) -> tuple[object, ...]:
    return tuple(
        (name, id(value) if isinstance(value, Tensor) else value)
        for group in optimizer.param_groups
        for name, value in group.items()
        if name != "params"
    )
