"""jax-privacy as a way of the step benchmark: the same networks as in PyTorch, its noise, and how it is timed."""

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")
ROOMS = ("jax_forms", "step_child", "forms", "cases", "measure", "exactness", "oracle", "crew")


@pytest.fixture
def jax_forms(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax_forms

    yield jax_forms
    for name in ROOMS:
        sys.modules.pop(name, None)


@pytest.fixture
def jax(jax_forms: ModuleType) -> ModuleType:
    pytest.importorskip("jax_privacy")
    import jax

    return jax


def case_of(name: str):  # type: ignore[no-untyped-def]
    """A case with few examples, of the size that it has on a CPU."""
    import cases

    words = partial(cases.texts, 4, 16, 50)
    small = partial(cases.Transformer, vocabulary=50, width=48, layers=2, heads=12, length=16)
    models: dict[str, Callable] = {"gpt2-small": small, "gpt2-tied": partial(small, tied=True)}
    models["gpt2-lora"] = lambda: cases.low_rank(small(), 4)
    if name in models:
        return cases.Case(name, models[name], words, losses=cases.token_losses)
    case = cases.cases("cpu")[name]
    return replace(case, batch=lambda: tuple(part[:4] for part in case.batch()))


@pytest.mark.parametrize("name", ["mlp60", "mlp784", "cnn24", "wrn16-4", "transformer", "gpt2-tied", "gpt2-lora"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_the_network_is_that_of_pytorch(jax_forms: ModuleType, jax: ModuleType, name: str, kind: str) -> None:
    case = case_of(name)
    torch.manual_seed(0)
    model, (x, _) = case.model(), case.batch()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "bfloat16"):
        wanted = model(x).float().numpy()
    weights = jax_forms.weights(model, trainable=True) | jax_forms.weights(model, trainable=False)
    found = jax.jit(jax_forms.network(name), static_argnums=2)(weights, x.numpy(), kind)
    assert found.dtype == kind
    error = abs(found.astype("float32") - wanted).max() / abs(wanted).max()
    assert error < (1e-5 if kind == "float32" else 3e-2)


@pytest.mark.filterwarnings("ignore:optax.global_norm:DeprecationWarning")
@pytest.mark.parametrize("name", ["mlp60", "cnn24", "gpt2-lora"])
def test_the_step_adds_noise_of_the_clip_norm(jax_forms: ModuleType, jax: ModuleType, name: str) -> None:
    case = case_of(name)
    before = jax_forms.weights(jax_forms.prepare(case, "cpu")[0], trainable=True)
    step = jax_forms.private(case, "cpu")
    step()
    after = step._state[0]
    assert set(after) == set(before), "frozen weights stay out of it"
    change = math.sqrt(sum(float(((after[name] - before[name]) ** 2).sum()) for name in before))
    noise = 1e-3 / 4 * math.sqrt(sum(weight.size for weight in before.values()))
    assert change == pytest.approx(noise, rel=0.1, abs=1e-3), "the mean of clipped gradients adds 1e-3 at most"
    assert step.planned_mib() > 0 and "jax-privacy" in step.note


def test_the_step_without_privacy_is_that_of_pytorch(jax_forms: ModuleType, jax: ModuleType) -> None:
    case = case_of("mlp60")
    model, x, y, optimizer = jax_forms.prepare(case, "cpu")
    case.forward(model, x, y).mean().backward()
    optimizer.step()
    step = jax_forms.not_private(case, "cpu")
    step()
    for name, wanted in jax_forms.weights(model, trainable=True).items():
        assert abs(step._state[0][name] - wanted).max() < 1e-7


def test_a_missing_peer_is_said_with_its_remedy(jax_forms: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax_privacy", None)
    for build in jax_forms.ways().values():
        with pytest.raises(jax_forms.Unavailable, match=r"is not installed \(pip install 'hush\[bench\]'\)"):
            build(case_of("mlp60"), "cpu")


def test_a_network_that_is_not_written_is_refused_by_name(jax_forms: ModuleType) -> None:
    with pytest.raises(jax_forms.Unavailable, match="the network of lstm is not written"):
        jax_forms.network("lstm")


def test_steps_of_a_turn_are_waited_for_once(jax_forms: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import step_child
    from measure import Timing

    asked = []
    step = jax_forms.JaxStep(None, (), (), "")
    monkeypatch.setattr(jax_forms.JaxStep, "__call__", lambda self, count=1: asked.append(count))
    monkeypatch.setattr(step_child, "forms", lambda *_: {"plain": lambda *_: lambda: None})
    monkeypatch.setattr(step_child, "seconds_per_step", lambda step, repeats, device: (step(), (0.01, 0.0))[1])

    def interleaved(steps, **_):  # type: ignore[no-untyped-def]
        steps["jax-privacy"]()
        return SimpleNamespace(timings={"jax-privacy": Timing(50.0, 10.0, 9.0, 11.0)})

    monkeypatch.setattr(step_child, "interleaved", interleaved)
    found = step_child._beside_plain(case_of("mlp60"), "jax-privacy", step)
    assert asked == [1, 1, 1, 5]
    assert found == Timing(10.0, 2.0, 1.8, 2.2)
