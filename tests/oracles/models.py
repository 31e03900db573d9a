"""Small models of many kinds, as (name, build, batch, losses): what the gradient engine must get right."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from oracles.parts import (
    B,
    Do,
    Scale,
    attention,
    checkpointed,
    cross_attention,
    eval_batch_norm,
    free,
    frozen,
    lora,
    merged_lora,
    position_first,
    pruned,
    recurrent,
    stack,
    tied,
    tokens,
    transformer,
    tree,
    windows,
    x,
)


@dataclass(frozen=True)
class Case:
    """A model, a batch for it, and its losses, one for each example."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, ...]]
    generic: bool = False
    """Whether a node without a rule of its own takes part."""

    def losses(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Squares of the outputs, weighted unevenly so that no two entries have the same gradient."""
        out = model(*batch)
        out = out.reshape(len(out), -1)
        weight = torch.linspace(0.5, 1.5, out.shape[1], dtype=out.dtype)
        return (out.square() * weight).sum(1) + out.sin().sum(1)


CASES = [
    Case("linear", stack(nn.Linear(6, 4)), x(6)),
    Case("linear without bias", stack(nn.Linear(6, 4, bias=False)), x(6)),
    Case("mlp", stack(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 3)), x(6)),
    Case("mlp with in-place activations", stack(nn.Linear(6, 7), nn.ReLU(inplace=True), nn.Linear(7, 3)), x(6)),
    Case("linear over time, ghost", stack(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 12)), x(3, 16)),
    Case("linear over time, kept", stack(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), x(9, 3)),
    Case("linear over two leading dimensions", stack(nn.Linear(5, 6), nn.GELU(), nn.Linear(6, 2)), x(3, 4, 5)),
    Case("time first", lambda: Do(position_first, a=nn.Linear(4, 6), b=nn.Linear(6, 3)), x(7, 4)),
    Case("time as long as the batch", lambda: Do(position_first, a=nn.Linear(4, 6), b=nn.Linear(6, 3)), x(B, 4)),
    Case("windows folded into the batch", lambda: Do(windows, a=nn.Linear(4, 6), b=nn.Linear(6, 3)), x(8, 4)),
    Case(
        "matmul with a free parameter",
        lambda: Do(lambda m, d: torch.tanh(d @ m.w) @ m.v, w=free(6, 5), v=free(5, 3)),
        x(6),
    ),
    Case(
        "parameter on the left", lambda: Do(lambda m, d: (m.w @ d.transpose(0, 1)).transpose(0, 1), w=free(4, 6)), x(6)
    ),
    Case("parameter on the left, batched", lambda: Do(lambda m, d: m.w @ d, w=free(4, 6)), x(6, 3)),
    Case("einsum", lambda: Do(lambda m, d: torch.einsum("btd,de->bte", d, m.w), w=free(6, 4)), x(3, 6)),
    Case(
        "einsum with heads",
        lambda: Do(lambda m, d: torch.einsum("bthd,hde->bthe", d, m.w), w=free(2, 4, 3)),
        x(3, 2, 4),
    ),
    Case(
        "addmm with factors",
        lambda: Do(lambda m, d: torch.addmm(m.b, d, m.w, beta=0.5, alpha=2.0), w=free(6, 4), b=free(4)),
        x(6),
    ),
    Case("bilinear", lambda: Do(lambda m, d: m.f(d, d.cos()), f=nn.Bilinear(4, 4, 3)), x(4), generic=True),
    Case("vector product", lambda: Do(lambda m, d: d @ m.w, w=free(6)), x(6), generic=True),
    Case("free bias and scale", lambda: Do(lambda m, d: d * m.s + m.b, s=free(6), b=free(6)), x(6)),
    Case("scalar scale", lambda: Do(lambda m, d: m.f(d) * m.s - m.b, f=nn.Linear(6, 4), s=free(1), b=free(())), x(6)),
    Case(
        "learned token and positions",
        lambda: Do(
            lambda m, d: m.f(torch.cat([m.token.expand(len(d), -1, -1), d], 1) + m.positions),
            f=nn.Linear(4, 3),
            token=free(1, 1, 4),
            positions=free(1, 6, 4),
        ),
        x(5, 4),
    ),
    Case("division by a parameter", lambda: Do(lambda m, d: d / (m.s.exp() + 1), s=free(6)), x(6), generic=True),
    Case("gate", lambda: Do(lambda m, d: torch.sigmoid(m.g) * m.f(d), f=nn.Linear(6, 4), g=free(4)), x(6)),
    Case("prelu", stack(nn.Linear(6, 4), nn.PReLU(4)), x(6)),
    Case("embedding", stack(nn.Embedding(11, 6)), tokens(4)),
    Case("embedding with padding", stack(nn.Embedding(11, 6, padding_idx=3), nn.Linear(6, 2)), tokens(9)),
    Case("embedding of pairs", stack(nn.Embedding(11, 6), nn.Linear(6, 2)), lambda: (torch.randint(0, 11, (B, 3, 4)),)),
    Case(
        "embedding, time first", lambda: Do(lambda m, t: m.e(t.t()).transpose(0, 1), e=nn.Embedding(5, 3)), tokens(6, 5)
    ),
    Case(
        "embedding of one token",
        stack(nn.Embedding(11, 6), nn.Tanh(), nn.Linear(6, 3)),
        lambda: (torch.randint(0, 11, (B,)),),
    ),
    Case("embedding bag, sum", stack(nn.EmbeddingBag(11, 6, mode="sum"), nn.Linear(6, 2)), tokens(8)),
    Case("embedding bag, mean", stack(nn.EmbeddingBag(11, 6, mode="mean"), nn.Linear(6, 2)), tokens(8)),
    Case("embedding bag, max", stack(nn.EmbeddingBag(11, 6, mode="max"), nn.Linear(6, 2)), tokens(8), generic=True),
    Case("embedding bag with padding", stack(nn.EmbeddingBag(11, 6, padding_idx=2), nn.Linear(6, 2)), tokens(8)),
    Case("tied embedding and head", tied, tokens(6)),
    Case(
        "two tables of one embedding",
        lambda: Do(lambda m, t: m.e(t) * m.e(t.flip(1)), e=nn.Embedding(5, 3)),
        tokens(6, 5),
    ),
    Case("layer norm", stack(nn.Linear(6, 5), nn.LayerNorm(5)), x(6)),
    Case("layer norm over time", stack(nn.LayerNorm(5), nn.Linear(5, 4), nn.LayerNorm(4)), x(3, 5)),
    Case("layer norm over two dimensions", stack(nn.LayerNorm((3, 5)), nn.Linear(5, 2)), x(3, 5)),
    Case("layer norm without bias", stack(nn.Linear(6, 5), nn.LayerNorm(5, bias=False)), x(6)),
    Case("rms norm", stack(nn.Linear(6, 5), nn.RMSNorm(5)), x(3, 6)),
    Case("group norm", stack(nn.Conv2d(2, 6, 3), nn.GroupNorm(3, 6)), x(2, 6, 5)),
    Case("group norm of vectors", stack(nn.Linear(4, 6), nn.GroupNorm(2, 6)), x(4)),
    Case("instance norm", stack(nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, affine=True)), x(2, 6, 5)),
    Case("instance norm without parameters", stack(nn.Conv1d(2, 4, 3), nn.InstanceNorm1d(4)), x(2, 6)),
    Case("batch norm in eval mode", eval_batch_norm, x(2, 5, 6)),
    Case("convolution 1d", stack(nn.Conv1d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv1d(4, 2, 3, stride=2)), x(3, 9)),
    Case("convolution 2d", stack(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 2, stride=2)), x(2, 7, 8)),
    Case("convolution, grouped and dilated", stack(nn.Conv2d(4, 6, 3, groups=2, dilation=2)), x(4, 7, 8)),
    Case(
        "convolution, pooling, head",
        stack(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(24, 3)),
        x(2, 6, 8),
    ),
    Case("self attention", lambda: Do(attention, attention=nn.MultiheadAttention(8, 2, batch_first=True)), x(4, 8)),
    Case(
        "cross attention",
        lambda: Do(cross_attention, attention=nn.MultiheadAttention(8, 2, batch_first=True), other=nn.Linear(8, 8)),
        x(4, 8),
    ),
    Case(
        "attention with key and value bias",
        lambda: Do(attention, attention=nn.MultiheadAttention(8, 2, batch_first=True, add_bias_kv=True)),
        x(4, 8),
    ),
    Case("transformer layer", transformer, x(4, 8)),
    Case("transformer layer, norm first", lambda: transformer(norm_first=True), x(4, 8)),
    Case(
        "transformer with embedding",
        lambda: nn.Sequential(nn.Embedding(11, 8), transformer(), nn.Linear(8, 11)),
        tokens(5),
    ),
    Case("layer called twice", lambda: Do(lambda m, d: m.f(torch.tanh(m.f(d))), f=nn.Linear(5, 5)), x(5)),
    Case("layer called at three depths", lambda: Do(tree, a=nn.Linear(5, 5)), x(4, 5)),
    Case(
        "weight and its transpose",
        lambda: Do(lambda m, d: F.linear(torch.tanh(F.linear(d, m.w)), m.w.t()), w=free(4, 6)),
        x(6),
    ),
    Case("rnn cell by hand", lambda: recurrent(nn.RNNCell(3, 4), 4), x(6, 3)),
    Case("gru cell by hand", lambda: recurrent(nn.GRUCell(3, 4), 4), x(4, 3)),
    Case("lora", lora, x(6)),
    Case("merged lora", merged_lora, x(6)),
    Case(
        "frozen first layer",
        lambda: frozen(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)), "0.weight", "0.bias"),
        x(6),
    ),
    Case(
        "only biases",
        lambda: frozen(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)), "0.weight", "2.weight"),
        x(6),
    ),
    Case(
        "frozen middle",
        lambda: frozen(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 3)), "2.weight"),
        x(6),
    ),
    Case(
        "weight norm",
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 4)), nn.Tanh(), nn.Linear(4, 2)),
        x(6),
    ),
    Case(
        "weight norm of a convolution", lambda: nn.Sequential(parametrizations.weight_norm(nn.Conv1d(2, 4, 3))), x(2, 6)
    ),
    Case("orthogonal parametrisation", lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(4, 4))), x(4)),
    Case("softmax of a weight", lambda: Do(lambda m, d: d @ m.w.softmax(0), w=free(6, 4)), x(6)),
    Case("pruned", pruned, x(6)),
    Case(
        "slices of one parameter",
        lambda: Do(lambda m, d: F.linear(d, m.w[:3]) * F.linear(d, m.w[2:5], m.b[1:4]), w=free(6, 4), b=free(5)),
        x(4),
    ),
    Case(
        "chunks of one parameter",
        lambda: Do(lambda m, d: F.linear(torch.tanh(F.linear(d, m.w.chunk(2)[0])), m.w.chunk(2)[1]), w=free(8, 4)),
        x(4),
    ),
    Case(
        "residual and concatenation",
        lambda: Do(lambda m, d: m.b(torch.cat([d, m.a(d)], 1)) + d[:, :3], a=nn.Linear(6, 4), b=nn.Linear(10, 3)),
        x(6),
    ),
    Case(
        "regularised loss", lambda: Do(lambda m, d: m.f(d) + 0.1 * m.f.weight.square().sum(), f=nn.Linear(6, 4)), x(6)
    ),
    Case("checkpointed", lambda: Do(checkpointed, a=nn.Linear(4, 6), b=nn.Linear(6, 6), c=nn.Linear(6, 2)), x(4)),
    Case(
        "function with its own backward",
        lambda: Do(lambda m, d: Scale.apply(m.f(d), m.w), f=nn.Linear(5, 4), w=free(4)),
        x(5),
        generic=True,
    ),
    Case(
        "gathered token",
        lambda: Do(lambda m, d: m.b(m.a(d)[torch.arange(len(d)), 1]), a=nn.Linear(4, 6), b=nn.Linear(6, 2)),
        x(3, 4),
    ),
    Case("unused half", lambda: Do(lambda m, d: m.b(m.a(d)[:, ::2]), a=nn.Linear(4, 6), b=nn.Linear(6, 2)), x(6, 4)),
]
