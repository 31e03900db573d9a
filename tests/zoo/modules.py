"""Every torch.nn module that has parameters, with its options, and the others as what stands between two layers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from zoo.judge import Case

D = 8


class Do(nn.Module):
    """A module of modules with its forward pass as a function."""

    def __init__(self, forward: Callable[..., Tensor], **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self._forward_of = forward

    def forward(self, *inputs: Tensor) -> Tensor:
        return self._forward_of(self, *inputs)


def losses(model: nn.Module, *inputs: Tensor) -> Tensor:
    out = model(*inputs)
    out = out.reshape(len(out), -1)
    weight = torch.linspace(0.5, 1.5, out.shape[1], dtype=out.dtype)
    return (out.square() * weight).sum(1) + out.sin().sum(1)


def rows(rows: int, length: int) -> tuple[Tensor, ...]:
    return (torch.randn(rows, D),)


def sequences(rows: int, length: int) -> tuple[Tensor, ...]:
    return (torch.randn(rows, length, D),)


def channels(*sizes: int) -> Callable[[int, int], tuple[Tensor, ...]]:
    """Images (signals, volumes) whose last size varies with the length."""
    return lambda rows, length: (torch.randn(rows, 4, *sizes[:-1], sizes[-1] + length % 3),)


def tokens(rows: int, length: int) -> tuple[Tensor, ...]:
    return (torch.randint(11, (rows, length)),)


def padded(rows: int, length: int) -> tuple[Tensor, ...]:
    return torch.randn(rows, length, D), torch.arange(length)[None] >= torch.randint(1, length + 1, (rows, 1))


def after(module: Callable[[], nn.Module], width: int = D) -> Callable[[], nn.Module]:
    """The module between two linear layers."""
    return lambda: nn.Sequential(nn.Linear(D, width), module())


def first(of: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Modules that return several things."""
    return lambda: Do(lambda m, *inputs: m.inner(*inputs)[0], inner=of())


def _packed(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    lengths = (~mask).sum(1).cpu()
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return pad_packed_sequence(m.inner(packed)[0], batch_first=True, total_length=x.shape[1])[0]


def _attended(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    return m.inner(x, x, x, key_padding_mask=mask, need_weights=False)[0]


def _bag(mode: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.EmbeddingBag(11, D, mode=mode, **options)


BUILDS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], tuple[Tensor, ...]]]] = {
    "Linear": (lambda: nn.Linear(D, 3), rows),
    "Linear, sequences": (lambda: nn.Linear(D, 3), sequences),
    "Linear without bias": (lambda: nn.Linear(D, 3, bias=False), sequences),
    "Bilinear": (
        lambda: Do(lambda m, x: m.inner(m.one(x), x), inner=nn.Bilinear(3, D, 2), one=nn.Linear(D, 3)),
        sequences,
    ),
    "Embedding": (lambda: nn.Embedding(11, D), tokens),
    "Embedding, padding": (lambda: nn.Embedding(11, D, padding_idx=3), tokens),
    "Embedding, sparse": (lambda: nn.Embedding(11, D, sparse=True), tokens),
    "EmbeddingBag sum": (_bag("sum"), tokens),
    "EmbeddingBag mean": (_bag("mean", padding_idx=2), tokens),
    "EmbeddingBag max": (_bag("max"), tokens),
    "LayerNorm": (after(lambda: nn.LayerNorm(D)), sequences),
    "LayerNorm without bias": (after(lambda: nn.LayerNorm(D, bias=False)), rows),
    "RMSNorm": (after(lambda: nn.RMSNorm(D)), sequences),
    "GroupNorm": (lambda: nn.Sequential(nn.Conv2d(4, 6, 1), nn.GroupNorm(3, 6)), channels(3, 4)),
    "InstanceNorm1d": (lambda: nn.Sequential(nn.Conv1d(4, 4, 1), nn.InstanceNorm1d(4, affine=True)), channels(6)),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(4, affine=True), channels(4, 4)),
    "BatchNorm1d, eval": (lambda: nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D)).eval(), rows),
    "BatchNorm2d, eval": (lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)).eval(), channels(3, 4)),
    "PReLU": (after(lambda: nn.PReLU()), sequences),
    "PReLU by channel": (lambda: nn.Sequential(nn.Conv1d(4, 4, 1), nn.PReLU(4)), channels(6)),
    "MultiheadAttention": (lambda: Do(_attended, inner=nn.MultiheadAttention(D, 2, batch_first=True)), padded),
    "MultiheadAttention, kv": (
        lambda: Do(
            lambda m, x: m.inner(x, x[..., :5], x[..., :3], average_attn_weights=False)[0],
            inner=nn.MultiheadAttention(D, 2, kdim=5, vdim=3, add_bias_kv=True, add_zero_attn=True, batch_first=True),
        ),
        sequences,
    ),
    "MultiheadAttention, time first": (
        lambda: Do(
            lambda m, x: m.inner(*[x.transpose(0, 1)] * 3)[0].transpose(0, 1), inner=nn.MultiheadAttention(D, 4)
        ),
        sequences,
    ),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(D, 2, 12, 0.0, batch_first=True), sequences),
    "TransformerEncoder, padded": (
        lambda: Do(
            lambda m, x, mask: m.inner(x, src_key_padding_mask=mask),
            inner=nn.TransformerEncoder(
                nn.TransformerEncoderLayer(D, 2, 12, 0.0, "gelu", batch_first=True, norm_first=True),
                2,
                enable_nested_tensor=False,
            ),
        ),
        padded,
    ),
    "TransformerDecoderLayer": (
        lambda: Do(
            lambda m, x: m.inner(x, x.tanh()), inner=nn.TransformerDecoderLayer(D, 2, 12, 0.0, batch_first=True)
        ),
        sequences,
    ),
    "Transformer": (
        lambda: Do(
            lambda m, x: m.inner(
                x, x, tgt_mask=nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
            ),
            inner=nn.Transformer(D, 2, 1, 1, 12, 0.0, batch_first=True),
        ),
        sequences,
    ),
    "weight_norm": (lambda: parametrizations.weight_norm(nn.Linear(D, 3)), sequences),
    "spectral_norm, eval": (lambda: parametrizations.spectral_norm(nn.Linear(D, 3)).eval(), sequences),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(D, 3)), rows),
    "LSTMCell": (lambda: Do(lambda m, x: m.inner(x)[0], inner=nn.LSTMCell(D, 3)), rows),
    "GRUCell": (lambda: nn.GRUCell(D, 3), rows),
    "RNNCell": (lambda: nn.RNNCell(D, 3, nonlinearity="relu"), rows),
    "AdaptiveLogSoftmax": (
        lambda: Do(
            lambda m, x: (
                m.inner(
                    x,
                    torch.arange(len(x)) * 0
                    + x[:, 0].detach().gt(0).long() * 3
                    + x[:, 1].detach().gt(0).long() * 5
                    + 1,
                ).output
            ),
            inner=nn.AdaptiveLogSoftmaxWithLoss(D, 12, [3, 6]),
        ),
        rows,
    ),
}

for _kind in (nn.RNN, nn.LSTM, nn.GRU):
    for _name, _options in {
        "": {},
        "two layers": {"num_layers": 2},
        "both ways": {"bidirectional": True},
        "no bias": {"bias": False},
    }.items():
        _build = first(lambda kind=_kind, options=_options: kind(D, 3, batch_first=True, **options))
        BUILDS[f"{_kind.__name__} {_name}"] = _build, sequences
    BUILDS[f"{_kind.__name__} packed"] = lambda kind=_kind: Do(_packed, inner=kind(D, 3, batch_first=True)), padded
    BUILDS[f"{_kind.__name__} time first"] = (
        lambda kind=_kind: Do(lambda m, x: m.inner(x.transpose(0, 1))[0].transpose(0, 1), inner=kind(D, 3)),
        sequences,
    )
BUILDS["LSTM projected"] = first(lambda: nn.LSTM(D, 5, proj_size=2, batch_first=True)), sequences

_CONV = {
    "plain": {},
    "strided": {"stride": 2},
    "padded": {"padding": 1},
    "dilated": {"dilation": 2, "padding": 2},
    "grouped": {"groups": 2},
    "depthwise": {"groups": 4},
    "valid": {"padding": "valid"},
    "same": {"padding": "same"},
    "reflected": {"padding": 1, "padding_mode": "reflect"},
    "replicated": {"padding": 1, "padding_mode": "replicate"},
    "circular": {"padding": 1, "padding_mode": "circular"},
    "no bias": {"bias": False},
}
for _axes, _conv, _transposed in (
    (1, nn.Conv1d, nn.ConvTranspose1d),
    (2, nn.Conv2d, nn.ConvTranspose2d),
    (3, nn.Conv3d, nn.ConvTranspose3d),
):
    _sizes = channels(*[4] * _axes)
    for _name, _options in _CONV.items():
        if not (_axes == 3 and _name in ("dilated",)):
            BUILDS[f"{_conv.__name__} {_name}"] = (
                lambda conv=_conv, options=_options: nn.Sequential(conv(4, 4, 1), nn.Tanh(), conv(4, 4, 3, **options)),
                channels(*[5] * _axes),
            )
    for _name, _options in {
        "plain": {},
        "strided": {"stride": 2, "output_padding": 1},
        "grouped": {"groups": 2},
    }.items():
        BUILDS[f"{_transposed.__name__} {_name}"] = (
            lambda conv=_transposed, options=_options: conv(4, 4, 3, **options),
            _sizes,
        )

_BETWEEN = {
    "rows": [
        *(nn.ReLU, nn.ReLU6, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus, nn.Softsign, nn.Tanh),
        *(nn.Sigmoid, nn.LogSigmoid, nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish, nn.Hardshrink, nn.Softshrink),
        *(nn.Tanhshrink, nn.LeakyReLU, lambda: nn.Threshold(0.1, 0.2), lambda: nn.Softmax(1), lambda: nn.Softmin(1)),
        *(lambda: nn.LogSoftmax(1), nn.GLU, lambda: nn.Unflatten(1, (2, 4)), nn.Flatten),
    ],
    "images": [
        *(lambda: nn.MaxPool2d(2), lambda: nn.AvgPool2d(2), lambda: nn.AdaptiveAvgPool2d(2)),
        *(lambda: nn.AdaptiveMaxPool2d(2), lambda: nn.LPPool2d(2, 2), lambda: nn.FractionalMaxPool2d(2, 3)),
        *(lambda: nn.Upsample(scale_factor=2, mode="bilinear"), lambda: nn.PixelShuffle(2), lambda: nn.Unfold(2)),
        *(lambda: nn.ReflectionPad2d(1), lambda: nn.ZeroPad2d(1), lambda: nn.LocalResponseNorm(2)),
        *(lambda: nn.ChannelShuffle(2), lambda: nn.Softmax2d(), lambda: nn.CircularPad2d(1)),
    ],
}


def _convolved(module: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), module())


def cases() -> list[Case]:
    found = [Case(name, build, of, losses) for name, (build, of) in BUILDS.items()]
    for one in _BETWEEN["rows"]:
        name = one().__class__.__name__
        found.append(
            Case(f"between: {name}", lambda one=one: nn.Sequential(nn.Linear(D, D), one(), nn.Flatten()), rows, losses)
        )
    for one in _BETWEEN["images"]:
        name = one().__class__.__name__
        drawn = name == "FractionalMaxPool2d"
        build = partial(_convolved, one)
        found.append(Case(f"between: {name}", build, channels(6, 6), losses, draws=drawn))
    for name, module in {
        "Dropout": nn.Dropout(0.5),
        "AlphaDropout": nn.AlphaDropout(0.3),
        "FeatureAlphaDropout": nn.FeatureAlphaDropout(0.3),
        "RReLU": nn.RReLU(),
    }.items():
        found.append(
            Case(
                f"drawn: {name}",
                lambda module=module: nn.Sequential(nn.Linear(D, D), module, nn.Linear(D, 2)),
                sequences,
                losses,
                draws=True,
            )
        )
    found.append(
        Case(
            "drawn: Dropout2d",
            lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.Dropout2d(0.4)),
            channels(5, 5),
            losses,
            draws=True,
        )
    )
    found.append(
        Case(
            "drawn: encoder",
            lambda: nn.TransformerEncoderLayer(D, 2, 12, 0.2, batch_first=True),
            sequences,
            losses,
            draws=True,
        )
    )
    return found
