"""Architectures written out, small: image models, language models, tables, graphs, signals, flows, pairs."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.judge import Case
from zoo.modules import Do

D = 8


def images(rows: int, length: int) -> tuple[Tensor, ...]:
    size = 8 + 4 * (length % 3)
    return torch.randn(rows, 3, size, size), torch.randint(4, (rows,))


def square(rows: int, length: int) -> tuple[Tensor, ...]:
    return torch.randn(rows, 3, 8, 8), torch.randint(4, (rows,))


def text(rows: int, length: int) -> tuple[Tensor, ...]:
    """Tokens padded to the longest, with their mask: another length for each batch."""
    lengths = torch.randint(2, length + 3, (rows, 1))
    return torch.randint(2, 19, (rows, length + 2)), torch.arange(length + 2)[None] < lengths


def classify(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def following(model: nn.Module, tokens: Tensor, mask: Tensor) -> Tensor:
    each = F.cross_entropy(model(tokens)[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none") * mask[:, 1:]
    return each.sum(1) / mask[:, 1:].sum(1).clamp(min=1)


def squares(model: nn.Module, *inputs: Tensor) -> Tensor:
    out = model(*inputs).flatten(1)
    return out.square().mean(1) + out.sin().mean(1)


def conv(inside: int, outside: int, size: int = 3, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(inside, outside, size, padding=size // 2, **options)


class Block(nn.Module):
    """A residual network's block, with the norm and the scale of its kind."""

    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.GroupNorm(2, width)
        if kind == "convnext":
            self.body = nn.Sequential(
                conv(width, width, 7, groups=width), conv(width, 2 * width, 1), nn.GELU(), conv(2 * width, width, 1)
            )
            self.scale = nn.Parameter(torch.full((width, 1, 1), 0.1))
        elif kind == "mobile":
            self.body = nn.Sequential(
                conv(width, 2 * width, 1),
                nn.ReLU6(),
                conv(2 * width, 2 * width, 3, groups=2 * width),
                nn.Hardswish(),
                conv(2 * width, width, 1),
            )
            self.squeeze = nn.Sequential(
                nn.AdaptiveAvgPool2d(1), conv(width, 2, 1), nn.SiLU(), conv(2, width, 1), nn.Sigmoid()
            )
        elif kind == "regnet":
            self.body = nn.Sequential(conv(width, width, 3, groups=4), nn.ReLU(), conv(width, width, 1))
        else:
            self.body = nn.Sequential(conv(width, width), nn.ReLU(), conv(width, width))

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(self.norm(x))
        if self.kind == "mobile":
            out = out * self.squeeze(out)
        return x + (out * self.scale if self.kind == "convnext" else out)


def image_model(kind: str) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        nn.Conv2d(3, 8, 4, 4 if kind == "convnext" else 2), Block(8, kind), nn.Conv2d(8, 8, 2, 2), Block(8, kind),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


class Attention(nn.Module):
    """Grouped-query attention with rotary positions, biases by distance, or neither."""

    def __init__(self, heads: int = 2, groups: int = 2, positions: str = "", causal: bool = False) -> None:
        super().__init__()
        self.heads, self.groups, self.positions, self.causal = heads, groups, positions, causal
        self.size = D // heads
        self.q = nn.Linear(D, D)
        self.kv = nn.Linear(D, 2 * groups * self.size, bias=False)
        self.out = nn.Linear(D, D)
        self.bias = nn.Parameter(torch.randn(heads, 16) * 0.2) if positions == "relative" else None

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        rows, length, _ = x.shape
        q = self.q(x).view(rows, length, self.heads, self.size).transpose(1, 2)
        k, v = self.kv(x).view(rows, length, 2, self.groups, self.size).permute(2, 0, 3, 1, 4)
        if self.positions == "rotary":
            angle = torch.arange(length, dtype=x.dtype)[:, None] * torch.tensor([1.0, 0.1], dtype=x.dtype)
            q, k = (
                torch.cat(
                    [
                        t[..., :2] * angle.cos() - t[..., 2:] * angle.sin(),
                        t[..., 2:] * angle.cos() + t[..., :2] * angle.sin(),
                    ],
                    3,
                )
                for t in (q, k)
            )
        k, v = (t.repeat_interleave(self.heads // self.groups, 1) for t in (k, v))
        scores = q @ k.transpose(2, 3) / math.sqrt(self.size)
        if self.bias is not None:
            away = (torch.arange(length)[:, None] - torch.arange(length)).abs().clamp(max=15)
            scores = scores + self.bias[:, away]
        if self.causal:
            scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -math.inf)
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None], -1e9)
        return self.out((scores.softmax(3) @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.one, self.two = nn.LayerNorm(D), nn.RMSNorm(D)
        self.attention = Attention(**options)
        self.up, self.gate, self.down = nn.Linear(D, 12), nn.Linear(D, 12), nn.Linear(12, D)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.one(x), mask)
        h = self.two(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Language(nn.Module):
    """Tokens, positions, layers and a head, which may be the table itself."""

    def __init__(self, positions: str = "learned", tied: bool = False, drop: float = 0.0, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(19, D)
        self.positions = nn.Embedding(16, D) if positions == "learned" else None
        self.layers = nn.ModuleList(Layer(positions=positions, causal=True, **options) for _ in range(2))
        self.head = None if tied else nn.Linear(D, 19, bias=False)
        self.drop = nn.Dropout(drop)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(self.drop(x))
        return x @ self.table.weight.t() if self.head is None else self.head(x)


class Experts(nn.Module):
    """The two best of four experts for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.gate = nn.Embedding(19, D), nn.Linear(D, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, 12), nn.GELU(), nn.Linear(12, D)) for _ in range(4))
        self.head = nn.Linear(D, 19)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        flat = x.flatten(0, 1)
        weights, chosen = self.gate(flat).softmax(1).topk(2, 1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(chosen == number)
            if len(row):
                out = out.index_add(0, row, expert(flat[row]) * weights[row, place, None])
        return self.head(x + out.view_as(x))


class Bert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.positions = nn.Embedding(19, D, padding_idx=0), nn.Embedding(16, D)
        self.norm, self.layers = nn.LayerNorm(D), nn.ModuleList(Layer() for _ in range(2))
        self.pool = nn.Linear(D, 3)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        ids = torch.arange(tokens.shape[1])[None]
        x = self.norm(self.table(tokens) + self.positions(ids))
        for layer in self.layers:
            x = layer(x, mask)
        return self.pool(x[:, 0])


class ViT(nn.Module):
    def __init__(self, distilled: bool = False) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, D, 4, 4)
        self.token, self.positions = nn.Parameter(torch.randn(1, 1, D)), nn.Parameter(torch.randn(1, 5, D) * 0.1)
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(2)), nn.Linear(D, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:, 0])


class Swin(nn.Module):
    """Attention inside shifted windows, with a table of relative positions, and patch merging."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.layer = nn.Conv2d(3, D, 2, 2), Layer()
        self.table, self.merge, self.head = nn.Parameter(torch.randn(9, D) * 0.2), nn.Linear(4 * D, D), nn.Linear(D, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).permute(0, 2, 3, 1)
        rows, high, wide, _ = x.shape
        windows = x.roll((-1, -1), (1, 2)).view(rows, high // 2, 2, wide // 2, 2, D).transpose(2, 3).reshape(-1, 4, D)
        index = torch.tensor([[0, 1, 3, 4], [1, 2, 4, 5], [3, 4, 6, 7], [4, 5, 7, 8]])
        windows = self.layer(windows + self.table[index].mean(0))
        x = windows.view(rows, high // 2, wide // 2, 2, 2, D).transpose(2, 3).reshape(rows, high, wide, D)
        x = self.merge(torch.cat([x[:, i::2, j::2] for i in (0, 1) for j in (0, 1)], 3))
        return self.head(x.mean((1, 2)))


class UNet(nn.Module):
    """A denoiser: down, up, a skip, and the time as a scale and shift."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.down, self.up = conv(3, 8), nn.Conv2d(8, 8, 3, 2, 1), nn.ConvTranspose2d(8, 8, 4, 2, 1)
        self.norm, self.time, self.out = nn.GroupNorm(4, 8), nn.Linear(4, 16), conv(16, 3)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        waves = torch.cat([(time[:, None] * f).sin() if f < 3 else (time[:, None] * f).cos() for f in (1, 2, 3, 4)], 1)
        scale, shift = self.time(waves)[:, :, None, None].chunk(2, 1)
        h = F.silu(self.into(x))
        low = F.silu(self.norm(self.down(h)) * (1 + scale) + shift)
        return self.out(torch.cat([h, self.up(low)], 1))


class WaveNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Conv1d(2, D, 1)
        self.gated = nn.ModuleList(nn.Conv1d(D, 2 * D, 2, dilation=2**k) for k in range(2))
        self.skips = nn.ModuleList(nn.Conv1d(D, 3, 1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x, out = self.into(x), []
        for gated, skip in zip(self.gated, self.skips, strict=True):
            a, b = gated(F.pad(x, (gated.dilation[0], 0))).chunk(2, 1)
            h = a.tanh() * b.sigmoid()
            out.append(skip(h))
            x = x + h
        return sum(out[1:], out[0])


class Factorisation(nn.Module):
    """A factorisation machine: fields, pairs of fields, and a table of their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.table = nn.EmbeddingBag(30, 1, mode="sum"), nn.Embedding(30, D)
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, fields: Tensor) -> Tensor:
        each = self.table(fields)
        pairs = (each.sum(1).square() - each.square().sum(1)).sum(1) / 2
        return self.bias + self.line(fields)[:, 0] + pairs


class TabTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(30, D) for _ in range(3))
        self.column = nn.Parameter(torch.randn(3, D))
        self.layer, self.norm, self.head = Layer(), nn.LayerNorm(4), nn.Linear(3 * D + 4, 2)

    def forward(self, fields: Tensor, numbers: Tensor) -> Tensor:
        x = torch.stack([table(fields[:, k]) for k, table in enumerate(self.tables)], 1) + self.column
        return self.head(torch.cat([self.layer(x).flatten(1), self.norm(numbers)], 1))


class Graphs(nn.Module):
    """Message passing on padded graphs, attention over neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.message, self.score, self.out = (
            nn.Linear(4, D),
            nn.Linear(D, D),
            nn.Linear(2 * D, 1),
            nn.Linear(D, 2),
        )

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        x = self.into(nodes).relu()
        count = x.shape[1]
        both = torch.cat([x[:, :, None].expand(-1, -1, count, -1), x[:, None].expand(-1, count, -1, -1)], 3)
        weights = self.score(both)[..., 0].masked_fill(~edges, -1e9).softmax(2)
        x = x + weights @ self.message(x)
        return self.out(x.sum(1))


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(D, 6), nn.Linear(3, D)

    def forward(self, x: Tensor) -> Tensor:
        mean, spread = self.encoder(x).chunk(2, 1)
        z = mean + spread.exp() * torch.randn_like(mean)
        divergence = 0.5 * (mean.square() + (2 * spread).exp() - 2 * spread - 1).sum(1)
        return (self.decoder(z) - x).square().sum(1) + divergence


class Flow(nn.Module):
    """Affine couplings and a triangular matrix with its determinant."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 8)) for _ in range(2))
        self.matrix = nn.Parameter(torch.eye(D) + 0.1 * torch.randn(D, D))

    def forward(self, x: Tensor) -> Tensor:
        logdet = torch.linalg.slogdet(self.matrix)[1] + x.new_zeros(len(x))
        x = x @ self.matrix
        for net in self.nets:
            a, b = x.chunk(2, 1)
            scale, shift = net(a).tanh().chunk(2, 1)
            x, logdet = torch.cat([b * scale.exp() + shift, a], 1), logdet + scale.sum(1)
        return 0.5 * x.square().sum(1) - logdet


class Adapted(nn.Module):
    """A frozen layer with an adapter of one of the usual kinds."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.base, self.head = nn.Linear(D, D), nn.Linear(D, 4)
        self.base.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, D) * 0.3), nn.Parameter(torch.zeros(D, 2))
        self.scale = nn.Parameter(torch.ones(D))
        if kind == "low bits":
            self.register_buffer("codes", torch.randint(-7, 8, (D, D), dtype=torch.int8))
            self.scale.requires_grad_(False)
        if kind == "ia3":
            self.down.requires_grad_(False)
            self.up.requires_grad_(False)
        elif kind == "lora":
            self.scale.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "ia3":
            return self.head(self.base(x) * self.scale)
        update = self.up @ self.down
        if self.kind == "dora":
            weight = self.base.weight + update
            return self.head(F.linear(x, self.scale[:, None] * weight / weight.norm(dim=1, keepdim=True)))
        if self.kind == "low bits":
            return self.head(F.linear(x, self.codes.to(x.dtype) * 0.05) + F.linear(x, update))  # type: ignore[operator]
        return self.head(self.base(x) + x @ self.down.t() @ self.up.t())


class Dropped(nn.Module):
    """Layers that whole batches skip."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(D, D) for _ in range(3)), nn.Linear(D, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not self.training or float(torch.rand(())) > 0.4:
                x = x + layer(x).tanh()
        return self.head(x)


def preferences(model: nn.Module, tokens: Tensor, mask: Tensor) -> Tensor:
    """A chosen and a rejected answer inside one example, the frozen model left out."""
    good, bad = (-following(model, one, mask) for one in (tokens, tokens.flip(1)))
    return -F.logsigmoid(0.5 * (good - bad))


def penalised(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """With the norm of the gradient by the input: a second derivative."""
    x = x.detach().requires_grad_()
    loss = F.cross_entropy(model(x), y, reduction="none")
    (slope,) = torch.autograd.grad(loss.sum(), x, create_graph=True)
    return loss + 0.1 * slope.square().sum(1)


def two_views(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return torch.stack([F.cross_entropy(model(x + s), y, reduction="none") for s in (0.0, 0.5, -0.5)], 1)


def half(losses: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(model: nn.Module, *inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return losses(model, *inputs).float()

    return run


def rows(rows: int, length: int) -> tuple[Tensor, ...]:
    return torch.randn(rows, D), torch.randint(4, (rows,))


def cases() -> list[Case]:
    def fields(rows: int, length: int) -> tuple[Tensor, ...]:
        return (torch.randint(30, (rows, 3)),)

    def table(rows: int, length: int) -> tuple[Tensor, ...]:
        return torch.randint(30, (rows, 3)), torch.randn(rows, 4)

    def graphs(rows: int, length: int) -> tuple[Tensor, ...]:
        return torch.randn(rows, length, 4), (torch.rand(rows, length, length) < 0.4) | torch.eye(
            length, dtype=torch.bool
        )

    def signals(rows: int, length: int) -> tuple[Tensor, ...]:
        return (torch.randn(rows, 2, length + 4),)

    def timed(rows: int, length: int) -> tuple[Tensor, ...]:
        return torch.randn(rows, 3, 8, 8), torch.rand(rows)

    def vectors(rows: int, length: int) -> tuple[Tensor, ...]:
        return (torch.randn(rows, D),)

    def alone(model: nn.Module, *inputs: Tensor) -> Tensor:
        return model(*inputs)

    def mlp() -> nn.Module:
        return nn.Sequential(nn.Linear(D, 6), nn.Tanh(), nn.Linear(6, 4))

    found = [Case(kind, image_model(kind), images, classify) for kind in ("resnet", "convnext", "mobile", "regnet")]
    found += [
        Case("vit", ViT, square, classify, always=True),
        Case("swin", Swin, images, classify),
        Case("unet denoiser", UNet, timed, squares),
        Case("gpt, tied, learned positions", lambda: Language(tied=True), text, following, always=True),
        Case("gpt with dropout", lambda: Language(drop=0.2), text, following, draws=True),
        Case(
            "llama: rotary, grouped queries",
            lambda: Language("rotary", heads=2, groups=1),
            text,
            following,
            always=True,
        ),
        Case("t5: relative positions", lambda: Language("relative"), text, following),
        Case("bert, padded", Bert, text, squares, always=True),
        Case("mixture of experts", Experts, text, following, always=True),
        Case("wavenet", WaveNet, signals, squares),
        Case("factorisation machine", Factorisation, fields, lambda m, x: F.softplus(m(x))),
        Case("tab transformer", TabTransformer, table, squares),
        Case("graph attention", Graphs, graphs, squares),
        Case("vae", VAE, vectors, alone, draws=True),
        Case("flow", Flow, vectors, alone),
        Case("preferences", lambda: Language(tied=True), text, preferences),
        Case("gradient penalty", mlp, rows, penalised),
        Case("three views", mlp, rows, two_views, always=True),
        Case("dropped layers", Dropped, rows, classify, draws=True, batches=tuple((4 + k % 3, 4) for k in range(20))),
        Case("siamese", lambda: Do(lambda m, x: m.net(x) - m.net(x.flip(1)), net=mlp()), vectors, squares),
        Case("bf16 gpt", lambda: Language(tied=True), text, half(following), exact=False, tolerance=4e-2, always=True),
        Case("bf16 convnext", image_model("convnext"), images, half(classify), exact=False, tolerance=4e-2),
        Case(
            "bf16 lstm",
            lambda: Do(lambda m, x: m.net(x)[0], net=nn.LSTM(D, 16, batch_first=True)),
            lambda r, n: (torch.randn(r, n + 20, D),),
            half(squares),
            exact=False,
            tolerance=4e-2,
        ),
    ]
    found += [
        Case(f"adapter: {kind}", lambda kind=kind: Adapted(kind), rows, classify)
        for kind in ("lora", "dora", "ia3", "low bits")
    ]
    return found
