"""The clipped sum of a batch as a function of the batch, recorded in a CUDA graph where there is one.

The region reads the batch and its mask from fixed buffers, so its shapes must not change; a lot is padded to full
batches for that. On other devices the region simply runs, with the same results.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from hush.captured import cuda_graphs as graphs
from hush.captured.compiled import compiled
from hush.checks.guards import check_losses
from hush.clipping.bounded_sum import BoundedSum
from hush.clipping.clips import Clip, QuantileClip
from hush.gradients.clipped import clipped_sum
from hush.sampling.batches import Handed, rows_that_count
from hush.sampling.loader import leaves_of, map_leaves

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
        """Refuse parameters, and a batch read in place, that are not those that were handed over."""
        if _state(self._watched) != self._before:
            raise RuntimeError(
                "parameters, or the tensors of a batch read in place, were changed between the batch and "
                "private.step(optimizer), which computes a captured batch; change them after the step, or call "
                "private.restart() to begin the lot again"
            )


class Region:
    """The clipped sum of a batch as a function of the batch; `losses_of(*batch)` gives one loss per row and copy.

    With `in_place` a captured batch is read where it lies, not copied.
    """

    def __init__(
        self,
        losses_of: Callable[..., Tensor],
        *,
        copies: int = 1,
        allow_unused: bool = False,
        compile: bool = False,
        in_place: bool = False,
    ) -> None:
        self._losses_of = losses_of
        self._copies = copies
        self._allow_unused = allow_unused
        self._compile = compile
        self._in_place = in_place
        self._captured: list[tuple[list[object], CapturedSum]] = []
        self._last_clip: Clip | None = None

    def forget(self) -> None:
        """Let go of everything that was captured."""
        self._captured.clear()

    def run(
        self, parameters: Mapping[str, nn.Parameter], clip: Clip, batch: Sequence[Any], handed: Handed
    ) -> BoundedSum:
        """The sum over the rows that count, computed now, by the code of the model."""
        device = next(iter(parameters.values())).device
        return self._sum(parameters, clip, batch, (handed.rows, handed.size), rows_that_count(handed, device))

    def place(
        self,
        parameters: Mapping[str, nn.Parameter],
        clip: Clip,
        batch: Sequence[Any],
        handed: Handed,
        state: Sequence[object],
    ) -> tuple[Placed | None, bool]:
        """Put the batch where its captured region reads it; and whether no code of the model ran for that.

        None where the batch must be run: it is not padded, not on a GPU, asks for gradients of its own, or its clipping
        bound moves from lot to lot.
        `state` stands for all else that the forward pass depends on; another value is captured anew.
        """
        if handed.filled is None:
            return None, False
        leaves, structure = list(batch), ""
        if not _TENSOR.issuperset(map(type, leaves)):
            leaves, structure = leaves_of(batch), repr(map_leaves(type, batch))
            if not all(isinstance(leaf, Tensor) for leaf in leaves):
                return None, False
        traits = [trait for leaf in leaves for trait in (leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad)]
        watched: list[Tensor] = list(parameters.values())
        if self._in_place:
            traits += map(Tensor.stride, leaves)
            watched += leaves
        now = _state(watched)
        key = [structure, clip, handed.size, *state, *traits, *now[: len(watched)]]
        last_clip, self._last_clip = self._last_clip, clip
        for known, region in self._captured:
            if known == key:
                self._fill(region, leaves, handed)
                return Placed(region, watched, now), True
        steady = last_clip is None or clip == last_clip
        if not steady or isinstance(clip, QuantileClip) or not graphs.possible(leaves):
            return None, False
        if any(leaf.requires_grad for leaf in leaves):
            return None, False
        self._make_room(leaves)
        before = _state(leaves)
        gpu = [leaves[0].device] if leaves[0].is_cuda else []
        with torch.random.fork_rng(devices=gpu):  # a resumed run captures anew, and must draw what it would have
            region = self._capture(parameters, clip, batch, handed)
        if self._in_place and _state(leaves) != before:
            raise RuntimeError("the forward pass writes into its batch, which then cannot be in_place: leave that out")
        self._captured.append((key, region))
        self._fill(region, leaves, handed)
        return Placed(region, watched, _state(watched)), False

    def _make_room(self, leaves: list[Tensor]) -> None:
        """Let go of the oldest capture; refuse batches in place that never lie where one lay before."""
        places = {tuple(map(Tensor.data_ptr, region.inputs[:-1])) for _, region in self._captured}
        if self._in_place and len(places) == _KEPT and tuple(map(Tensor.data_ptr, leaves)) not in places:
            raise ValueError(
                f"expected in_place batches in the same memory each time, in {_KEPT} places at most, got another one: "
                "copy each batch into the same tensors, or leave in_place out"
            )
        del self._captured[: 1 - _KEPT]

    def _sum(
        self,
        parameters: Mapping[str, nn.Parameter],
        clip: Clip,
        batch: Sequence[Any],
        shape: tuple[int, int],
        mask: Tensor | None,
    ) -> BoundedSum:
        rows, size = shape
        with torch.enable_grad():
            losses = self._losses_of(*batch)
            check_losses(losses, rows, self._copies)
            if self._copies > 1:
                losses = losses.reshape(rows, self._copies).mean(1)
        return clipped_sum(losses, parameters, clip, mask=mask, rows=size, allow_unused=self._allow_unused)

    def _capture(
        self, parameters: Mapping[str, nn.Parameter], clip: Clip, batch: Sequence[Any], handed: Handed
    ) -> CapturedSum:
        leaves = leaves_of(batch)
        mask = rows_that_count(handed, leaves[0].device)
        assert mask is not None
        inputs = [leaf.detach() if self._in_place else leaf.clone() for leaf in leaves] + [mask.clone()]

        def whole(tensors: list[Tensor]) -> BoundedSum:
            places = iter(tensors)
            static = tuple(map_leaves(lambda _: next(places), part) for part in batch)
            return self._sum(parameters, clip, static, (handed.rows, handed.size), tensors[-1])

        def sums(tensors: list[Tensor]) -> list[Tensor]:
            return list(whole(tensors).tensors.values())

        groups = graphs.warm_up(lambda: whole(inputs), _WARM_UP).groups
        # A trace computes as well, and that may not reserve memory on a second stream.
        function = graphs.warm_up(lambda: compiled(sums, inputs), 1) if self._compile else sums
        graphs.warm_up(lambda: function(inputs), 1)
        recording, tensors = graphs.record(lambda: function(inputs))
        total = BoundedSum(dict(zip(parameters, tensors, strict=True)), groups)
        return CapturedSum(recording, list(parameters.values()), inputs, function, total, _words(inputs[:-1]))

    def _fill(self, region: CapturedSum, leaves: list[Tensor], handed: Handed) -> None:
        if region.filled != handed.filled or not handed.untouched:
            region.filled = None  # unknown if anything below fails
            mask = rows_that_count(handed, region.inputs[-1].device)
            assert mask is not None
            region.inputs[-1].copy_(mask)
            region.filled = handed.filled if handed.untouched else None
        if self._in_place:
            return
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
