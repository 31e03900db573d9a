"""Models whose examples are not independent, in every way that came to mind: each must be refused."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

D = 6


class Net(nn.Module):
    """A small network with a place between its layers, and things that some mixings need."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, D)
        self.first, self.last, self.zero = nn.Linear(D, D), nn.Linear(D, 3), nn.Linear(D, D, bias=False)
        nn.init.zeros_(self.zero.weight)
        self.gate, self.tiny = nn.Parameter(torch.zeros(D)), nn.Parameter(torch.full((), 1e-6))
        self.norm = nn.BatchNorm1d(D)
        self.attention = nn.MultiheadAttention(D, 2)  # sequence first: batch-first inputs are mixed


Mixing = Callable[[Net, Tensor, Tensor], Tensor]


def inside(mix: Callable[[Net, Tensor], Tensor]) -> Mixing:
    """Between the two layers."""

    def losses(net: Net, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(net.last(mix(net, torch.tanh(net.first(x)))), y, reduction="none")

    return losses


def before(mix: Callable[[Net, Tensor], Tensor]) -> Mixing:
    """Before the first weight."""

    def losses(net: Net, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(net.last(torch.tanh(net.first(mix(net, x)))), y, reduction="none")

    return losses


def after(mix: Callable[[Net, Tensor, Tensor], Tensor]) -> Mixing:
    """With the losses, or what they are made from: (net, outputs, losses)."""

    def losses(net: Net, x: Tensor, y: Tensor) -> Tensor:
        out = net.last(torch.tanh(net.first(x)))
        return mix(net, out, F.cross_entropy(out, y, reduction="none"))

    return losses


def written(net: Net, h: Tensor) -> Tensor:
    out = h.clone()
    out[0] = h[-1]
    return out


def momentum(net: Net, h: Tensor) -> Tensor:
    net.norm.running_mean.mul_(0.9).add_(0.1 * h.detach().mean(0))  # type: ignore[union-attr]
    return h - net.norm.running_mean


def conv_over_batch(net: Net, h: Tensor) -> Tensor:
    return F.conv1d(h.t()[None], torch.eye(D)[:, :, None].expand(-1, -1, 3) / 3, padding=1)[0].t()


def first_weights(net: Net, h: Tensor) -> Tensor:
    return h * (h.detach()[0].abs() + 1)


def scaled_by_loss(net: Net, out: Tensor, loss: Tensor) -> Tensor:
    return loss * (loss.detach() / loss.detach().mean())


def hard_examples(net: Net, out: Tensor, loss: Tensor) -> Tensor:
    return torch.where(loss >= loss.mean(), loss, 0 * loss)


def contrastive(net: Net, out: Tensor, loss: Tensor) -> Tensor:
    return F.cross_entropy(out @ out.t(), torch.arange(len(out)), reduction="none")


MIXING: dict[str, Mixing] = {
    "batch norm": inside(lambda net, h: net.norm(h)),
    "batch norm of inputs": before(lambda net, x: net.norm(x)),
    "centred": inside(lambda net, h: h - h.mean(0)),
    "inputs centred": before(lambda net, x: x - x.mean(0)),
    "inputs standardised": before(lambda net, x: (x - x.mean(0)) / (x.std(0) + 1)),
    "inputs scaled by their norm": before(lambda net, x: x / x.norm()),
    "inputs scaled by their maximum": before(lambda net, x: x / x.abs().max()),
    "inputs scaled by a quantile": before(lambda net, x: x / (x.abs().flatten().quantile(0.9) + 1)),
    "branch on a maximum": before(lambda net, x: x / 255 if x.max() > 100 else x),
    "branch on finite inputs": before(lambda net, x: x if bool(x.isfinite().all()) else 0 * x.nan_to_num(0, 0, 0)),
    "branch on finite losses": after(lambda net, out, loss: loss if bool(loss.isfinite().all()) else 0 * out.sum(1)),
    "branch on large losses": after(lambda net, out, loss: loss if float(loss.max()) < 20 else 0 * loss),
    "branch on the sign of a sum": before(lambda net, x: x if float(x.sum()) > -1000 else -x),
    "clipped by the batch's norm": inside(lambda net, h: h * (50 / h.norm()).clamp(max=1)),
    "rolled": inside(lambda net, h: h.roll(1, 0)),
    "rolled inputs": before(lambda net, x: x.roll(1, 0)),
    "flipped": inside(lambda net, h: h.flip(0)),
    "sorted": inside(lambda net, h: h.sort(0).values),
    "sorted inputs": before(lambda net, x: x.sort(0).values),
    "ranked inputs": before(lambda net, x: x.argsort(0).argsort(0).float()),
    "cumulated": inside(lambda net, h: h.cumsum(0)),
    "running maximum": inside(lambda net, h: h.cummax(0).values),
    "softmax over the batch": inside(lambda net, h: h.softmax(0)),
    "attention over the batch": inside(lambda net, h: net.attention(h[:, None], h[:, None], h[:, None])[0][:, 0]),
    "dot products": inside(lambda net, h: h + (h @ h.t()).softmax(1) @ h),
    "message passing": inside(lambda net, h: h + torch.zeros_like(h).index_add(0, torch.arange(len(h)).roll(1), h)),
    "convolution over the batch": inside(conv_over_batch),
    "lerp with a neighbour, 1e-6": inside(lambda net, h: h.lerp(h.roll(1, 0), 1e-6)),
    "lerp with a neighbour, 1e-9, inputs": before(
        lambda net, x: (
            x.double().lerp(x.double().roll(1, 0), 1e-9).to(x.dtype)
            if x.dtype != torch.float64
            else x.lerp(x.roll(1, 0), 1e-9)
        )
    ),
    "closed gate": inside(lambda net, h: h + net.gate * h.mean(0)),
    "closed layer": inside(lambda net, h: h + net.zero(h.mean(0).expand_as(h))),
    "tiny gate": inside(lambda net, h: h + net.tiny * h.mean(0)),
    "mean, detached": inside(lambda net, h: h - h.detach().mean(0)),
    "largest, detached": inside(lambda net, h: h / (h.detach().abs().amax() + 1)),
    "median, detached": inside(lambda net, h: h - h.detach().median()),
    "first example's weights": inside(first_weights),
    "written from another row": inside(written),
    "mixup": before(lambda net, x: 0.7 * x + 0.3 * x[torch.randperm(len(x))]),
    "cutmix": before(lambda net, x: torch.cat([x[:, :3], x[torch.randperm(len(x)), 3:]], 1)),
    "mixed embedding": inside(lambda net, h: h + net.table.weight[: len(h)].mean(0) * h.sum()),
    "auxiliary loss": after(lambda net, out, loss: loss + 0.1 * out.mean(0).square().sum()),
    "load balance": after(lambda net, out, loss: loss + out.softmax(1).mean(0).square().sum()),
    "mean of all": after(lambda net, out, loss: loss.mean().expand(len(loss))),
    "minus the mean": after(lambda net, out, loss: loss - loss.mean()),
    "over the number of rows": after(lambda net, out, loss: loss / len(loss)),
    "over the mean, detached": after(scaled_by_loss),
    "hard examples": after(hard_examples),
    "top losses": after(lambda net, out, loss: loss * (loss >= loss.topk(1).values[-1])),
    "contrastive": after(contrastive),
    "variance of outputs": after(lambda net, out, loss: loss + out.var(0).sum()),
    "advantage": after(lambda net, out, loss: loss * (out.detach().sum(1) - out.detach().sum(1).mean())),
    "pairs": after(lambda net, out, loss: F.relu(loss - loss.roll(1, 0) + 1)),
    "shuffled": after(lambda net, out, loss: loss[torch.randperm(len(loss))]),
    "reversed": after(lambda net, out, loss: loss.flip(0)),
}


def inputs(rows: int = 8) -> tuple[Any, ...]:
    return torch.randn(rows, D), torch.randint(3, (rows,))
