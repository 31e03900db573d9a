"""What the CIFAR-10 experiments share: the pictures, a private training by the library, its noise, its accuracy."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from budgets import noise_for
from torch import Tensor, nn
from torch.nn import functional as F

from hush.clipping.clips import Clip, FlatClip
from hush.plan import Plan
from hush.private import Private
from hush.recipes import data
from hush.sampling.lots import PoissonLots
from hush.training.averaging import Average

DELTA = 1e-5
TRAINED, ALL = 45_000, 50_000  # settings are chosen on the last 5,000 training records, which are then left out


@dataclass(frozen=True)
class Pictures:
    """CIFAR-10 as stored, on a device; where values were rounded to carry them, to multiples of `coarse`."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    coarse: int = 1

    def chosen_on(self) -> "Pictures":
        """The records that train when settings are chosen, and the 5,000 set aside as a test set."""
        first = len(self.train_y) * TRAINED // ALL
        return Pictures(self.train_x[:first], self.train_y[:first], self.train_x[first:], self.train_y[first:])

    def trained_on(self) -> "Pictures":
        """The same records, and the test set: the 5,000 are not trained on."""
        first = len(self.train_y) * TRAINED // ALL
        return Pictures(self.train_x[:first], self.train_y[:first], self.test_x, self.test_y)


def read(path: Path | None, device: str, few: int | None = None) -> Pictures:
    """CIFAR-10 from its files, or from an .npz with x, y, coarse, trained; `few` for a quick look."""
    if path is None:
        images = data.load("cifar10")
        parts, coarse = (images.train_x, images.train_y, images.test_x, images.test_y), 1
    else:
        with np.load(path) as kept:
            x, y, first = torch.from_numpy(kept["x"]), torch.from_numpy(kept["y"]).long(), int(kept["trained"])
            parts, coarse = (x[:first], y[:first], x[first:], y[first:]), int(kept["coarse"])
    return Pictures(*(part[:few].to(device) for part in parts), coarse)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One private training. The rate falls linearly to `fall` times its first value; `noise` is joint."""

    lot_size: int
    steps: int
    noise: float
    clip: Clip
    rate: float
    momentum: float = 0.9
    fall: float = 0.0
    averaging: float = 0.0
    views: int = 1
    below: float = 1.0  # the rate of all layers but the last, as a share of its
    half: bool = False  # the forward pass in bfloat16, where autocast does so

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self) | {"clip": str(self.clip)}


def to_budget(
    *, epsilon: float, lot_size: int, epochs: float, examples: int, clip: float, rate: float, **more: Any
) -> Setting:
    """The setting with the least noise for (epsilon, 1e-5), flat clipping; noise by the library, kept in a file."""
    steps = max(1, round(epochs * examples / lot_size))
    noise = noise_for(lot_size=lot_size, steps=steps, pca_noise=None, epsilon=epsilon, examples=examples)
    return Setting(lot_size=lot_size, steps=steps, noise=noise, clip=FlatClip(clip), rate=rate, **more)


def train(
    model: nn.Module,
    setting: Setting,
    batch_of: Callable[[Tensor], tuple[Tensor, Tensor]],
    examples: int,
    *,
    seed: int,
    batch: int | None = None,
    at: Callable[[int, nn.Module], None] | None = None,
) -> nn.Module:
    """The model after Algorithm 1 by the library (`Private`), its parameters averaged if the setting says so.

    `batch_of(index)` gives inputs [B, ..] and labels [B]; with K views inputs are [B, K, ..], the K losses of a record
    are averaged before clipping. `at(step, model)` sees the model after every step. A seeded run protects nobody.
    """
    device = next(model.parameters()).device
    optimizer = optimizer_of(model, setting)
    lots = PoissonLots(examples=examples, lot_size=setting.lot_size)
    plan = Plan(lots=lots, steps=setting.steps, clip=setting.clip, noise_multiplier=setting.noise)
    average = Average(model, setting.averaging) if setting.averaging else None
    views = setting.views

    def losses_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=setting.half):
            out = model(x if views == 1 else x.flatten(0, 1))
        losses = F.cross_entropy(out.float(), y.repeat_interleave(views), reduction="none")
        return losses if views == 1 else losses.unflatten(0, (-1, views))

    size = batch or -(-(setting.lot_size + 6 * int(setting.lot_size**0.5) + 8) // 8) * 8
    with Private(model, plan, losses_of, seed=seed) as private:
        for step, lot in enumerate(private.lots(), 1):
            for ticket in lot.batches(size):
                private.add(ticket, *batch_of(ticket.index.to(device)))
            private.step(optimizer)
            if average is not None:
                average.update()
            for group in optimizer.param_groups:
                group["lr"] = group["first"] * (1 - (1 - setting.fall) * step / setting.steps)
            if at is not None:
                at(step, model)
    if average is not None:
        with average.applied():
            return copy.deepcopy(model)
    return model


def optimizer_of(model: nn.Module, setting: Setting) -> torch.optim.Optimizer:
    """SGD; the last linear layer has the rate, the layers below their share of it."""
    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    top = set(last.parameters())
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": list(top), "lr": setting.rate, "first": setting.rate}]
    if lower := [p for p in trained if p not in top]:
        share = setting.rate * setting.below
        groups.append({"params": lower, "lr": share, "first": share})
    return torch.optim.SGD(groups, lr=setting.rate, momentum=setting.momentum)


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor, *, batch: int = 1000) -> float:
    """Share of right answers; inputs [N, K, ..] are K views of a record, whose outputs are averaged."""
    right = 0
    for part, labels in zip(x.split(batch), y.split(batch), strict=True):
        out = model(part.flatten(0, 1).float()).unflatten(0, part.shape[:2]).mean(1)
        right += int((out.argmax(1) == labels).sum())
    return right / len(y)


def one_view(x: Tensor, y: Tensor, generator: torch.Generator) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Of cached views [N, K, ..] a random one of each record, drawn at every use."""

    def batch_of(index: Tensor) -> tuple[Tensor, Tensor]:
        which = torch.randint(x.shape[1], (len(index),), generator=generator, device=x.device)
        return x[index, which].float(), y[index]

    return batch_of


def all_views(x: Tensor, y: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """The record's cached views, all of them ([B, K, ..]), or its only one ([B, ..])."""

    def batch_of(index: Tensor) -> tuple[Tensor, Tensor]:
        part = x[index].float()
        return (part[:, 0] if part.shape[1] == 1 else part), y[index]

    return batch_of


def seeds(count: int, first: int = 2016) -> Iterator[int]:
    """Seeds of the repetitions."""
    yield from range(first, first + count)
