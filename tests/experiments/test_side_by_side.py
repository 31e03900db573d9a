"""The batched program of the experiments against one example, one run, one step at a time."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))
from side_by_side import FLAT, PER_LAYER, Data, Program, Run, clipped_sums, padded_size, poisson_lots
from support.finished import clipped_sum
from training import Job, train_all, train_together

from hush.clipping import FlatClip, PerLayerClip
from hush.recipes.networks import paper_mnist


def loop_sums(x: Tensor, y: Tensor, weights: list[Tensor], clip: float, clipping: str) -> list[Tensor]:
    """One example at a time, gradients by autograd, clipped one by one, added up: Algorithm 1 as it is printed."""
    totals = [torch.zeros_like(w) for w in weights]
    for image, label in zip(x, y, strict=True):
        leaves = [w.clone().requires_grad_() for w in weights]
        hidden = image if len(leaves) == 1 else (image @ leaves[0]).relu()
        loss = F.cross_entropy((hidden @ leaves[-1])[None], label[None])
        gradients = torch.autograd.grad(loss, leaves)
        joint = torch.sqrt(sum(g.square().sum() for g in gradients))
        for total, gradient in zip(totals, gradients, strict=True):
            norm = joint if clipping == FLAT else gradient.norm()
            total += gradient / max(1.0, (norm / clip).item())
    return totals


@pytest.mark.parametrize("hidden", [0, 7])
@pytest.mark.parametrize("clipping", [FLAT, PER_LAYER])
def test_clipped_sums_equal_a_loop(hidden: int, clipping: str) -> None:
    g = torch.Generator().manual_seed(1)
    runs, lot, inputs, classes = 3, 11, 5, 4
    x = torch.randn(runs, lot, inputs, generator=g, dtype=torch.float64)
    y = torch.randint(classes, (runs, lot), generator=g)
    shapes = [(inputs, hidden), (hidden, classes)] if hidden else [(inputs, classes)]
    weights = tuple(torch.randn(runs, *s, generator=g, dtype=torch.float64) for s in shapes)
    clip = torch.tensor([0.3, 1.0, 100.0], dtype=torch.float64)  # most clipped, some, none
    present = (torch.rand(runs, lot, generator=g) < 0.7).double()
    flat = torch.full((runs,), clipping == FLAT)
    batched = clipped_sums(x, y, weights, clip, flat, present)
    for k in range(runs):
        real = present[k].bool()
        slow = loop_sums(x[k][real], y[k][real], [w[k] for w in weights], clip[k].item(), clipping)
        for ours, theirs in zip(batched, slow, strict=True):
            torch.testing.assert_close(ours[k], theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("clipping", [FLAT, PER_LAYER])
def test_clipped_sums_are_those_of_the_library(clipping: str) -> None:
    """The paper's network as it is shipped, its gradients clipped by the library that protects real data."""
    g = torch.Generator().manual_seed(8)
    x, y = 3 * torch.randn(40, 60, generator=g), torch.randint(10, (40,), generator=g)
    model = paper_mnist(hidden=50, generator=g)
    weights = tuple(p.detach().T[None] for p in model.parameters())
    present = torch.ones(1, 40)
    flat = torch.tensor([clipping == FLAT])
    ours = clipped_sums(x[None], y[None], weights, torch.tensor([4.0]), flat, present)
    rule = FlatClip(4.0) if clipping == FLAT else PerLayerClip(4.0)
    losses = F.cross_entropy(model(x), y, reduction="none")
    library = clipped_sum(losses, dict(model.named_parameters()), rule).tensors.values()
    for total, theirs in zip(ours, library, strict=True):
        torch.testing.assert_close(total[0].T, theirs, rtol=1e-4, atol=1e-4)


def small_data(examples: int = 400, tables: int = 2) -> Data:
    g = torch.Generator().manual_seed(4)
    centres = 2.0 * torch.randn(10, 6, generator=g)
    y = torch.randint(10, (examples,), generator=g)
    x = centres[y] + 0.3 * torch.randn(examples, 6, generator=g)
    turned = torch.stack([x, x.flip(1)][:tables])
    return Data(turned, y, turned[:, :100].clone(), y[:100])


def test_a_step_is_algorithm_1() -> None:
    """Replaying the program's draws: lot, clipped sum, noise, division by L (not the realised size), momentum."""
    data = small_data()
    common = {"steps": 5, "lot_size": 40, "inputs": 6, "hidden": 8, "rate": 0.4, "rate_end": 0.2, "rate_steps": 4}
    runs = [
        Run(noise=1.5, clip=0.5, clipping=FLAT, momentum=0.9, averaging=0.5, **common),
        Run(noise=2.0, clip=0.7, clipping=PER_LAYER, table=1, **common),
    ]
    program = Program(runs, data, seed=9)
    weights = [[w[k].double().clone() for w in program.initial] for k in range(2)]
    velocity = [[torch.zeros_like(w) for w in ws] for ws in weights]
    mean = [[w.clone() for w in ws] for ws in weights]
    g = torch.Generator().manual_seed(9)
    for t in range(3):
        indices, real, _ = poisson_lots(program.rates, 400, program.width, g)
        noise = [torch.randn(w.shape, generator=g) for w in program.initial]
        for k, run in enumerate(runs):
            chosen = indices[k][real[k]]
            sums = loop_sums(
                data.train_x[run.table].double()[chosen], data.train_y[chosen], weights[k], run.clip, run.clipping
            )
            rate = 0.4 - 0.2 * t / 4
            for i, total in enumerate(sums):
                release = (total + run.noise * run.clip * noise[i][k].double()) / 40
                velocity[k][i] = run.momentum * velocity[k][i] + release
                weights[k][i] = weights[k][i] - rate * velocity[k][i]
                keep = min(run.averaging, (2 + t) / (11 + t))
                mean[k][i] = keep * mean[k][i] + (1 - keep) * weights[k][i] if run.averaging else weights[k][i]
        program.step()
    for k in range(2):
        for i in range(2):
            torch.testing.assert_close(program.weights[i][k].double(), weights[k][i], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(program.mean[i][k].double(), mean[k][i], rtol=1e-4, atol=1e-5)


def test_lots_are_poisson_lots() -> None:
    """Every record with the same rate, independently: lot sizes are binomial, pairs of neighbours meet at rate q^2."""
    g = torch.Generator().manual_seed(0)
    examples, rate, draws = 200, 0.1, 20_000
    rates = torch.full((draws,), rate, dtype=torch.float64)
    indices, real, overfull = poisson_lots(rates, examples, 70, g)
    assert not overfull.any()
    chosen = torch.zeros(draws, examples + 1)
    chosen.scatter_(1, torch.where(real, indices, examples), 1.0)
    chosen = chosen[:, :examples]
    assert torch.equal(chosen.sum(1), real.sum(1).float())  # no record twice in a lot
    counts = chosen.sum(0).numpy()
    assert stats.chisquare(counts, np.full(examples, counts.mean())).pvalue > 1e-4
    assert abs(counts.mean() / draws - rate) < 5 * np.sqrt(rate * 0.9 / draws / examples)
    sizes = real.sum(1).numpy()
    assert abs(sizes.var() / (examples * rate * 0.9) - 1) < 5 * np.sqrt(2 / draws)
    together = (chosen[:, 1:] * chosen[:, :-1]).mean().item()
    assert abs(together - rate**2) < 5 * np.sqrt(rate**2 / draws / examples)


def test_a_lot_that_does_not_fit_stops_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    import side_by_side

    monkeypatch.setattr(side_by_side, "padded_size", lambda lot: lot)
    with pytest.raises(RuntimeError, match="did not fit"):
        run = Run(steps=20, noise=1.0, clip=1.0, lot_size=40, inputs=6, hidden=0)
        train_together([Job(runs=[run], data=small_data(), seed=1)])


def test_a_run_that_ended_keeps_its_last_model() -> None:
    short = Run(steps=10, noise=0.5, clip=1.0, lot_size=40, inputs=6, hidden=8)
    long = Run(steps=25, noise=0.5, clip=1.0, lot_size=40, inputs=6, hidden=8)
    program = Program([short, long], small_data(), seed=2)
    for _ in range(10):
        program.step()
    kept = [w.clone() for w in program.mean]
    for _ in range(15):
        program.step()
    assert all(torch.equal(now[0], before[0]) for now, before in zip(program.mean, kept, strict=True))
    assert not torch.equal(program.mean[0][1], kept[0][1])


def test_learns_and_repeats() -> None:
    runs = [Run(steps=60, noise=0.0, clip=1e6, lot_size=100, inputs=6, hidden=h, rate=0.5, rate_end=0.5) for h in (32,)]
    job = Job(runs=runs, data=small_data(), seed=3, marks=[30], train_accuracy=True)
    (first,) = train_together([job])
    other = Job(runs=[Run(steps=45, noise=1.0, clip=1.0, lot_size=40, inputs=6, hidden=8)], data=small_data(), seed=4)
    beside, again = train_together([other, job])
    assert first == again and sorted(beside) == [45] and sorted(first) == [30, 60]
    assert first[60]["test"][0] > 0.9 and first[60]["train (private)"][0] > 0.9


def test_padding_is_seven_deviations() -> None:
    for lot in (60, 600, 8192):
        width = padded_size(lot)
        assert stats.poisson.sf(width - 1, lot) < 1e-10


def test_all_runs_are_trained_whatever_their_shape_and_length() -> None:
    """Every answer belongs to its own run: as if each group had been trained by itself."""
    common = {"noise": 0.5, "clip": 1.0, "inputs": 6, "hidden": 8}
    runs = [Run(steps=s, lot_size=lot, **common) for s, lot in ((60, 50), (5, 50), (30, 40), (55, 50), (6, 50))]
    found = train_all(runs, small_data(), seed=3, most=2)
    for group in ([1, 4], [3, 0], [2]):
        (alone,) = train_together([Job(runs=[runs[i] for i in group], data=small_data(), seed=3 + group[0])])
        assert [found[i] for i in group] == alone[max(alone)]["test"]
