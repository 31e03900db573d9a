"""Sums over long batches run in blocks: every example is in exactly one, and no chain is longer than the bound says."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from oracles import gradients as oracle
from support.finished import clipped_sum
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hush.clipping import FlatClip
from hush.clipping import rounding as precision
from hush.gradients.layers import products
from hush.gradients.sums.blocks import BLOCK, CHAIN, chained, chained_additions, long_additions, long_block, rho
from hush.gradients.sums.per_example import Weights


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


class Products(TorchDispatchMode):
    """Keeps the second factor of each matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.right: list[Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.overloadpacket.__name__ == "mm":
            self.right.append(args[1])
        return func(*args, **(kwargs or {}))


class TimeFirst(nn.Linear):
    """A layer whose rows come time step by time step; the loss is still the example's own."""

    def __init__(self) -> None:
        super().__init__(40, 300, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(0, 1).contiguous()).transpose(0, 1)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], float, float]] = {
    # model, batch, additions of the sum, longest chain that these stand for
    "rows alone, joint": (lambda: nn.Linear(3, 30), (1000, 3), chained_additions(1000), 167),
    "rows alone, narrow": (lambda: nn.Linear(30, 3), (1000, 30), chained_additions(1000), 167),
    "rows alone, no bias": (lambda: nn.Linear(9, 7, bias=False), (999, 9), chained_additions(999), 167),
    "rows alone, twice": (lambda: nn.Linear(30, 3), (600, 30), chained_additions(600), 300),
    "rows": (lambda: nn.Linear(40, 50, bias=False), (301, 12, 40), long_additions(301, 12), 12 * long_block(12)),
    "pixels": (lambda: nn.Conv2d(20, 24, 3, bias=False), (151, 20, 8, 8), long_additions(151, 36), 36 * long_block(36)),
    "kept kernels": (lambda: nn.Conv1d(2, 3, 2, bias=False), (601, 2, 9), chained_additions(601), 301),
    "rows, time first": (TimeFirst, (200, 8, 40), long_additions(200, 8), 8 * 67),
}


def losses_of(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return model(batch[0]).square().flatten(1).sum(1)


def additions_counted(patch: pytest.MonkeyPatch) -> list[float]:
    """What the bound on rounding is made from, for each group that is summed from now on."""
    counted: list[float] = []

    def counting(additions: Callable[[int], float], examples: int, dtype: torch.dtype) -> int:
        counted.append(additions(examples))
        return precision.pieces_needed(additions, examples, dtype)

    patch.setattr("hush.gradients.sums.clipped.pieces_needed", counting)
    return counted


@pytest.mark.parametrize("kind", CASES)
def test_no_chain_is_longer_than_the_bound_says(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, shape, additions, longest = CASES[kind]
    torch.manual_seed(0)
    model, x = build(), torch.randn(shape)
    params = dict(model.named_parameters())
    clipped_sum(losses_of(model, (x,)), params, FlatClip(1.0))  # the plan is made
    losses, counted = losses_of(model, (x,)), additions_counted(monkeypatch)
    with Chains() as chains:
        clipped_sum(losses, params, FlatClip(1.0))
    assert counted == [additions]
    sums = [length for length in chains.lengths if length > 64 or length == longest]
    assert sums and max(sums) <= longest


def test_long_examples_are_added_up_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where products are not kept: no rows of two examples meet, and the sum is that of the float64 loop."""
    monkeypatch.setattr(products, "_KEEP_BYTES", 0)
    torch.manual_seed(0)
    model, x = nn.Linear(30, 40, bias=False), torch.randn(11, 700, 30)
    params = dict(model.named_parameters())
    losses, counted = losses_of(model, (x,)), additions_counted(monkeypatch)
    with Chains() as chains:
        total = clipped_sum(losses, params, FlatClip(1.0))
    assert max(chains.lengths) == 700
    assert counted == [long_additions(11, 700)] and counted[0] < 0.00002 * 2**24
    exact = oracle.clipped_sum(oracle.per_example_gradients(model, (x,), losses_of), 1.0)["weight"]
    assert (total.tensors["weight"] - exact).norm() <= 2e-3 * exact.norm()


def test_rows_are_added_up_one_example_after_another() -> None:
    """Rows that come time step by time step: half of each example would be a partial sum as long as all masses."""
    torch.manual_seed(0)
    model, x = TimeFirst(), torch.randn(9, 4, 40)
    params = dict(model.named_parameters())
    losses = losses_of(model, (x,))
    with Products() as products:
        clipped_sum(losses, params, FlatClip(1.0))
    (rows,) = [rows for rows in products.right if rows.shape == (36, 40)][-1:]
    rows = rows.view(9, 4, 40)
    scale = rows.norm(dim=(1, 2)) / x.norm(dim=(1, 2))
    torch.testing.assert_close(rows, x * scale[:, None, None])


@pytest.mark.parametrize("kind", CASES)
def test_every_example_is_in_exactly_one_block(kind: str) -> None:
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


@pytest.mark.parametrize("rows", [1, CHAIN, CHAIN + 1, 2 * CHAIN, 2 * CHAIN + 1, 600, 1000])
def test_blocks_of_rows_cover_all_rows_once(rows: int) -> None:
    left, right = torch.eye(rows), torch.arange(1.0, rows + 1)[:, None]
    assert torch.equal(chained(left, right), right)


@pytest.mark.parametrize("terms", [2, 12, 64, 512, 1024, 10**5])
def test_long_blocks_leave_room_in_the_bound(terms: int) -> None:
    block = long_block(terms)
    assert block == 1 or block * terms * block * (rho(terms) + 1) <= 0.0085 * 2**24
    assert block == BLOCK or (block + 1) ** 2 * terms * (rho(terms) + 1) > 0.0085 * 2**24
    additions = partial(long_additions, terms=terms)
    assert {precision.pieces_needed(additions, batch, torch.float32) for batch in (1, block, 5 * block, 4096)} == {1}
    assert precision.pieces_needed(additions, 60_000, torch.float32) <= 16


@pytest.mark.parametrize("kind", CASES)
def test_a_sum_in_pieces_is_the_same_sum(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, shape, *_ = CASES[kind]
    torch.manual_seed(0)
    model, x = build(), torch.randn(shape)
    x[1] = torch.inf
    params, mask = dict(model.named_parameters()), torch.arange(len(x)) % 5 != 0
    whole = clipped_sum(losses_of(model, (x,)), params, FlatClip(1.0), mask=mask)
    monkeypatch.setattr("hush.gradients.sums.clipped.pieces_needed", lambda *_: 7)
    cut = clipped_sum(losses_of(model, (x,)), params, FlatClip(1.0), mask=mask)
    assert cut.groups == whole.groups
    for name, tensor in whole.tensors.items():
        assert cut.tensors[name].dtype == torch.float64
        assert (cut.tensors[name] - tensor).norm() <= 1e-5 * tensor.norm()


def test_pieces_hold_every_example_once() -> None:
    for batch, pieces in ((1, 1), (5, 2), (5, 8), (64, 16)):
        factors = torch.rand(batch) + 1
        cut = torch.stack([weights.factors for weights in Weights(factors).cut(pieces)])
        assert torch.equal(cut.sum(0), factors) and bool(((cut != 0).sum(0) == 1).all())
        assert int((cut != 0).sum(1).max()) <= -(-batch // pieces)


def test_what_no_piece_makes_small_enough_is_refused() -> None:
    assert precision.pieces_needed(lambda n: 1e5 * n, 64, torch.float32) == 64
    with pytest.raises(ValueError, match="one example alone rounds more"):
        precision.pieces_needed(lambda n: 1e6, 64, torch.float32)
    assert precision.pieces_needed(lambda n: 1e6, 64, torch.float64) == 1
