"""Gradients that differ from pass to pass, as those of attention on a GPU: rows are still told apart, mixing is not."""

import pytest
import torch
from torch.autograd.graph import GradientEdge

from hush.gradients import probe
from hush.gradients.sums.per_example import Layout

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
    strict = probe._exponents(before, after)[0]
    assert (strict is not None) is steady
    loose = probe._exponents_of_noisy(before, after)[0]
    assert loose is not None and torch.equal(loose, CODE.repeat_interleave(2))


def test_a_row_whose_largest_entry_is_noise_still_counts_as_a_whole() -> None:
    torch.manual_seed(0)
    before, after = gradients(0.03)
    before[3, 5], after[3, 5] = before[3].norm() / 5, 0.0
    loose = probe._exponents_of_noisy(before, after)[0]
    assert loose is not None and torch.equal(loose, CODE.repeat_interleave(2))


def test_a_ratio_between_two_powers_of_two_is_nobodys() -> None:
    """4/3 is as far from 1 as from 2, relative to each: a tolerance that takes it in tells no power from the next.

    It is what two examples give whose gradients point the same way, as all do in a layer of width one.
    """
    torch.manual_seed(0)
    before = torch.randn(8, 64)
    for power in (1, 2, 4):
        assert probe._exponents_of_noisy(before, power * 4 / 3 * before) == [None, None]


def test_a_sum_over_examples_is_refused_both_ways() -> None:
    torch.manual_seed(0)
    parts = torch.randn(4, 8, 64)
    mixed = torch.einsum("b,brk->rk", torch.exp2(CODE.float()), parts)
    for exponents in (probe._exponents, probe._exponents_of_noisy):
        assert exponents(parts.sum(0), mixed) == [None, None]


def probed(weighted: torch.Tensor, noise: float, monkeypatch: pytest.MonkeyPatch) -> probe.Finding:
    """What is found where two passes agree to the last bit and all later ones do not.

    `weighted` [8, 8]: how much of the loss of each example reaches each of eight rows.
    """
    torch.manual_seed(0)
    values = torch.randn(8, 8, 64)
    passes = iter([0.0, 0.0, noise, noise, noise, noise, noise])

    def gradients(losses: object, edges: object, weights: torch.Tensor) -> list[torch.Tensor]:
        exact = torch.einsum("rb,b,rbk->rk", weighted, weights, values)
        return [exact * (1 + next(passes) * torch.randn_like(exact))]

    monkeypatch.setattr(probe, "_gradients", gradients)
    monkeypatch.setattr(probe, "_may_differ", lambda losses: True)
    edge = GradientEdge(torch.ones(8, requires_grad=True).exp().grad_fn, 0)  # `gradients` answers for it
    (finding,) = probe.probe(torch.ones(8), [edge])
    return finding


@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_passes_that_agree_by_chance_do_not_hide_the_examples(noise: float, monkeypatch: pytest.MonkeyPatch) -> None:
    assert probed(torch.eye(8), noise, monkeypatch) == probe.Finding(Layout(0, 1, 8, 1), certain=True)


@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_mixed_rows_stay_mixed(noise: float, monkeypatch: pytest.MonkeyPatch) -> None:
    assert probed(torch.ones(8, 8), noise, monkeypatch).layout is None
    alike = torch.eye(8)[:1].expand(8, 8)  # every row is the first example's: no regular layout
    assert (probed(alike, noise, monkeypatch).layout is None) is (noise > 0)
