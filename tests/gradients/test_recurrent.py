"""Recurrent layers, fused and unfused, against a float64 loop over the examples."""

import warnings
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import gradients as oracle
from support.finished import clipped_sum, squared_norms
from torch import Tensor, nn

from hush.clipping.clips import FlatClip, PerLayerClip
from hush.gradients.engine import Gradients


class Reader(nn.Module):
    """A recurrent layer read in one of several ways, and a linear layer on what it gives."""

    def __init__(self, layer: nn.RNNBase, read: str = "last", words: int = 0) -> None:
        super().__init__()
        width = (layer.proj_size or layer.hidden_size) * (2 if layer.bidirectional else 1)
        self.words = nn.Embedding(words, layer.input_size) if words else nn.Identity()
        self.layer, self.read = layer, read
        self.out = nn.Linear(layer.hidden_size if read in ("h", "c") else width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        output, state = self.layer(x if self.layer.batch_first else x.transpose(0, 1))
        if not self.layer.batch_first:
            output = output.transpose(0, 1)
        read = {
            "last": lambda: output[:, -1],
            "all": lambda: output.square().sum(1),
            "h": lambda: (state[0] if isinstance(state, tuple) else state).sum(0),
            "c": lambda: state[1].prod(0),
        }[self.read]()
        return self.out(read)


def losses(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return model(batch[0])[:, 0].square()


def compare(model: nn.Module, x: Tensor, of: Callable[..., Tensor] = losses) -> None:
    """Norms of each parameter and the clipped sum, both to 1e-5 relative."""
    exact = oracle.per_example_gradients(model, (x,), of)
    params = dict(model.named_parameters())
    norms = squared_norms(of(model, (x,)), params)
    largest = max(float(value.max()) for value in oracle.squared_norms(exact).values())
    for name, value in oracle.squared_norms(exact).items():
        torch.testing.assert_close(norms[name].double(), value, rtol=2e-5, atol=1e-7 * largest, msg=name)
    bound = 0.5 * largest**0.5
    total = clipped_sum(of(model, (x,)), params, FlatClip(bound)).tensors
    wanted = oracle.clipped_sum(exact, bound)
    scale = max(float(value.abs().max()) for value in wanted.values())
    for name, value in wanted.items():
        torch.testing.assert_close(total[name].double(), value, rtol=1e-5, atol=2e-5 * scale, msg=name)


@pytest.mark.parametrize("read", ["last", "all", "h", "c"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_fused_lstm(read: str, bias: bool, batch_first: bool) -> None:
    torch.manual_seed(1)
    compare(Reader(nn.LSTM(3, 5, bias=bias, batch_first=batch_first), read), torch.randn(4, 6, 3))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("words", [0, 11])
def test_deep_and_bidirectional(kind: type[nn.RNNBase], words: int) -> None:
    torch.manual_seed(2)
    layer = kind(3, 4, num_layers=2, bidirectional=True, batch_first=True)
    x = torch.randint(0, words, (3, 5)) if words else torch.randn(3, 5, 3)
    compare(Reader(layer, "all", words), x)


def test_fused_lstm_is_read_by_its_rule_and_not_slowly() -> None:
    model = Reader(nn.LSTM(3, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clipped_sum(losses(model, (torch.randn(4, 7, 3),)), dict(model.named_parameters()), PerLayerClip(1.0))


def test_initial_state_that_is_learned() -> None:
    class Started(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.h, self.c = nn.LSTM(3, 4), nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            state = tuple(s.expand(1, len(x), 4).contiguous() for s in (self.h, self.c))
            return self.layer(x.transpose(0, 1), state)[0][-1].sum(-1, keepdim=True)

    torch.manual_seed(3)
    compare(Started(), torch.randn(4, 5, 3))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_packed_sequences_of_different_length(kind: type[nn.RNNBase]) -> None:
    torch.manual_seed(4)
    lengths = torch.tensor([6, 2, 4, 5])

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = kind(3, 4, batch_first=True)

        def forward(self, x: Tensor, long: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, long, batch_first=True, enforce_sorted=False)
            return (
                nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0]
                .square()
                .sum((1, 2))[:, None]
            )

    def of(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return model(batch[0], batch[1])[:, 0].square()

    model, x = Packed(), torch.randn(4, 6, 3)
    exact = oracle.per_example_gradients(model, (x, lengths), of)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rows of different number for each example are probed anew each time
        norms = squared_norms(of(model, (x, lengths)), dict(model.named_parameters()))
    for name, value in oracle.squared_norms(exact).items():
        torch.testing.assert_close(norms[name].double(), value, rtol=2e-5, atol=1e-9, msg=name)


@settings(max_examples=15, deadline=None)
@given(batch=st.integers(1, 5), steps=st.integers(1, 7), inputs=st.integers(1, 5), hidden=st.integers(1, 6))
def test_fused_lstm_in_any_shape(batch: int, steps: int, inputs: int, hidden: int) -> None:
    torch.manual_seed(5)
    compare(Reader(nn.LSTM(inputs, hidden, batch_first=True), "all"), torch.randn(batch, steps, inputs))


def test_an_infinite_example_touches_no_other() -> None:
    torch.manual_seed(6)
    model, x = Reader(nn.LSTM(3, 4, batch_first=True)), torch.randn(4, 5, 3)
    params = dict(model.named_parameters())
    poisoned = x.clone()
    poisoned[1, 2] = float("inf")
    rest = torch.tensor([0, 2, 3])
    gradients = Gradients(lambda model, x: losses(model, (x,)), model)
    total = gradients.clipped_sum((poisoned,), FlatClip(0.1)).tensors
    alone = gradients.clipped_sum((x[rest],), FlatClip(0.1)).tensors
    for name in params:
        torch.testing.assert_close(total[name], alone[name], rtol=1e-5, atol=1e-7)
