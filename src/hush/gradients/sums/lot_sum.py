"""The sum over the batches of one lot: results equal one big batch, and the bound does not tell how the lot was cut."""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from hush.clipping.bounded_sum import BoundedSum
from hush.clipping.clips import Clip
from hush.gradients.sums.clipped import summed


class Later(Protocol):
    """A sum that is computed when it is needed, into tensors that belong to somebody who will write into them again."""

    @property
    def total(self) -> BoundedSum: ...
    def compute(self) -> None: ...


class LotSum:
    """Adds up the clipped sums of a lot's batches, the first as it comes, further ones in fp64.

    Its bound is that of the clip, whatever was added: the noise must not tell what was in a lot. A batch with a larger
    bound of its own is refused.
    """

    def __init__(self) -> None:
        self.additions = 0
        """Of batches, begun or done: it tells after an error whether anything was added."""
        self.clear()

    def clear(self) -> None:
        self._torn = False
        self._tensors: dict[str, Tensor] | None = None
        self._count: BoundedSum | None = None
        self._borrowed = False
        self._later: Later | None = None

    @property
    def put_off(self) -> Later | None:
        """The sum that is still to be computed; it is all of the lot so far."""
        return self._later

    def add_later(self, batch: Later, clip: Clip, *, now: bool) -> None:
        """Add a batch whose tensors are borrowed: computed now, or when the sum is asked for or another batch comes."""
        if now or self._later is not None or self._tensors is not None:
            self.keep()
            batch.compute()
            self.add(batch.total, clip, borrowed=True)
            return
        _check_bounds(batch.total, clip)
        self.additions += 1
        self._later = batch

    def must_be_whole(self) -> None:
        """Refuse a sum in which an addition was interrupted."""
        if self._torn:
            raise RuntimeError(
                "a batch was interrupted while it was added, and is in the sum in part: begin the lot again with "
                "private.restart(), or give it up with private.abandon()"
            )

    def keep(self) -> None:
        """Compute what was put off and copy what is borrowed, before its owner overwrites it."""
        if self._later is not None:
            self._compute()
        if self._borrowed and self._tensors is not None:
            self._tensors = {name: tensor.clone() for name, tensor in self._tensors.items()}
        self._borrowed = False

    @torch.no_grad()
    def add(self, batch: BoundedSum, clip: Clip, *, borrowed: bool = False) -> None:
        """Add a batch; of `borrowed` tensors the owner must call `keep` before it writes into them again."""
        self._compute()
        _check_bounds(batch, clip)
        self.additions += 1
        self._torn = True
        self._add(batch, borrowed)
        self._torn = False

    def _add(self, batch: BoundedSum, borrowed: bool) -> None:
        if self._tensors is None:
            self._tensors, self._borrowed = {name: t.detach() for name, t in batch.tensors.items()}, borrowed
            self._count = batch.count
            return
        for name, tensor in batch.tensors.items():
            if self._tensors[name].dtype != torch.float64:
                self._tensors[name] = self._tensors[name].double()
            elif self._borrowed:
                self._tensors[name] = self._tensors[name].clone()
            self._tensors[name] += tensor
        self._borrowed = False
        self._count = self._count + batch.count if self._count is not None and batch.count is not None else None

    def total(self, parameters: Mapping[str, Tensor], clip: Clip) -> BoundedSum:
        """The lot's sum with the bounds of its clip; zeros for a lot without examples."""
        self._compute()
        tensors, count = self._tensors, self._count
        if tensors is None:
            nothing = summed({}, parameters, clip, batch=0)
            tensors, count = dict(nothing.tensors), nothing.count
        return BoundedSum(tensors, clip.sum_bounds(parameters), count)

    def _compute(self) -> None:
        if self._later is not None:
            self._later.compute()  # if it fails it stays to be computed: its tensors hold an older lot's sum
            total = self._later.total
            self._tensors, self._count, self._borrowed = dict(total.tensors), total.count, True
            self._later = None  # last: until then it is computed again, and never lost


def _check_bounds(batch: BoundedSum, clip: Clip) -> None:
    allowed = clip.sum_bounds(batch.tensors)
    if any(group.bound > most.bound for group, most in zip(batch.groups, allowed, strict=True)):
        raise ValueError(
            f"expected a batch whose bounds are those of its lot, {[group.bound for group in allowed]}, got "
            f"{[group.bound for group in batch.groups]}: noise of the lot's scale would not cover it"
        )
