"""Tokens of one example that meet in one row of a table: added up before norms are taken, whoever else holds it."""

import torch

from hush.gradients.layers.embedding import Rows
from hush.gradients.sums.per_example import Weights


def test_examples_whose_tokens_lie_anywhere() -> None:
    torch.manual_seed(0)
    owner, index = torch.tensor([2, 0, 1, 2, 0, 2, 1, 0, 2]), torch.tensor([1, 3, 1, 1, 3, 0, 2, 1, 1])
    part = Rows(index, owner, torch.randn(9, 4), batch=3, table=5, regular=False)
    each = part.per_example().double()
    torch.testing.assert_close(part.squared_norms().double(), each.square().flatten(1).sum(1))
    factors = torch.tensor([0.5, 2.0, 0.25])
    want = torch.einsum("b,bkd->kd", factors.double(), each)
    torch.testing.assert_close(part.weighted_sum(Weights(factors)).double(), want)


def test_an_example_that_is_not_finite_among_them() -> None:
    owner, index = torch.tensor([1, 0, 1, 0]), torch.tensor([2, 2, 2, 1])
    gradients = torch.ones(4, 3)
    gradients[0, 1] = float("inf")
    part = Rows(index, owner, gradients, batch=2, table=4, regular=False)
    assert part.squared_norms().isfinite().tolist() == [True, False]
    total = part.weighted_sum(Weights(torch.tensor([1.0, 0.0]), torch.tensor([False, True])))
    assert torch.equal(total, torch.tensor([[0.0], [1.0], [1.0], [0.0]]).expand(4, 3))


def test_tables_so_large_that_pairs_need_more_than_32_bits() -> None:
    """Example 4 has pair 2^32 + 5 here, which ends in the same 32 bits as pair 5 of example 0."""
    part = Rows(torch.full((8,), 5), torch.arange(8), torch.ones(8, 2), batch=8, table=1 << 30, regular=True)
    torch.testing.assert_close(part.squared_norms(), torch.full((8,), 2.0))
