"""Sums over long batches run in blocks: every example is in exactly one, and no chain is longer than the bound says."""

from collections.abc import Callable

import pytest
import torch
from oracles import gradients as oracle
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hush.gradients import FlatClip, clipped_sum, precision, site
from hush.gradients.affine import ONE_CHAIN
from hush.gradients.site import BLOCK, add_blocks, blocked_additions, in_blocks, long_additions, long_block


class Chains(TorchDispatchMode):
    """Notes over how many rows every product and every kernel gradient sums."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.overloadpacket.__name__
        if name in ("mm", "bmm"):
            self.lengths.append(args[0].shape[-1])
        elif name == "convolution_backward" and args[10][1]:
            self.lengths.append(args[0][:, 0].numel())
        return func(*args, **(kwargs or {}))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], float, float]] = {
    # model, batch, additions of the sum, longest chain that these stand for
    "rows alone, joint": (lambda: nn.Linear(3, 30), (1000, 3), blocked_additions(1000, ONE_CHAIN), BLOCK),
    "rows alone, narrow": (lambda: nn.Linear(30, 3), (1000, 30), blocked_additions(1000, ONE_CHAIN), BLOCK),
    "rows alone, no bias": (lambda: nn.Linear(9, 7, bias=False), (999, 9), blocked_additions(999, ONE_CHAIN), BLOCK),
    "rows": (lambda: nn.Linear(40, 50, bias=False), (301, 12, 40), long_additions(301, 12), 12 * long_block(12)),
    "pixels": (lambda: nn.Conv2d(20, 24, 3, bias=False), (151, 20, 8, 8), long_additions(151, 36), 36 * long_block(36)),
    "kept kernels": (lambda: nn.Conv1d(2, 3, 2, bias=False), (601, 2, 9), blocked_additions(601, BLOCK), BLOCK),
}


def losses_of(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return model(batch[0]).square().flatten(1).sum(1)


@pytest.mark.parametrize("kind", CASES)
def test_no_chain_is_longer_than_the_bound_says(kind: str) -> None:
    build, shape, additions, longest = CASES[kind]
    torch.manual_seed(0)
    model, x = build(), torch.randn(shape)
    params = dict(model.named_parameters())
    clipped_sum(losses_of(model, (x,)), params, FlatClip(1.0))  # the plan is made
    losses = losses_of(model, (x,))
    with Chains() as chains:
        total = clipped_sum(losses, params, FlatClip(1.0))
    assert total.sensitivity == 1.0 * (1 + precision.slack(additions, torch.float32))
    sums = [length for length in chains.lengths if length > 64 or length == longest]
    assert sums and max(sums) <= longest


@pytest.mark.parametrize("kind", CASES)
def test_every_example_is_in_exactly_one_block(kind: str, fresh_plans: None) -> None:
    """One example after another is made large: a border that leaves one out, or takes it twice, is seen at once."""
    build, shape, *_ = CASES[kind]
    torch.manual_seed(0)
    model = build()
    params = dict(model.named_parameters())
    blocks = -(-shape[0] // -(-shape[0] // BLOCK))
    borders = {0, shape[0] - 1, *(place + off for place in range(blocks, shape[0], blocks) for off in (-1, 0))}
    borders |= {place + off for place in range(16, shape[0], 16) for off in (-1, 0)}
    x = torch.zeros(shape)
    if kind.startswith("rows alone"):
        with torch.no_grad():
            model.weight.add_(1.0)
    for place in sorted(borders):
        x.normal_(std=1e-4)
        x[place] = torch.randn(shape[1:])
        gradients = oracle.per_example_gradients(model, (x[place : place + 1],), losses_of)
        expected = oracle.clipped_sum(gradients, 1e3)["weight"]
        total = clipped_sum(losses_of(model, (x,)), params, FlatClip(1e3)).tensors["weight"]
        assert (total - expected).norm() <= 0.1 * expected.norm()


@pytest.mark.parametrize("rows", [1, BLOCK, BLOCK + 1, 2 * BLOCK, 600, 1000])
def test_blocks_of_rows_cover_all_rows_once(rows: int) -> None:
    left, right = torch.eye(rows), torch.arange(1.0, rows + 1)[:, None]
    blocks = in_blocks(left, right)
    assert sum(block.shape[0] for block in blocks) == -(-rows // BLOCK)
    assert torch.equal(add_blocks(blocks), right)


@pytest.mark.parametrize("terms", [2, 12, 64, 1024, 10**5])
def test_long_blocks_keep_the_slack_near_three_percent(terms: int) -> None:
    block = long_block(terms)
    assert block == 1 or block * terms * (block + 2 * site.RHO) <= 0.03 * 2**24
    assert block == BLOCK or 2 * block * terms * (2 * block + 2 * site.RHO) > 0.03 * 2**24
    assert long_additions(block, terms) == block * terms * (block + 2 * site.RHO)
    assert long_additions(3 * block, terms) == block * terms * (block + 2 * site.RHO) + 12 * block
