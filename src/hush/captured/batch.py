"""The clipped sum of a batch as a function of the batch, recorded in a CUDA graph where there is one.

The region reads the batch and its mask from fixed buffers, so its shapes must not change; a lot is padded to full
batches for that. On other devices the region simply runs, with the same results.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor, nn

from hush.captured import cuda_graphs as graphs
from hush.captured.compiled import compiled
from hush.clipping.bounded_sum import BoundedSum
from hush.clipping.clips import Clip, QuantileClip
from hush.gradients.engine import Gradients, Inputs
from hush.sampling.batches import Batch

_WARM_UP = 3  # runs before the capture, in which libraries choose their kernels and the engine makes its plan
_KEPT = 4  # captured shapes; each holds memory of its own
_TENSOR = {Tensor}
_version = attrgetter("_version")


@dataclass
class CapturedSum:
    """A captured region: where it reads a batch and its mask, and the sums that a replay writes."""

    recording: graphs.Recording
    parameters: list[nn.Parameter]
    inputs: list[Tensor]
    function: Callable[[list[Tensor]], list[Tensor]]
    total: BoundedSum
    words: list[Tensor] | None
    """The buffers of the batch, seen as 32-bit words where that is possible."""
    filled: int | None = None
    """The rows that count by the mask in the buffer, where it is known."""


class Placed:
    """A batch that lies where a captured region reads it and is not computed yet; `watched` must not change before."""

    def __init__(self, region: CapturedSum, watched: list[Tensor], state: list[int]) -> None:
        self.region = region
        self.total = region.total
        """Where the sum will be; its bounds are known already."""
        self._watched = watched
        self._before = state

    def compute(self) -> None:
        """Write the batch's sum into `total`."""
        self.must_be_fresh()
        self.region.recording.replay()

    def accept_changes(self) -> None:
        """The sum is to be computed for the parameters as they are now."""
        self._before = _state(self._watched)

    def must_be_fresh(self) -> None:
        """Refuse parameters that are not those that the batch was added for."""
        if _state(self._watched) != self._before:
            raise RuntimeError(
                "parameters were changed between the batch and private.step(optimizer), which computes a captured "
                "batch; change them after the step, or call private.restart() to begin the lot again"
            )


class Region:
    """The clipped sum of a batch as a function of the batch, captured where it is padded and lies on a GPU."""

    def __init__(self, gradients: Gradients, *, compile: bool = False) -> None:
        self._gradients = gradients
        self._compile = compile
        self._captured: list[tuple[list[object], CapturedSum]] = []
        self._last_clip: Clip | None = None

    def forget(self) -> None:
        """Let go of everything that was captured."""
        self._captured.clear()

    def run(self, parameters: Mapping[str, nn.Parameter], clip: Clip, inputs: Inputs, batch: Batch) -> BoundedSum:
        """The sum over the rows that count, computed now, by the code of the model."""
        device = next(iter(parameters.values())).device
        return self._gradients.clipped_sum(inputs, clip, mask=batch.counting(device), rows=batch.size)

    def place(
        self,
        parameters: Mapping[str, nn.Parameter],
        clip: Clip,
        inputs: Inputs,
        batch: Batch,
        state: Sequence[object],
    ) -> tuple[Placed | None, bool]:
        """Put the batch where its captured region reads it; and whether no code of the model ran for that.

        None where the batch must be run: it is not padded, not on a GPU, asks for gradients of its own, or its clipping
        bound moves from lot to lot.
        `state` stands for all else that the forward pass depends on; another value is captured anew.
        """
        if batch.filled is None:
            return None, False
        leaves, structure = list(inputs.args), ""
        if inputs.kwargs or not _TENSOR.issuperset(map(type, leaves)):
            leaves = [tensor for _, tensor in inputs.tensors()]
            structure = repr(inputs.map(lambda leaf: leaf.new_empty(0, device="meta")))  # what is no tensor by value
            if not leaves:
                return None, False
        traits = [trait for leaf in leaves for trait in (leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad)]
        watched: list[Tensor] = list(parameters.values())
        now = _state(watched)
        key = [structure, clip, batch.size, *state, *traits, *now[: len(watched)]]
        last_clip, self._last_clip = self._last_clip, clip
        for known, region in self._captured:
            if known == key:
                _fill(region, leaves, batch)
                return Placed(region, watched, now), True
        steady = last_clip is None or clip == last_clip
        if not steady or isinstance(clip, QuantileClip) or not graphs.possible(leaves):
            return None, False
        if any(leaf.requires_grad for leaf in leaves):
            return None, False
        del self._captured[: 1 - _KEPT]
        gpu = [leaves[0].device] if leaves[0].is_cuda else []
        with torch.random.fork_rng(devices=gpu):  # a resumed run captures anew, and must draw what it would have
            region = self._capture(parameters, clip, inputs, leaves, batch)
        self._captured.append((key, region))
        _fill(region, leaves, batch)
        return Placed(region, watched, _state(watched)), False

    def _capture(
        self,
        parameters: Mapping[str, nn.Parameter],
        clip: Clip,
        inputs: Inputs,
        leaves: list[Tensor],
        batch: Batch,
    ) -> CapturedSum:
        mask = batch.counting(leaves[0].device)
        assert mask is not None
        places = [leaf.clone() for leaf in leaves] + [mask.clone()]

        def whole(tensors: list[Tensor]) -> BoundedSum:
            parts = iter(tensors)
            static = inputs.map(lambda _: next(parts))
            return self._gradients.clipped_sum(static, clip, mask=tensors[-1], rows=batch.size)

        def sums(tensors: list[Tensor]) -> list[Tensor]:
            return list(whole(tensors).tensors.values())

        groups = graphs.warm_up(lambda: whole(places), _WARM_UP).groups
        # A trace computes as well, and that may not reserve memory on a second stream.
        function = graphs.warm_up(lambda: compiled(sums, places), 1) if self._compile else sums
        graphs.warm_up(lambda: function(places), 1)
        recording, tensors = graphs.record(lambda: function(places))
        total = BoundedSum(dict(zip(parameters, tensors, strict=True)), groups)
        return CapturedSum(recording, list(parameters.values()), places, function, total, _words(places[:-1]))


def _fill(region: CapturedSum, leaves: list[Tensor], batch: Batch) -> None:
    if region.filled != batch.filled:
        region.filled = None  # unknown if anything below fails
        mask = batch.counting(region.inputs[-1].device)
        assert mask is not None
        region.inputs[-1].copy_(mask)
        region.filled = batch.filled
    # One kernel for all, whatever their dtypes, where they can be seen as the same kind of words.
    words = None if region.words is None else _words(leaves)
    if region.words is None or words is None:
        torch._foreach_copy_(region.inputs[:-1], leaves)
    else:
        torch._foreach_copy_(region.words, words)


def _words(tensors: list[Tensor]) -> list[Tensor] | None:
    """The tensors seen as 32-bit words; None where one of them cannot be."""
    try:
        return [tensor.view(torch.int32) for tensor in tensors]
    except RuntimeError:
        return None


def _state(tensors: Sequence[Tensor]) -> list[int]:
    """Where the tensors lie, and then how often each was changed."""
    return [*map(Tensor.data_ptr, tensors), *map(_version, tensors)]
