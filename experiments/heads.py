"""A small head on scattering features, trained with DP-SGD: linear, or two convolutions and a linear layer.

A record may be seen in several views (shifted, mirrored); its gradient is the mean over its views and is clipped as
one, so views cost no privacy (De et al. 2022). Every layer is an affine map applied at T places (pixels times views),
and the squared norm of its per-example gradient is the sum over pairs of places of (a_s . a_t)(g_s . g_t).
"""

import math
from dataclasses import dataclass

import torch
from side_by_side import captured, padded_size, poisson_lots
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class Head:
    """One training of a head; clipping is flat, `noise` is the noise multiplier."""

    steps: int
    noise: float
    clip: float
    lot_size: int
    rate: float
    decay_to: float = 1.0  # the rate falls linearly to this share at the last step
    momentum: float = 0.9
    averaging: float = 0.0
    widths: tuple[int, ...] = ()  # () is linear; (32, 32) two 3x3 convolutions with tanh, pooling between
    views: int = 1


@dataclass(frozen=True)
class Features:
    """Features [V, N, C, S, S] of all views of the training images, [n, C, S, S] of the test images; labels."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


def layer_shapes(channels: int, side: int, classes: int, widths: tuple[int, ...]) -> list[tuple[int, int]]:
    """Rows (inputs and one for the bias) and columns of every layer's matrix."""
    if not widths:
        return [(channels * side * side + 1, classes)]
    first, second = widths
    pooled = side // 2
    return [(channels * 9 + 1, first), (first * 9 + 1, second), (second * pooled * pooled + 1, classes)]


def forward(x: Tensor, weights: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """x [B, C, S, S] -> inputs [B, T, rows - 1] and outputs [B, T, columns] of every layer, the last of them logits."""
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []

    def affine(a: Tensor, weight: Tensor) -> Tensor:
        inputs.append(a.detach())
        out = a @ weight[:-1] + weight[-1]
        outputs.append(out.requires_grad_() if torch.is_grad_enabled() and not out.requires_grad else out)
        return outputs[-1]

    for weight in weights[:-1]:
        side = x.shape[-1]
        places = affine(F.unfold(x, 3, padding=1).transpose(1, 2), weight)
        x = torch.tanh(places).transpose(1, 2).unflatten(2, (side, side))
        if weight is weights[0]:
            x = F.max_pool2d(x, 2)
    affine(x.flatten(1)[:, None], weights[-1])
    return inputs, outputs


def clipped_sums(x: Tensor, y: Tensor, weights: list[Tensor], clip: float, present: Tensor) -> list[Tensor]:
    """Sums over examples of their clipped gradients; x [B, views, C, S, S], y [B], present [B]."""
    examples, views = x.shape[:2]
    with torch.enable_grad():
        inputs, outputs = forward(x.flatten(0, 1), weights)
        labels = y[:, None].expand(-1, views).flatten()
        losses = F.cross_entropy(outputs[-1][:, 0], labels, reduction="sum") / views
        gradients = torch.autograd.grad(losses, outputs)
    layers = [
        Layer(a.unflatten(0, (examples, views)).flatten(1, 2), g.unflatten(0, (examples, views)).flatten(1, 2))
        for a, g in zip(inputs, gradients, strict=True)
    ]
    squares = torch.stack([layer.squares for layer in layers]).sum(0)
    factor = (clip / squares.sqrt()).clamp(max=1.0) * present
    return [layer.weighted(factor) for layer in layers]


class Layer:
    """Per-example gradients of an affine map from its inputs [B, T, d] and output gradients [B, T, c].

    The norm comes from products over pairs of places, or from the gradients themselves where that is less work; those
    are then kept for the sum.
    """

    def __init__(self, a: Tensor, g: Tensor) -> None:
        self.a, self.g = a, g
        places, columns = g.shape[1:]
        self.bias = g.sum(1)
        self.each = torch.bmm(a.mT, g) if columns < places else None
        if self.each is not None:
            self.squares = self.each.square().sum((1, 2)) + self.bias.square().sum(1)
        else:
            pairs = (torch.bmm(a, a.mT) + 1) * torch.bmm(g, g.mT)
            self.squares = pairs.sum((1, 2)).clamp(min=0)

    def weighted(self, factor: Tensor) -> Tensor:
        """The sum over examples, each times its factor: the matrix, then the row of the biases."""
        if self.each is not None:
            matrix = (factor @ self.each.flatten(1)).unflatten(0, self.each.shape[1:])
        else:
            matrix = self.a.flatten(0, 1).T @ (self.g * factor[:, None, None]).flatten(0, 1)
        return torch.cat([matrix, (factor @ self.bias)[None]])


class HeadProgram:
    """One head, ready to step."""

    def __init__(self, head: Head, features: Features, *, seed: int) -> None:
        self.head, self.features = head, features
        device = features.train_x.device
        channels, side = features.train_x.shape[2:4]
        classes = int(features.train_y.max().item()) + 1
        starts = torch.Generator().manual_seed(seed)
        self.initial = []
        for rows, columns in layer_shapes(channels, side, classes, head.widths):
            weight = torch.zeros(rows, columns)
            if columns != classes:  # the last layer starts at zero
                weight[:-1].normal_(0.0, 1 / math.sqrt(rows - 1), generator=starts)
            self.initial.append(weight.to(device))
        self.weights = [w.clone() for w in self.initial]
        self.velocity = [torch.zeros_like(w) for w in self.initial]
        self.mean = [w.clone() for w in self.initial]
        self.generator, self.seed = torch.Generator(device).manual_seed(seed), seed
        share = torch.linspace(1.0, head.decay_to, head.steps + 4)
        self.schedule = (head.rate * share).to(device)
        self.clock = torch.zeros(1, dtype=torch.long, device=device)
        self.width = padded_size(head.lot_size)
        examples = len(features.train_y)
        self.lot_rate = torch.tensor([head.lot_size / examples], dtype=torch.float64, device=device)
        self.overfull = torch.zeros(1, dtype=torch.bool, device=device)

    def step(self) -> None:
        """One step of Algorithm 1; no value returns to the host."""
        head, features = self.head, self.features
        indices, real, overfull = poisson_lots(self.lot_rate, len(features.train_y), self.width, self.generator)
        self.overfull.logical_or_(overfull)
        shape, device = (self.width, head.views), indices.device
        view = torch.randint(len(features.train_x), shape, generator=self.generator, device=device)
        x, y = features.train_x[view, indices[0][:, None]], features.train_y[indices[0]]
        sums = clipped_sums(x, y, self.weights, head.clip, real[0].to(x.dtype))
        rate = self.schedule.index_select(0, self.clock)
        keep = torch.clamp((2 + self.clock) / (11 + self.clock), max=head.averaging)
        for weight, velocity, mean, total in zip(self.weights, self.velocity, self.mean, sums, strict=True):
            noise = torch.randn(total.shape, generator=self.generator, device=device, dtype=total.dtype)
            velocity.mul_(head.momentum).add_((total + head.noise * head.clip * noise) / head.lot_size)
            weight.sub_(rate * velocity)
            mean.add_((1 - keep) * (weight - mean))
        self.clock += 1

    def reset(self) -> None:
        """Back to the initial weights, the first step, and the seed."""
        for weight, velocity, mean, initial in zip(self.weights, self.velocity, self.mean, self.initial, strict=True):
            weight.copy_(initial), mean.copy_(initial), velocity.zero_()
        self.clock.zero_(), self.overfull.zero_()
        self.generator.manual_seed(self.seed)

    @torch.no_grad()
    def accuracy(self) -> float:
        """Test accuracy of the current averaged model; reads back to the host."""
        right = 0
        for start in range(0, len(self.features.test_y), 5000):
            _, outputs = forward(self.features.test_x[start : start + 5000], self.mean)
            right += int((outputs[-1][:, 0].argmax(1) == self.features.test_y[start : start + 5000]).sum())
        return right / len(self.features.test_y)


def train_head(head: Head, features: Features, *, seed: int) -> float:
    """Test accuracy of the last (averaged) model."""
    if features.train_x.is_cuda:
        torch.cuda.empty_cache()  # the memory of earlier programs' graphs
    program = HeadProgram(head, features, seed=seed)
    advance = captured(program) if features.train_x.is_cuda else program.step
    for _ in range(head.steps):
        advance()
    accuracy = program.accuracy()
    if program.overfull.any():
        raise RuntimeError(f"a lot of expected size {head.lot_size} did not fit into {program.width} places")
    return accuracy
