"""The heads of the experiments: clipped sums against the shipped model, one example at a time and by the library."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))
from heads import Features, Head, HeadProgram, clipped_sums, train_heads
from side_by_side import poisson_lots
from support.finished import clipped_sum

from hush.clipping import FlatClip
from hush.recipes.networks import scattering_head

CHANNELS, SIDE, CLASSES, CLIPS = 3, 4, 4, (0.3, 7.0, 100.0)


def random_heads() -> tuple[Tensor, Tensor, Tensor]:
    """Feature rows that end with 1, labels, and the weights of three heads."""
    g = torch.Generator().manual_seed(6)
    x = torch.randn(8, CHANNELS * SIDE**2, generator=g, dtype=torch.float64)
    weights = torch.randn(x.shape[1] + 1, 3, CLASSES, generator=g, dtype=torch.float64) / 5
    return F.pad(x, (0, 1), value=1.0), torch.randint(CLASSES, (8,), generator=g), weights


def as_module(weight: Tensor) -> nn.Module:
    """The shipped model with this matrix in it, without the norm of the features, which is computed once."""
    model = scattering_head(channels=CHANNELS, side=SIDE, classes=CLASSES, groups=1).double()
    layer = model[-1]
    assert isinstance(layer, nn.Linear)
    with torch.no_grad():
        layer.weight.copy_(weight[:-1].T), layer.bias.copy_(weight[-1])
    return model[1:]


def test_clipped_sums_equal_a_loop_over_the_shipped_model() -> None:
    x, y, weights = random_heads()
    present = torch.tensor([1, 1, 0, 1, 1, 1, 0, 1.0], dtype=torch.float64)
    ours = clipped_sums(x, y, weights, torch.tensor(CLIPS, dtype=torch.float64), present)
    shares = []
    for k, clip in enumerate(CLIPS):
        model, clipped = as_module(weights[:, k]), 0
        total = torch.zeros_like(weights[:, k])
        for i in present.nonzero().flatten():
            loss = F.cross_entropy(model(x[i, None, :-1].unflatten(1, (CHANNELS, SIDE, SIDE))), y[i, None])
            weight, bias = torch.autograd.grad(loss, list(model.parameters()))
            gradient = torch.cat([weight.T, bias[None]])
            clipped += int(gradient.norm() > clip)
            total += gradient * min(1.0, clip / gradient.norm().item())
        shares.append(clipped / 6)
        torch.testing.assert_close(ours[:, k], total, rtol=1e-9, atol=1e-12)
    assert shares[0] == 1 and 0 < shares[1] < 1 and shares[2] == 0  # all, some and none clipped


def test_clipped_sums_are_those_of_the_library() -> None:
    x, y, weights = random_heads()
    ours = clipped_sums(x, y, weights, torch.tensor(CLIPS, dtype=torch.float64), torch.ones(8, dtype=torch.float64))
    for k, clip in enumerate(CLIPS):
        model = as_module(weights[:, k])
        losses = F.cross_entropy(model(x[:, :-1].unflatten(1, (CHANNELS, SIDE, SIDE))), y, reduction="none")
        found = clipped_sum(losses, dict(model.named_parameters()), FlatClip(clip)).tensors
        weight, bias = found.values()
        torch.testing.assert_close(ours[:, k], torch.cat([weight.T, bias[None]]), rtol=1e-5, atol=1e-7)


def small_features() -> Features:
    g = torch.Generator().manual_seed(1)
    centres = torch.randn(3, 20, generator=g)
    y = torch.randint(3, (300,), generator=g)
    x = F.pad(centres[y] + 0.3 * torch.randn(300, 20, generator=g), (0, 1), value=1.0)
    return Features(x, y, x[:90], y[:90])


def test_a_step_is_algorithm_1() -> None:
    """Replaying the program's draws: lot, clipped sum, noise, division by L, momentum, falling rate, averaging."""
    features = small_features()
    heads = [
        Head(steps=4, noise=1.5, clip=0.5, lot_size=50, rate=0.4, decay_to=0.2, averaging=0.5),
        Head(steps=2, noise=0.7, clip=2.0, lot_size=50, rate=0.3, momentum=0.0),
    ]
    program, g = HeadProgram(heads, features, seed=9), torch.Generator().manual_seed(9)
    weights, velocity = torch.zeros(21, 2, 3).double(), torch.zeros(21, 2, 3).double()
    mean = weights.clone()
    for t in range(4):
        (indices,), (real,), _ = poisson_lots(program.lot_rate, 300, program.width, g)
        x, y = features.train_x[indices[real]].double(), features.train_y[indices[real]]
        sums = clipped_sums(x, y, weights, torch.tensor([0.5, 2.0]).double(), torch.ones(len(y)).double())
        noise = torch.randn(sums.shape, generator=g).double()
        for k, head in enumerate(heads):
            if t >= head.steps:
                continue
            release = (sums[:, k] + head.noise * head.clip * noise[:, k]) / 50
            velocity[:, k] = head.momentum * velocity[:, k] + release
            weights[:, k] -= head.rate * (1 - (1 - head.decay_to) * t / head.steps) * velocity[:, k]
            keep = min(head.averaging, (2 + t) / (11 + t))
            mean[:, k] = keep * mean[:, k] + (1 - keep) * weights[:, k]
        program.step()
    torch.testing.assert_close(program.weights.double(), weights, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(program.mean.double(), mean, rtol=1e-4, atol=1e-6)


def test_learns_and_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    head = Head(steps=40, noise=0.5, clip=0.5, lot_size=100, rate=1.0, averaging=0.9)
    first = train_heads([head], small_features(), seed=5)
    assert first[0] > 0.9 and first == train_heads([head], small_features(), seed=5)
    with pytest.raises(ValueError, match="share their lot size"):
        HeadProgram([head, Head(steps=1, noise=1.0, clip=1.0, lot_size=50, rate=1.0)], small_features(), seed=1)
    monkeypatch.setattr("heads.padded_size", lambda lot: lot)
    with pytest.raises(RuntimeError, match="did not fit"):
        train_heads([head], small_features(), seed=5)
