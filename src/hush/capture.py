"""Forward, backward, norms and clipped sum of a batch as one region, captured in a CUDA graph where there is one.

The region reads the batch and its mask from fixed buffers, so its shapes must not change; a lot is padded to full
batches for that. On other devices the region simply runs, with the same results.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hush.gradients.bounded import BoundedSum
from hush.gradients.clip import Clip, QuantileClip
from hush.gradients.clipped import clipped_sum
from hush.guards import check_losses
from hush.loading import leaves_of, map_leaves
from hush.lots import Handed

_WARM_UP = 3  # runs before the capture, in which libraries choose their kernels and the engine makes its plan


@dataclass
class _Graph:
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    total: BoundedSum


class Region:
    """The clipped sum of a batch as a function of the batch; `losses_of(*batch)` gives one loss per row and copy."""

    def __init__(self, losses_of: Callable[..., Tensor], *, copies: int = 1, allow_unused: bool = False) -> None:
        self._losses_of = losses_of
        self._copies = copies
        self._allow_unused = allow_unused
        self._graphs: dict[object, _Graph] = {}

    def __call__(
        self, parameters: Mapping[str, nn.Parameter], clip: Clip, batch: Sequence[Any], handed: Handed
    ) -> BoundedSum:
        """The sum over the rows that count, in tensors that the next call may overwrite."""
        leaves = leaves_of(tuple(batch))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        fixed = handed.mask is not None and len(tensors) == len(leaves) and all(tensor.is_cuda for tensor in tensors)
        if not fixed or isinstance(clip, QuantileClip):  # its bound moves from lot to lot, that of a graph does not
            return self._run(parameters, clip, batch, handed)
        assert handed.mask is not None
        given = [*tensors, handed.mask]
        traits = tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in given)
        key = (traits, clip, handed.size, tuple((name, id(p), p.data_ptr()) for name, p in parameters.items()))
        found = self._graphs.get(key)
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
        places = iter(inputs)
        static = tuple(map_leaves(lambda _: next(places), part) for part in batch)
        shape = handed._replace(mask=inputs[-1])
        side = torch.cuda.Stream(inputs[0].device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP):
                self._run(parameters, clip, static, shape)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            total = self._run(parameters, clip, static, shape)
        return _Graph(graph, inputs, total)
