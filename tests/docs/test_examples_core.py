"""The shipped examples are run as they are, under an audit: every release is clipped, noised and charged."""

import importlib.util
import math
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import hush.noise.release
import hush.noise.sanitizer
from hush.accounting import epsilon
from hush.accounting.events import Gaussian, PoissonSampled
from hush.clipping.bounded_sum import BoundedSum
from hush.ledger import Ledger, MemoryAccount
from hush.noise.gaussian import add_noise

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Audit:
    """Stands in for add_noise: keeps what was released, with which noise, around which sum."""

    def __init__(self) -> None:
        self.multipliers: list[float] = []
        self.bounds: list[float] = []
        self.residuals: list[Tensor] = []

    def __call__(
        self, total: BoundedSum, *, noise_multiplier: float, scale: float = 1.0, **rest: Any
    ) -> dict[str, Tensor]:
        before = {name: tensor.clone() for name, tensor in total.tensors.items()}
        released = add_noise(total, noise_multiplier=noise_multiplier, scale=scale, **rest)
        self.multipliers.append(noise_multiplier)
        self.bounds.append(total.sensitivity)
        for name, tensor in released.items():
            residual = tensor.double() / scale - before[name].double()
            self.residuals.append(residual.flatten() / (noise_multiplier * total.sensitivity))
        return released

    def check(self) -> None:
        noise = torch.cat(self.residuals)
        tolerance = 6 / math.sqrt(2 * len(noise))
        assert abs(noise.std().item() - 1) < tolerance, "the noise has the scale that was charged"
        assert abs(noise.mean().item()) < 6 / math.sqrt(len(noise))


@pytest.fixture
def audit(monkeypatch: pytest.MonkeyPatch) -> Iterator[Audit]:
    watcher = Audit()
    monkeypatch.setattr(hush.noise.release, "add_noise", watcher)
    monkeypatch.setattr(hush.noise.sanitizer, "add_noise", watcher)
    yield watcher
    watcher.check()


def test_hazard_27_training_loop(audit: Audit, tmp_path: Path) -> None:
    spent = example("training_loop").main(epochs=1, lot_size=200, examples=4000, ledger=str(tmp_path / "mnist.hush"))
    assert len(audit.multipliers) == 20 and len(set(audit.multipliers)) == 1
    assert all(1.0 <= bound <= 1.05 for bound in audit.bounds)
    (page,) = Ledger(tmp_path / "mnist.hush").accounts()
    event = PoissonSampled(0.05, Gaussian(audit.multipliers[0])) * 20
    assert page.closed and page.spent == 20 and page.event(20) == event
    assert spent == epsilon(event, delta=1e-5) and spent.upper <= 2.0


def test_hazard_27_svrg(audit: Audit, monkeypatch: pytest.MonkeyPatch) -> None:
    charged: list[int] = []
    close = MemoryAccount.close
    monkeypatch.setattr(MemoryAccount, "close", lambda self: (charged.append(self.taken), close(self))[1])
    accuracy, spent = example("svrg").main(rounds=2, steps=15, noise=2.0)
    assert audit.multipliers == [20.0, *[2.0] * 15] * 2 and charged == [1, 15] * 2
    event = (PoissonSampled(1.0, Gaussian(20.0)) + PoissonSampled(0.05, Gaussian(2.0)) * 15) * 2
    assert spent == epsilon(event, delta=1e-5)
    assert accuracy > 0.9, "variance-reduced steps on private gradients learn"


def test_hazard_27_by_hand(audit: Audit) -> None:
    accuracy, spent = example("by_hand").main(epsilon=0.8)
    assert 0.75 < spent <= 0.8 and accuracy > 0.8
    event = PoissonSampled(0.05, Gaussian(2.0)) * len(audit.multipliers)
    assert spent == pytest.approx(epsilon(event, delta=1e-5, accountant="moments").upper, rel=1e-9)
    more = epsilon(event + PoissonSampled(0.05, Gaussian(2.0)), delta=1e-5, accountant="moments").upper
    assert more > 0.8, "the loop used what the limit allows"
    source = (EXAMPLES / "by_hand.py").read_text()
    heart = source.split("class DPSGD_Optimizer")[1].split("def main")[0]
    assert len([line for line in heart.splitlines() if line.strip()]) <= 40


def test_by_hand_follows_the_figure_with_real_per_example_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    figure, calls = example("by_hand"), list[str]()
    gradients = figure.per_example_gradients

    def compared(loss: Any, params: dict[str, Tensor], lot: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        calls.append("per_example_gradients")
        found: dict[str, Tensor] = gradients(loss, params, lot)
        for row in range(min(3, len(lot[0]))):
            leaves = {name: param.clone().requires_grad_() for name, param in params.items()}
            loss.of_example(leaves, lot[0][row], lot[1][row]).backward()
            for name, leaf in leaves.items():
                torch.testing.assert_close(found[name][row], leaf.grad)
        return found

    def noted(kind: Any, name: str) -> None:
        method = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda *args: (calls.append(name), method(*args))[1])

    monkeypatch.setattr(figure, "per_example_gradients", compared)
    noted(figure.PrivacyAccountant, "AccumulatePrivacySpending")
    noted(figure.Sanitizer, "Sanitize")
    figure.main(epsilon=0.7)
    order = ["AccumulatePrivacySpending", "per_example_gradients", "Sanitize"]
    assert len(calls) > 6 and calls == order * (len(calls) // 3)
    empty = gradients(None, {"w": torch.ones(2, 3)}, (torch.ones(0, 4), torch.ones(0)))  # an empty lot is a step
    assert empty["w"].shape == (0, 2, 3)
