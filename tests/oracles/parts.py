"""Parts that the models of models.py are built from: modules and forward passes of many kinds."""

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

B = 5


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
