"""Linear heads on fixed features, trained with DP-SGD side by side: all heads of a program read the same Poisson lots.

Each head taken by itself is Algorithm 1 with its own clipping, noise and weights, started at zero. Sharing the lots
makes a step one product with the lot's features for all heads together, and compares settings on the same draws. For
a linear layer the norm of an example's gradient is |x| |g|, so nothing per example is ever formed.
"""

import time
from dataclasses import dataclass

import torch
from side_by_side import padded_size, poisson_lots
from torch import Tensor
from training import captured, plainly


@dataclass(frozen=True, kw_only=True)
class Head:
    """One training of a linear head; clipping is flat, `noise` is the noise multiplier."""

    steps: int
    noise: float
    clip: float
    lot_size: int
    rate: float
    decay_to: float = 1.0  # the rate falls linearly to this share at the last step
    momentum: float = 0.9
    averaging: float = 0.0


@dataclass(frozen=True)
class Features:
    """Rows of features of the training and the test images, the last of them 1 (for the bias); labels."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


def clipped_sums(x: Tensor, y: Tensor, weights: Tensor, clip: Tensor, present: Tensor) -> Tensor:
    """Every head's sum of clipped gradients; x [B, d], y [B], weights [d, K, c], clip [K], present [B]."""
    classes = torch.arange(weights.shape[2], device=y.device)
    out = torch.softmax((x @ weights.flatten(1)).unflatten(1, weights.shape[1:]), dim=2)
    out -= (y[:, None, None] == classes).to(out.dtype)
    norms = torch.linalg.vector_norm(x, dim=1)[:, None] * torch.linalg.vector_norm(out, dim=2)
    out *= ((clip / norms).clamp(max=1.0) * present[:, None])[:, :, None]
    return (x.T @ out.flatten(1)).unflatten(1, weights.shape[1:])


class HeadProgram:
    """K heads with the same lot size, ready to step."""

    def __init__(self, heads: list[Head], features: Features, *, seed: int) -> None:
        if len({head.lot_size for head in heads}) != 1:
            raise ValueError("heads of one program share their lot size")
        self.heads, self.features, self.seed = heads, features, seed
        device = features.train_x.device

        def row(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=features.train_x.dtype, device=device)

        classes = int(features.train_y.max().item()) + 1
        self.weights = torch.zeros(
            features.train_x.shape[1], len(heads), classes, dtype=features.train_x.dtype, device=device
        )
        self.velocity, self.mean = torch.zeros_like(self.weights), torch.zeros_like(self.weights)
        self.clip = row([head.clip for head in heads])
        self.noise = row([head.noise * head.clip for head in heads])[:, None]
        self.momentum = row([head.momentum for head in heads])[:, None]
        self.averaging = row([head.averaging for head in heads])[:, None]
        schedule = torch.zeros(max(head.steps for head in heads) + 4, len(heads))  # a rate of 0 freezes a head
        for k, head in enumerate(heads):
            step = torch.arange(head.steps) / head.steps
            schedule[: head.steps, k] = head.rate * (1 - (1 - head.decay_to) * step)
        self.schedule = schedule.to(device, features.train_x.dtype)
        self.clock = torch.zeros(1, dtype=torch.long, device=device)
        self.lot, self.width = heads[0].lot_size, padded_size(heads[0].lot_size)
        rate = self.lot / len(features.train_y)
        self.lot_rate = torch.tensor([rate], dtype=torch.float64, device=device)
        self.overfull = torch.zeros(1, dtype=torch.bool, device=device)
        self.lot_x = features.train_x.new_empty(self.width, features.train_x.shape[1])
        self.generator = torch.Generator(device).manual_seed(seed)

    def step(self) -> None:
        """One step of every head; no value returns to the host."""
        features = self.features
        indices, real, overfull = poisson_lots(self.lot_rate, len(features.train_y), self.width, self.generator)
        self.overfull.logical_or_(overfull)
        x, y = torch.index_select(features.train_x, 0, indices[0], out=self.lot_x), features.train_y[indices[0]]
        total = clipped_sums(x, y, self.weights, self.clip, real[0].to(x.dtype))
        noise = torch.randn(total.shape, generator=self.generator, device=total.device, dtype=total.dtype)
        self.velocity.mul_(self.momentum).add_(total.addcmul_(self.noise, noise), alpha=1 / self.lot)
        rate = self.schedule.index_select(0, self.clock)[0][:, None]
        self.weights.addcmul_(rate, self.velocity, value=-1)
        fresh = 1 - torch.minimum(self.averaging, (2 + self.clock) / (11 + self.clock))
        fresh = torch.where(self.averaging > 0, fresh, 1.0) * (rate > 0)
        self.mean.add_(fresh * (self.weights - self.mean))
        self.clock += 1

    def reset(self) -> None:
        """Back to zero weights, the first step, and the seed."""
        for state in (self.weights, self.velocity, self.mean, self.clock, self.overfull):
            state.zero_()
        self.generator.manual_seed(self.seed)

    def accuracy(self) -> list[float]:
        """Test accuracy of every head's current (averaged) model; reads back to the host."""
        logits = (self.features.test_x @ self.mean.flatten(1)).unflatten(1, self.mean.shape[1:])
        right = logits.argmax(2) == self.features.test_y[:, None]
        return right.double().mean(0).tolist()


def train_heads(heads: list[Head], features: Features, *, seed: int) -> list[float]:
    """Test accuracy of every head's last (averaged) model; all heads have the same lot size."""
    program = HeadProgram(heads, features, seed=seed)
    advance = captured(program) if features.train_x.is_cuda else plainly(program)
    steps, started = max(head.steps for head in heads), time.time()
    for done in range(0, steps, 100):
        advance(min(100, steps - done))
        print(f"    {len(heads)} heads: from step {done} of {steps}, {time.time() - started:.0f} s", flush=True)
    accuracy = program.accuracy()
    if program.overfull.any():
        raise RuntimeError(f"a lot of expected size {program.lot} did not fit into {program.width} places")
    return accuracy
