"""The example of one call is run as it is, under the audit, and as a job of the command line."""

import dataclasses
import importlib.util
import runpy
from pathlib import Path
from types import ModuleType

import pytest
from support.watching import watch

from hush.accounting import Budget, Gaussian, PoissonSampled, epsilon
from hush.recipes import data
from hush.training import Result, Run, fit

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "one_call.py"


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_one_call", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def checked(result: object) -> Result:
    assert isinstance(result, Result)
    noise = result.statement.plan.noise_multiplier
    assert isinstance(noise, float) and result.steps == 20
    assert result.epsilon == epsilon(PoissonSampled(0.1, Gaussian(noise)) * 20, delta=1e-5)
    assert result.epsilon.upper <= 2.0 and result.statement.private
    return result


def test_hazard_27_one_call(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = watch(monkeypatch)
    result = checked(example().main(epochs=2, out=str(tmp_path / "run"), lot_size=400, examples=4000))
    noise = result.statement.plan.noise_multiplier
    assert isinstance(noise, float)
    seen.check(steps=20, noise=noise, clip=1.0)
    assert result.measured is not None and result.measured > 0.5
    assert "differentially private" in capsys.readouterr().out
    assert result.report is not None and result.report.html.exists()


def test_hazard_27_the_job_of_the_example(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch(monkeypatch)
    job = example().job(examples=4000, lot_size=400, epochs=2)
    plan, run = job.plan(Budget(epsilon=2.0, delta=1e-5)), Run(progress=False)
    result = checked(fit(job.model, job.data, job.losses_of, job.optimizer, plan, held_out=job.held_out, run=run))
    noise = result.statement.plan.noise_multiplier
    assert isinstance(noise, float)
    seen.check(steps=20, noise=noise, clip=1.0)


def test_hazard_27_the_first_program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    mnist = data.load("mnist")
    few = dataclasses.replace(mnist, train_x=mnist.train_x[:4000], train_y=mnist.train_y[:4000])
    monkeypatch.setattr(data, "load", lambda name: few)
    seen = watch(monkeypatch)
    kept = runpy.run_path(str(EXAMPLE.parent / "first.py"))
    seen.check(steps=kept["plan"].steps, noise=kept["plan"].noise_multiplier, clip=1.0)
    assert kept["result"].measured > 0.3 and kept["result"].epsilon.upper <= 2.0
    assert "differentially private for each of the 4,000 records" in capsys.readouterr().out
