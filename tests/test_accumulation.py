"""Batches add up to a lot: in fp64, under a bound that covers each of them."""

import pytest
import torch
from torch import nn

from hush.accumulation import LotSum
from hush.gradients.bounded import BoundedSum, Group
from hush.gradients.clip import FlatClip


def test_the_bound_covers_every_batch_and_forgets_no_slack() -> None:
    def batch(value: float, bound: float) -> BoundedSum:
        return BoundedSum({"w": torch.full((2,), value)}, (Group(("w",), bound),))

    parameters, total = {"w": nn.Parameter(torch.zeros(2))}, LotSum()
    for value, bound in ((1e8, 2.02), (1.0, 2.2), (-1e8, 2.0)):
        total.add(batch(value, bound), FlatClip(2.0))
    result = total.total(parameters, FlatClip(2.0))
    assert result.tensors["w"].tolist() == [1.0, 1.0], "batches are added in fp64"
    assert 2.2 <= result.sensitivity < 2.2 * (1 + 1e-9)
    total.clear()
    empty = total.total(parameters, FlatClip(3.0))
    assert empty.tensors["w"].tolist() == [0.0, 0.0]
    assert empty.sensitivity == pytest.approx(3.3, rel=1e-9), "an empty lot has the bound of the others"
    borrowed = batch(1.0, 2.0)
    total.add(borrowed, FlatClip(2.0), borrowed=True)
    total.keep()
    borrowed.tensors["w"].zero_()
    assert total.total(parameters, FlatClip(2.0)).tensors["w"].tolist() == [1.0, 1.0]
