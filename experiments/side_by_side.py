"""Many small networks trained with DP-SGD side by side, as one program with a leading dimension for the runs.

Every run is Algorithm 1 of the paper on its own: its own Poisson lots, its own clipping and noise, its own weights.
For a network x -> relu(x W1) W2, or a linear one x -> x W, the per-example gradient norms have a closed form
(|x| |g1| and |a| |g2|), so a step is a handful of batched products, and nothing is read back to the host. Runs are
seeded: they measure accuracy, they protect nobody. training.py drives these programs.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

FLAT, PER_LAYER = "flat", "per layer"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training: everything that may differ between the runs of a program, plus its shape.

    `noise` is the standard deviation in units of the clipping bound: of `clip` for flat clipping; of each layer's own
    `clip` for per-layer clipping (the paper's sigma; jointly that is a noise multiplier of noise / sqrt(2)).
    """

    steps: int
    noise: float
    clip: float
    clipping: str = PER_LAYER
    lot_size: int = 600
    hidden: int = 1000  # 0: no hidden layer, a linear model
    inputs: int = 60
    table: int = 0  # which of the input tables (projections of the images) this run reads
    rate: float = 0.1
    rate_end: float = 0.052
    rate_steps: int = 1000  # linear from rate to rate_end over so many steps, then constant
    decay_to: float = 1.0  # the constant part falls linearly to this share of rate_end at the last step
    momentum: float = 0.0
    averaging: float = 0.0  # decay of the running mean of the weights; 0: the last weights themselves
    gain: tuple[float, float] = (1.0, 1.0)  # standard deviation of the initial weights, times sqrt(fan in)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Runs of one program share this."""
        return self.inputs, self.hidden, self.lot_size

    def learning_rates(self) -> Tensor:
        """The rate of every step."""
        step = torch.arange(self.steps, dtype=torch.float64)
        warm = self.rate + (self.rate_end - self.rate) * step / max(1, self.rate_steps)
        left = (self.steps - step) / max(1, self.steps - self.rate_steps)
        return torch.where(step < self.rate_steps, warm, self.rate_end * (self.decay_to + (1 - self.decay_to) * left))


@dataclass(frozen=True)
class Data:
    """Input tables [U, N, d] (one for each projection) and labels, on one device."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


def clipped_sums(
    x: Tensor, y: Tensor, weights: tuple[Tensor, ...], clip: Tensor, flat: Tensor, present: Tensor
) -> tuple[Tensor, ...]:
    """Sums of clipped per-example gradients of the cross-entropy, for all runs at once, one for each weight.

    x [K, B, d], y [K, B], weights [K, d, h] and [K, h, c] (or one [K, d, c]), clip [K], flat [K] (bool),
    present [K, B] (0 for padding).
    """
    last = weights[-1]
    hidden = torch.bmm(x, weights[0]).relu_() if len(weights) == 2 else x
    out = torch.softmax(torch.bmm(hidden, last), dim=2)
    labels = torch.arange(last.shape[2], device=y.device)
    out = (out - (y[:, :, None] == labels).to(out.dtype)) * present[:, :, None]
    norm_out = torch.linalg.vector_norm(hidden, dim=2) * torch.linalg.vector_norm(out, dim=2)
    bound = clip[:, None]
    if len(weights) == 1:
        factor = (bound / norm_out).clamp(max=1.0)
        return (torch.bmm(x.transpose(1, 2), out * factor[:, :, None]),)
    inner = torch.bmm(out, last.transpose(1, 2)).masked_fill_(hidden == 0, 0.0)
    norm_in = torch.linalg.vector_norm(x, dim=2) * torch.linalg.vector_norm(inner, dim=2)
    joint = torch.hypot(norm_in, norm_out)
    factor_in = (bound / torch.where(flat[:, None], joint, norm_in)).clamp(max=1.0)
    factor_out = (bound / torch.where(flat[:, None], joint, norm_out)).clamp(max=1.0)
    sum_in = torch.bmm((x * factor_in[:, :, None]).transpose(1, 2), inner)
    sum_out = torch.bmm(hidden.transpose(1, 2), out * factor_out[:, :, None])
    return sum_in, sum_out


def median_norms(program: "Program") -> Tensor:
    """Median over 2,000 training records of the norm of a layer's gradient (mean of the layers); a private number."""
    x, y = program.data.train_x[program.table, :2000], program.data.train_y[:2000]
    first, last = program.weights
    before = torch.bmm(x, first)
    hidden = before.relu()
    labels = torch.arange(last.shape[2], device=y.device)
    out = torch.softmax(torch.bmm(hidden, last), dim=2) - (y[:, None] == labels).to(x.dtype)
    inner = torch.bmm(out, last.transpose(1, 2)) * (before > 0)
    norms = [x.norm(dim=2) * inner.norm(dim=2), hidden.norm(dim=2) * out.norm(dim=2)]
    return torch.stack([norm.median(dim=1).values for norm in norms]).mean(0)


def poisson_lots(rates: Tensor, examples: int, width: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """A lot for each run: indices [K, width], which of them are real, and whether the width was too small.

    Sampling every record independently at rate q is drawing the gaps between sampled records from the geometric
    distribution; a lot is whole as soon as a gap leads past the last record.
    """
    shape = (len(rates), width)
    u = torch.rand(shape, generator=generator, device=rates.device, dtype=torch.float64)
    gaps = (torch.log1p(-u) / torch.log1p(-rates)[:, None]).floor() + 1
    places = gaps.cumsum(dim=1) - 1
    real = places < examples
    return torch.where(real, places, 0).long(), real, real[:, -1]


def padded_size(lot_size: int) -> int:
    """Room for a lot: seven standard deviations above its expected size (a larger one stops the program)."""
    return lot_size + math.ceil(7 * math.sqrt(lot_size)) + 8


class Program:
    """K runs of one shape, ready to step."""

    def __init__(self, runs: list[Run], data: Data, *, seed: int, truncated: bool = False) -> None:
        if len({run.shape for run in runs}) != 1:
            raise ValueError("runs of one program share inputs, hidden and lot_size")
        self.runs, self.data = runs, data
        device = data.train_x.device
        self.generator = torch.Generator(device).manual_seed(seed)
        self.seed = seed
        inputs, hidden, lot = runs[0].shape
        classes = int(data.train_y.max().item()) + 1
        shapes = ((inputs, hidden), (hidden, classes)) if hidden else ((inputs, classes),)
        starts = torch.Generator().manual_seed(seed)
        self.initial = tuple(
            torch.stack([_normal(rows, columns, run.gain[layer], starts, truncated) for run in runs]).to(device)
            for layer, (rows, columns) in enumerate(shapes)
        )
        self.weights = tuple(w.clone() for w in self.initial)
        self.velocity = tuple(torch.zeros_like(w) for w in self.initial)
        self.mean = tuple(w.clone() for w in self.initial)

        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)

        self.clip = column([run.clip for run in runs])
        self.flat = torch.tensor([run.clipping == FLAT for run in runs], device=device)
        self.noise = column([run.noise * run.clip for run in runs])[:, None, None]
        self.momentum = column([run.momentum for run in runs])[:, None, None]
        self.averaging = column([run.averaging for run in runs])[:, None, None]
        self.lot, self.width = lot, padded_size(lot)
        examples = len(data.train_y)
        self.rates = torch.full((len(runs),), lot / examples, dtype=torch.float64, device=device)
        self.table = torch.tensor([run.table for run in runs], device=device)
        steps = max(run.steps for run in runs)
        schedule = torch.zeros(steps + 4, len(runs))  # a rate of 0 freezes a run that has ended
        for k, run in enumerate(runs):
            schedule[: run.steps, k] = run.learning_rates()
        self.schedule = schedule.to(device)
        self.clock = torch.zeros(1, dtype=torch.long, device=device)
        self.overfull = torch.zeros(len(runs), dtype=torch.bool, device=device)

    def step(self) -> None:
        """One step of every run; no value returns to the host."""
        indices, real, overfull = poisson_lots(self.rates, len(self.data.train_y), self.width, self.generator)
        self.overfull.logical_or_(overfull)
        if not indices.is_cuda:  # a graph needs one shape; without one the common padding is left off
            longest = int(real.sum(dim=1).max())
            indices, real = indices[:, :longest], real[:, :longest]
        x, y = self.data.train_x[self.table[:, None], indices], self.data.train_y[indices]
        sums = clipped_sums(x, y, self.weights, self.clip, self.flat, real.to(x.dtype))
        rate = self.schedule.index_select(0, self.clock)[0][:, None, None]
        alive = (rate > 0).to(rate.dtype)
        fresh = 1 - torch.minimum(self.averaging, (2 + self.clock) / (11 + self.clock))
        fresh = torch.where(self.averaging > 0, fresh, 1.0) * alive
        for weight, velocity, mean, total in zip(self.weights, self.velocity, self.mean, sums, strict=True):
            noise = torch.randn(total.shape, generator=self.generator, device=total.device, dtype=total.dtype)
            velocity.mul_(self.momentum).add_((total + self.noise * noise) / self.lot)
            weight.sub_(rate * velocity)
            mean.add_(fresh * (weight - mean))
        self.clock += 1

    def reset(self) -> None:
        """Back to the initial weights, the first step, and the seed."""
        for weight, velocity, mean, initial in zip(self.weights, self.velocity, self.mean, self.initial, strict=True):
            weight.copy_(initial), mean.copy_(initial), velocity.zero_()
        self.clock.zero_(), self.overfull.zero_()
        self.generator.manual_seed(self.seed)

    def accuracy(self, x: Tensor, y: Tensor) -> Tensor:
        """Share of right answers of every run's current (averaged) model."""
        first, last = self.mean[0], self.mean[-1]
        rows = max(1, 2**26 // (len(self.runs) * max(first.shape[1:])))
        right = torch.zeros(len(self.runs), device=x.device)
        for start in range(0, len(y), rows):
            hidden = x[self.table, start : start + rows] if len(x) > 1 else x[:, start : start + rows]
            if len(self.mean) == 2:
                hidden = torch.matmul(hidden, first).relu_()
            right += (torch.matmul(hidden, last).argmax(2) == y[start : start + rows]).sum(1)
        return right / len(y)


def _normal(rows: int, columns: int, gain: float, generator: torch.Generator, truncated: bool) -> Tensor:
    weight = torch.empty(rows, columns)
    deviation = gain / math.sqrt(rows)
    if truncated:  # as the published code does: redrawn beyond two standard deviations
        return torch.nn.init.trunc_normal_(
            weight, std=deviation, a=-2 * deviation, b=2 * deviation, generator=generator
        )
    return weight.normal_(0.0, deviation, generator=generator)
