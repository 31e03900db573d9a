"""The models and batches that the step benchmark times: plain PyTorch, nothing in them knows about privacy."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hush.recipes.networks import WideResNet, paper_cifar10


def class_losses(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, reduction="none")


@dataclass(frozen=True)
class Case:
    """A model, a batch, and one loss per example; `autocast` runs the forward pass in bfloat16."""

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    autocast: bool = False
    losses: Callable[[Tensor, Tensor], Tensor] = class_losses
    images: bool = False
    """Whether the batch has height and width, so that channels may come last in memory."""
    channels_last: bool = False

    def forward(self, model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
        """One loss per example, in fp32."""
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=self.autocast):
            out = model(x)
        return self.losses(out.float(), y)


def images(batch: int, *shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, *shape), torch.randint(0, 10, (batch,))


def texts(batch: int, length: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, vocabulary, (batch, length + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def token_losses(logits: Tensor, y: Tensor) -> Tensor:
    """The mean over the tokens of each example."""
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view(y.shape).mean(1)


def mlp(inputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 1000), nn.ReLU(), nn.Linear(1000, 10))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.read = nn.Linear(width, 3 * width)
        self.write = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.read(x).chunk(3, -1))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.write(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mix = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mix(self.norm2(x))


class Transformer(nn.Module):
    """A causal language model of the GPT-2 kind, its output layer of its own or tied to the embedding."""

    def __init__(
        self, *, vocabulary: int, width: int, layers: int, heads: int, length: int, tied: bool = False
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, vocabulary, bias=False)
        for embedding in (self.words, self.places):
            nn.init.normal_(embedding.weight, std=0.02)
        if tied:
            self.out.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return self.out(self.norm(self.blocks(self.words(tokens) + self.places(places))))


class LowRank(nn.Module):
    """LoRA (Hu et al. 2021): a frozen linear layer and a trainable product of two thin ones beside it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.normal_(self.up.weight, std=1 / math.sqrt(rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def low_rank(model: nn.Module, rank: int) -> nn.Module:
    """The model frozen, with adapters on both linear layers of every attention."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        if isinstance(module, Attention):
            module.read, module.write = LowRank(module.read, rank), LowRank(module.write, rank)
    return model


class Recurrent(nn.Module):
    """One LSTM layer and a classifier on its last state; reads vectors, or words through an embedding."""

    def __init__(self, *, inputs: int = 128, hidden: int = 128, vocabulary: int | None = None) -> None:
        super().__init__()
        self.words = nn.Identity() if vocabulary is None else nn.Embedding(vocabulary, inputs)
        self.lstm = nn.LSTM(inputs, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(self.words(x))[0][:, -1])


def words_and_labels(batch: int, length: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, vocabulary, (batch, length)), torch.randint(0, 10, (batch,))


def small_transformer() -> nn.Module:
    return Transformer(vocabulary=1000, width=128, layers=2, heads=4, length=64)


def gpt2(length: int, *, tied: bool = False) -> nn.Module:
    """The size of GPT-2 small: 12 layers of width 768, 124 million parameters if tied."""
    return Transformer(vocabulary=50257, width=768, layers=12, heads=12, length=length, tied=tied)


def cases(device: str) -> dict[str, Case]:
    """The cases of a device, by name."""
    cuda = device == "cuda"
    small = [
        Case("mlp60", partial(mlp, 60), partial(images, 600, 60)),
        Case("mlp784", partial(mlp, 784), partial(images, 600, 784)),
        Case("cnn24", paper_cifar10, partial(images, 2000 if cuda else 128, 3, 24, 24), autocast=cuda, images=True),
        Case("transformer", small_transformer, partial(texts, 64, 64, 1000), losses=token_losses),
        Case("lstm", Recurrent, partial(images, 64, 64, 128)),
        Case("lstm-words", partial(Recurrent, vocabulary=1000), partial(words_and_labels, 64, 64, 1000)),
        Case("wrn16-4", WideResNet, partial(images, 256 if cuda else 16, 3, 32, 32), autocast=cuda, images=True),
    ]
    if cuda:
        words = partial(texts, vocabulary=50257)
        language = {"autocast": True, "losses": token_losses}
        small += [
            Case("gpt2-512", partial(gpt2, 512), partial(words, 16, 512), **language),
            Case("gpt2-2048", partial(gpt2, 2048), partial(words, 4, 2048), **language),
            Case("gpt2-tied", partial(gpt2, 512, tied=True), partial(words, 16, 512), **language),
            Case("gpt2-lora", lambda: low_rank(gpt2(512), 16), partial(words, 16, 512), **language),
        ]
    return {case.name: case for case in small}
