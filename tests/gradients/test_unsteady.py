"""Gradients that differ from pass to pass, as those of attention on a GPU: rows are still told apart, mixing is not."""

import pytest
import torch

from hush.gradients import probe

CODE = torch.tensor([0, 1, 2, 3])


def gradients(noise: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Two rows for each of four examples, plain and weighted by 2^code, each with noise of its own."""
    before = torch.randn(8, 64)
    after = before * torch.exp2(CODE.repeat_interleave(2).float())[:, None]
    return before * (1 + noise * torch.randn(8, 64)), after * (1 + noise * torch.randn(8, 64))


@pytest.mark.parametrize("noise, steady", [(0.0, True), (0.03, False)])
def test_rows_are_told_apart_in_spite_of_noise_in_the_last_places(noise: float, steady: bool) -> None:
    torch.manual_seed(0)
    before, after = gradients(noise)
    strict = probe._exponents(before, after, probe._STEADY)[0]
    assert (strict is not None) is steady
    loose = probe._exponents(before, after, probe._UNSTEADY)[0]
    assert loose is not None and torch.equal(loose, CODE.repeat_interleave(2))


def test_a_sum_over_examples_is_refused_with_both_limits() -> None:
    torch.manual_seed(0)
    parts = torch.randn(4, 8, 64)
    mixed = torch.einsum("b,brk->rk", torch.exp2(CODE.float()), parts)
    for limits in (probe._STEADY, probe._UNSTEADY):
        assert probe._exponents(parts.sum(0), mixed, limits) == [None, None]
