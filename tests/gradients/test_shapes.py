"""Any shapes: norms, clipped sums and their accumulation against the float64 loop, drawn by hypothesis."""

import contextlib
import warnings

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import gradients as oracle
from support.finished import clipped_sum
from torch import Tensor, nn

from hush.clipping import FlatClip

small = st.integers(1, 6)
quick = settings(max_examples=25, deadline=None, derandomize=True)


def losses(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    out = model(*batch).flatten(1)
    return (out.square() * torch.linspace(0.5, 1.5, out.shape[1], dtype=out.dtype)).sum(1) + out.sin().sum(1)


@contextlib.contextmanager
def anything_goes():
    """Tiny shapes may hide a layout (one row, a gradient of zero); that is told, and the result is exact."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def check(model: nn.Module, *batch: Tensor, cut: int = 0) -> None:
    exact = oracle.per_example_gradients(model, batch, losses)
    norms = sum(oracle.squared_norms(exact).values()).sqrt()
    bound = max(1e-3, 0.6 * float(norms.median()))
    params = dict(model.named_parameters())
    with anything_goes():
        ours = clipped_sum(losses(model, batch), params, FlatClip(bound))
        if 0 < cut < len(batch[0]):
            parts = [tuple(tensor[:cut] for tensor in batch), tuple(tensor[cut:] for tensor in batch)]
            ours = clipped_sum(losses(model, parts[0]), params, FlatClip(bound)) + clipped_sum(
                losses(model, parts[1]), params, FlatClip(bound)
            )
    theirs = oracle.clipped_sum(exact, bound)
    error = sum(float((ours.tensors[name].double() - theirs[name]).square().sum()) for name in theirs) ** 0.5
    assert error <= 1e-5 * max(bound, sum(float(tensor.square().sum()) for tensor in theirs.values()) ** 0.5)


def fill(model: nn.Module, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn_like(param) * 0.7)
    return model


@quick
@given(batch=small, lead=st.lists(small, max_size=3), i=small, j=small, bias=st.booleans(), cut=small, seed=small)
def test_linear(batch: int, lead: list[int], i: int, j: int, bias: bool, cut: int, seed: int) -> None:
    model = fill(nn.Sequential(nn.Linear(i, j, bias=bias), nn.Tanh(), nn.Linear(j, 3)), seed)
    check(model, torch.randn(batch, *lead, i), cut=cut)


@quick
@given(batch=small, length=small, i=small, j=small, cut=small, seed=small)
def test_linear_with_time_first(batch: int, length: int, i: int, j: int, cut: int, seed: int) -> None:
    class TimeFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(i, j), nn.Linear(j, 2)

        def forward(self, data: Tensor) -> Tensor:
            return self.b(torch.tanh(self.a(data.transpose(0, 1)))).transpose(0, 1)

    check(fill(TimeFirst(), seed), torch.randn(batch, length, i), cut=cut)


@quick
@given(
    batch=small, lead=st.lists(small, max_size=2), rows=small, width=small, padding=st.booleans(), cut=small, seed=small
)
def test_embedding(batch: int, lead: list[int], rows: int, width: int, padding: bool, cut: int, seed: int) -> None:
    model = fill(
        nn.Sequential(nn.Embedding(rows, width, padding_idx=0 if padding else None), nn.Linear(width, 2)), seed
    )
    check(model, torch.randint(0, rows, (batch, *lead)), cut=cut)


@quick
@given(batch=small, length=small, width=st.integers(2, 6), cut=small, seed=small)
def test_layer_norm(batch: int, length: int, width: int, cut: int, seed: int) -> None:
    model = fill(nn.Sequential(nn.Linear(3, width), nn.LayerNorm(width, eps=1e-2), nn.Linear(width, 2)), seed)
    check(model, torch.randn(batch, length, 3), cut=cut)


@quick
@given(batch=small, groups=st.integers(1, 3), each=small, side=st.integers(2, 6), cut=small, seed=small)
def test_group_norm(batch: int, groups: int, each: int, side: int, cut: int, seed: int) -> None:
    channels = groups * each
    model = fill(nn.Sequential(nn.Linear(side, side), nn.GroupNorm(groups, channels, eps=1e-2), nn.Flatten()), seed)
    check(model, torch.randn(batch, channels, side), cut=cut)


@quick
@given(
    shape=st.lists(small, min_size=1, max_size=3),
    ones=st.lists(st.booleans(), min_size=3, max_size=3),
    drop=st.integers(0, 2),
    batch=small,
    seed=small,
)
def test_broadcast_parameters(shape: list[int], ones: list[bool], drop: int, batch: int, seed: int) -> None:
    own = [1 if one else size for size, one in zip(shape, ones, strict=False)][drop:]

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.shift = nn.Parameter(torch.empty(own)), nn.Parameter(torch.empty(own))

        def forward(self, data: Tensor) -> Tensor:
            return torch.tanh(data * self.scale) - self.shift

    check(fill(Scaled(), seed), torch.randn(batch, *shape), cut=1)


@quick
@given(batch=small, length=small, calls=st.integers(1, 4), width=small, cut=small, seed=small)
def test_a_layer_called_again_and_again(batch: int, length: int, calls: int, width: int, cut: int, seed: int) -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(width, width)

        def forward(self, data: Tensor) -> Tensor:
            for call in range(calls):
                data = torch.tanh(self.layer(data if call % 2 else data[:, : 1 + length // 2]))
            return data

    check(fill(Again(), seed), torch.randn(batch, length, width), cut=cut)


@quick
@given(batch=small, length=small, rows=st.integers(2, 8), width=small, cut=small, seed=small)
def test_tied_table(batch: int, length: int, rows: int, width: int, cut: int, seed: int) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(rows, width)

        def forward(self, tokens: Tensor) -> Tensor:
            return torch.tanh(self.table(tokens)) @ self.table.weight.t()

    check(fill(Tied(), seed), torch.randint(0, rows, (batch, length)), cut=cut)
