"""Small models of many kinds, as (name, build, batch, losses): what the gradient engine must get right."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

B = 5


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


class Do(nn.Module):
    """A module from parts and a function of them."""

    def __init__(self, run: Callable[..., Tensor], **parts: nn.Module | nn.Parameter | Tensor) -> None:
        super().__init__()
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)
        self.run = run

    def forward(self, *batch: Tensor) -> Tensor:
        return self.run(self, *batch)


def free(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * 0.5)


def x(*shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(B, *shape),)


def tokens(length: int, vocabulary: int = 11) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randint(0, vocabulary, (B, length)),)


def frozen(model: nn.Module, *names: str) -> nn.Module:
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return model


def tied() -> nn.Module:
    def run(m: nn.Module, t: Tensor) -> Tensor:
        return m.head(torch.tanh(m.table(t)))

    model = Do(run, table=nn.Embedding(11, 6), head=nn.Linear(6, 11, bias=False))
    model.head.weight = model.table.weight
    return model


def recurrent(cell: nn.Module, features: int) -> nn.Module:
    def run(m: nn.Module, data: Tensor) -> Tensor:
        h = torch.zeros(len(data), features, dtype=data.dtype)
        for t in range(data.shape[1]):
            h = m.cell(data[:, t], h)
        return h

    return Do(run, cell=cell)


def transformer(**options: object) -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True, **options)


def lora() -> nn.Module:
    def run(m: nn.Module, data: Tensor) -> Tensor:
        return m.base(data) + 0.7 * F.linear(F.linear(data, m.a), m.b)

    return frozen(Do(run, base=nn.Linear(6, 4), a=free(2, 6), b=free(4, 2)), "base.weight", "base.bias")


def merged_lora() -> nn.Module:
    model = Do(lambda m, data: F.linear(data, m.w + m.b @ m.a), w=free(4, 6), a=free(2, 6), b=free(4, 2))
    return frozen(model, "w")


def pruned() -> nn.Module:
    mask = (torch.arange(24).view(4, 6) % 3 > 0).float()
    return Do(lambda m, data: F.linear(data, m.w * m.mask), w=free(4, 6), mask=mask)


def stack(*modules: nn.Module) -> Callable[[], nn.Module]:
    """The modules one after another, with new random parameters (scales and shifts too) each time it is built."""

    def build() -> nn.Module:
        model = copy.deepcopy(nn.Sequential(*modules))
        for name, param in model.named_parameters():
            param.data = torch.randn_like(param) * 0.5 + (1.0 if name.endswith("weight") and param.dim() == 1 else 0.0)
        return model

    return build


def eval_batch_norm() -> nn.Module:
    norm = nn.BatchNorm2d(4)
    norm.running_mean = torch.randn(4)
    norm.running_var = torch.rand(4) + 0.5
    return nn.Sequential(nn.Conv2d(2, 4, 3), norm.eval())


def position_first(m: nn.Module, data: Tensor) -> Tensor:
    return m.b(torch.relu(m.a(data.transpose(0, 1)))).transpose(0, 1)


def attention(m: nn.Module, data: Tensor) -> Tensor:
    return m.attention(data, data, data, need_weights=False)[0]


def cross_attention(m: nn.Module, data: Tensor) -> Tensor:
    return m.attention(data, torch.tanh(m.other(data)), data * 2, need_weights=True)[0]


def windows(m: nn.Module, data: Tensor) -> Tensor:
    """[B, T, d] -> [2 B, T / 2, d] and back: an example has two rows of the leading dimension."""
    cut = data.reshape(-1, data.shape[1] // 2, data.shape[2])
    return m.b(m.a(cut).square()).reshape(len(data), -1)


def checkpointed(m: nn.Module, data: Tensor) -> Tensor:
    hidden = checkpoint(lambda h: torch.tanh(m.b(torch.relu(m.a(h)))), data, use_reentrant=False)
    return m.c(hidden)


def packed(m: nn.Module, data: Tensor) -> Tensor:
    """Only the tokens with a positive first feature take part: a different number for each example."""
    keep = data[:, :, 0] > 0
    rows = m.a(data[keep])
    owner = torch.arange(len(data))[:, None].expand_as(keep)[keep]
    return torch.zeros(len(data), rows.shape[1], dtype=data.dtype).index_add(0, owner, rows.square())


class Scale(torch.autograd.Function):
    """A function with its own backward, unknown to everybody."""

    @staticmethod
    def forward(ctx, data: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(data, weight)
        return data * weight

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        data, weight = ctx.saved_tensors
        return gradient * weight, (gradient * data).sum(0)


def tree(m: nn.Module, data: Tensor) -> Tensor:
    """One layer called at three depths, with different numbers of rows each time."""
    h = torch.tanh(m.a(data))
    pooled = torch.tanh(m.a(h.mean(1)))
    return m.a(pooled) + m.a(h[:, :2]).sum(1)


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
