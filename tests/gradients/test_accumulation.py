"""Batches add up to a lot: in fp64, under a bound that covers each of them."""

import pytest
import torch
from torch import nn

from hush.clipping.bounded_sum import BoundedSum, Group
from hush.clipping.clips import FlatClip
from hush.gradients.sums.lot_sum import LotSum


class Later:
    """A sum that is computed when it is asked for, always into the same memory."""

    def __init__(self, memory: torch.Tensor, value: float) -> None:
        self.total = BoundedSum({"w": memory}, (Group(("w",), 2.0),))
        self.value = value

    def compute(self) -> None:
        self.total.tensors["w"].fill_(self.value)


def test_what_was_put_off_is_computed_before_its_memory_is_used_again() -> None:
    memory, clip = torch.full((2,), -1.0), FlatClip(2.0)
    parameters, total = {"w": nn.Parameter(torch.zeros(2))}, LotSum()
    total.add_later(Later(memory, 3.0), clip, now=False)
    assert memory.tolist() == [-1.0, -1.0], "not yet"
    total.keep()
    memory.fill_(100.0)
    assert total.total(parameters, clip).tensors["w"].tolist() == [3.0, 3.0]
    for now in (False, True):
        total.clear()
        total.add_later(Later(memory, 3.0), clip, now=False)
        total.add_later(Later(memory, 4.0), clip, now=now)
        assert total.total(parameters, clip).tensors["w"].tolist() == [7.0, 7.0]


def batch(value: float, bound: float) -> BoundedSum:
    return BoundedSum({"w": torch.full((2,), value)}, (Group(("w",), bound),))


def test_hazard_35_the_bound_is_that_of_the_clip_whatever_was_added() -> None:
    parameters, total, clip = {"w": nn.Parameter(torch.zeros(2))}, LotSum(), FlatClip(2.0)
    bounds = [total.total(parameters, clip).groups]
    for value, bound in ((1e8, 2.02), (1.0, 1.9), (-1e8, 2.0)):
        total.add(batch(value, bound), clip)
        bounds.append(total.total(parameters, clip).groups)
    assert total.total(parameters, clip).tensors["w"].tolist() == [1.0, 1.0], "batches are added in fp64"
    assert bounds == [(Group(("w",), 2.0 * 1.01),)] * 4
    borrowed = batch(1.0, 2.0)
    total.clear()
    total.add(borrowed, clip, borrowed=True)
    total.keep()
    borrowed.tensors["w"].zero_()
    assert total.total(parameters, clip).tensors["w"].tolist() == [1.0, 1.0]


def test_a_batch_with_a_larger_bound_than_the_lots_is_refused() -> None:
    total, memory = LotSum(), torch.zeros(2)
    with pytest.raises(ValueError, match="expected a batch whose bounds"):
        total.add(batch(1.0, 2.03), FlatClip(2.0))
    with pytest.raises(ValueError, match="expected a batch whose bounds"):
        total.add_later(Later(memory, 3.0), FlatClip(1.0), now=False)
    assert total.put_off is None
