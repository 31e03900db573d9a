"""Adam without the noise's variance, the parameter average, augmentation copies: against small loops of their own."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from hush.training.augmentation import copies, flip_and_shift
from hush.training.averaging import Average
from hush.training.optimizers import CorrectedAdam, NoiseAware


def corrected_adam_oracle(gradients: np.ndarray, stds: list[float], lr: float, floor: float, decay: float) -> float:
    """The update rule for one number, term by term in float64."""
    w, b1, b2 = 1.0, 0.9, 0.999
    for t in range(1, len(gradients) + 1):
        m = sum((1 - b1) * b1 ** (t - s) * gradients[s - 1] for s in range(1, t + 1)) / (1 - b1**t)
        v = sum((1 - b2) * b2 ** (t - s) * gradients[s - 1] ** 2 for s in range(1, t + 1)) / (1 - b2**t)
        u = sum((1 - b2) * b2 ** (t - s) * stds[s - 1] ** 2 for s in range(1, t + 1)) / (1 - b2**t)
        w -= lr * decay * w
        w -= lr * m / math.sqrt(max(v - u, floor))
    return w


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_corrected_adam_follows_its_formula(decay: float) -> None:
    rng = np.random.default_rng(0)
    gradients, stds = rng.normal(size=12), [0.3 + 0.05 * t for t in range(12)]
    w = nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = CorrectedAdam([w], lr=0.01, floor=1e-3, weight_decay=decay)
    for gradient, std in zip(gradients, stds, strict=True):
        w.grad = torch.tensor([gradient])
        optimizer.expect_noise({w: std})
        optimizer.step()
    assert w.item() == pytest.approx(corrected_adam_oracle(gradients, stds, 0.01, 1e-3, decay), rel=1e-12)


def test_corrected_adam_without_noise_is_adam() -> None:
    torch.manual_seed(0)
    start = torch.randn(5, dtype=torch.float64)
    a, b = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    ours, theirs = CorrectedAdam([a], lr=0.1, floor=0.0), torch.optim.Adam([b], lr=0.1, eps=0.0)
    for _ in range(20):
        a.grad = b.grad = torch.randn(5, dtype=torch.float64)
        ours.expect_noise({a: 0.0})
        ours.step()
        theirs.step()
    assert torch.allclose(a, b, rtol=1e-12)


def test_correction_finds_the_signal_under_the_noise() -> None:
    generator = torch.Generator().manual_seed(1)
    w = nn.Parameter(torch.zeros(2000, dtype=torch.float64))
    optimizer, std = CorrectedAdam([w], lr=0.0, floor=1e-12), 0.5
    for _ in range(3000):
        w.grad = 0.2 + std * torch.randn(2000, dtype=torch.float64, generator=generator)
        optimizer.expect_noise({w: std})
        optimizer.step()
    state = optimizer.state[w]
    second = (state["second"] - state["noise"]) / (1 - 0.999 ** state["step"])
    assert float(second.mean()) == pytest.approx(0.04, rel=0.05)


def test_corrected_adam_asks_for_the_noise_and_refuses_closures() -> None:
    w = nn.Parameter(torch.zeros(1))
    optimizer = CorrectedAdam([w])
    assert isinstance(optimizer, NoiseAware) and not isinstance(torch.optim.SGD([w]), NoiseAware)
    w.grad = torch.ones(1)
    with pytest.raises(RuntimeError, match="does not know the noise"):
        optimizer.step()
    with pytest.raises(ValueError, match="closure"):
        optimizer.step(lambda: 0.0)  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match="betas"):
        CorrectedAdam([w], betas=(1.0, 0.9))
    with pytest.raises(ValueError, match=">= 0"):
        CorrectedAdam([w], floor=math.nan)


def test_corrected_adam_resumes_from_its_state() -> None:
    torch.manual_seed(0)
    gradients = torch.randn(10, 3)

    def run(break_at: int | None) -> torch.Tensor:
        w = nn.Parameter(torch.zeros(3))
        optimizer = CorrectedAdam([w], lr=0.1)
        for t, gradient in enumerate(gradients):
            if t == break_at:
                state = optimizer.state_dict()
                optimizer = CorrectedAdam([w], lr=0.1)
                optimizer.load_state_dict(state)
            w.grad = gradient.clone()
            optimizer.expect_noise({w: 0.1})
            optimizer.step()
        return w.detach()

    assert torch.equal(run(None), run(4))


# Average ---------------------------------------------------------------------------------------------------------


def test_average_follows_its_formula_and_leaves_the_model_alone() -> None:
    model = nn.Linear(2, 2, dtype=torch.float64)
    average, expected = Average(model, decay=0.9), model.weight.detach().clone()
    for t in range(1, 30):
        with torch.no_grad():
            model.weight.add_(torch.full((2, 2), float(t)))
        average.update()
        decay = min(0.9, (1 + t) / (10 + t))
        expected = decay * expected + (1 - decay) * model.weight.detach()
    own, tensor = model.weight.detach().clone(), model.weight
    with pytest.raises(KeyError), average.applied():
        assert torch.allclose(model.weight, expected, rtol=1e-12)
        raise KeyError
    assert torch.equal(model.weight, own) and model.weight is tensor


def test_average_is_saved_and_restored() -> None:
    model = nn.Linear(2, 2)
    average = Average(model, decay=0.9)
    with torch.no_grad():
        model.weight.add_(1.0)
    average.update()
    other = Average(nn.Linear(2, 2), decay=0.9)
    other.load_state_dict(average.state_dict())
    assert torch.equal(other.state_dict()["average"]["weight"], average.state_dict()["average"]["weight"])
    with pytest.raises(ValueError, match="lacks"):
        Average(nn.Linear(2, 2, bias=False)).load_state_dict(average.state_dict())
    with pytest.raises(ValueError, match="decay"):
        Average(model, decay=1.0)


# Augmentation ----------------------------------------------------------------------------------------------------


def test_flip_and_shift_moves_each_image_by_itself() -> None:
    images = torch.arange(2 * 3 * 6 * 5, dtype=torch.float32).view(2, 3, 6, 5)
    many = copies(images, 200)
    assert torch.equal(many[199], images[0]) and torch.equal(many[200], images[1])
    moved = flip_and_shift(many, shift=2, generator=torch.Generator().manual_seed(0))
    assert moved.shape == many.shape
    allowed = []
    for image in images:
        framed = nn.functional.pad(image[None], (2, 2, 2, 2), mode="reflect")[0]
        crops = [framed[:, i : i + 6, j : j + 5] for i in range(5) for j in range(5)]
        allowed.append([crop for one in crops for crop in (one, one.flip(2))])
    seen = [set(), set()]
    for number, image in enumerate(moved):
        owner = number // 200
        found = [k for k, crop in enumerate(allowed[owner]) if torch.equal(crop, image)]
        assert found, "every image is a crop of its own original"
        seen[owner].update(found)
    assert all(len(kinds) > 40 for kinds in seen), "shifts and flips all occur"
    assert torch.equal(flip_and_shift(images, shift=0).sum((1, 2, 3)), images.sum((1, 2, 3)))
