"""hush.fit on a GPU: captured and replayed, the same run as on a CPU; memory that runs out; resumed runs; ledgers."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_fit import BUDGET, blobs, network, run
from support.small_job import Crash, job, same, train
from torch import Tensor, nn
from torch.nn import functional as F

from hush.accounting import Budget
from hush.captured.lot import CapturedRun
from hush.ledger import Ledger
from hush.training import HeldOut

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")


def close(one: nn.Module, other: nn.Module) -> None:
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.cpu(), b.cpu(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("form", [{}, {"compile": True}])
def test_a_seeded_run_on_a_gpu_equals_the_one_on_a_cpu(form: dict[str, bool]) -> None:
    held_out = HeldOut(data=blobs(100, seed=1), public=True)
    here = run(network(), seed=3, held_out=held_out)
    there = run(network(), seed=3, held_out=held_out, device="cuda", **form)
    assert there.steps == here.steps and there.epsilon == here.epsilon
    assert next(there.model.parameters()).is_cuda
    close(here.model, there.model)


def test_data_and_ledger_on_a_gpu(tmp_path: Path) -> None:
    on_gpu = tuple(part.cuda() for part in blobs())
    with Ledger(tmp_path / "data.hush", budget=BUDGET) as ledger:
        result = run(data=on_gpu, device="cuda", ledger=ledger, out=tmp_path / "run")
        (page,) = ledger.accounts()
        assert result.ended == "finished" and page.closed and page.spent == result.steps == 30
    assert "cuda" not in str(torch.load(tmp_path / "run" / "model.pt", weights_only=True, map_location="cpu"))


@pytest.fixture
def little_memory() -> Iterator[int]:
    """So many bytes of the GPU and no more."""
    limit = 1 << 30
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def wide() -> nn.Module:
    """64 KiB for each tensor of activations of one example."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 16_384), nn.Tanh(), nn.Linear(16_384, 2))


def test_a_batch_that_does_not_fit_is_halved_until_it_does(little_memory: int) -> None:
    settings: dict[str, Any] = {
        "data": blobs(32_768), "lot_size": 16_384, "epochs": 3, "seed": 3, "device": "cuda",
        "budget": Budget(epsilon=3.0, delta=1e-6),
    }  # fmt: skip
    sizes: list[int] = []

    def losses(out: Tensor, y: Tensor) -> Tensor:
        sizes.append(len(y))
        return F.cross_entropy(out, y, reduction="none")

    halved = run(wide(), batch_size=16_384, loss=losses, **settings)
    assert halved.ended == "finished" and halved.steps == 6
    assert 16_384 in sizes and sizes[-1] < 16_384, "16,384 rows cannot fit in 1 GiB"
    torch.cuda.set_per_process_memory_fraction(1.0)
    close(halved.model, run(wide(), batch_size=sizes[-1], **settings).model)


def test_a_seeded_run_on_a_gpu_resumes_as_if_it_had_not_been_interrupted(tmp_path: Path) -> None:
    whole = train(job(), tmp_path / "whole", seed=4, device="cuda")
    with pytest.raises(Crash):
        train(job(crash_at=3), tmp_path / "cut", seed=4, checkpoint_every=7, device="cuda")
    resumed = train(job(), tmp_path / "cut", seed=4, checkpoint_every=7, resume=True, device="cuda")
    assert resumed.ended == whole.ended == "finished" and resumed.steps == 50
    assert same(resumed.model, whole.model)


def test_a_run_that_is_long_enough_is_compiled_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    made = CapturedRun.begin_anew

    def watched(captured: CapturedRun, *, compile: bool) -> None:
        asked.append(compile)
        made(captured, compile=compile)

    monkeypatch.setattr(CapturedRun, "begin_anew", watched)
    assert run(device="cuda").ended == "finished" and asked == [False], "30 steps of microseconds"
    monkeypatch.setattr("hush.training.compiling._WORTH_IT", 0.0)
    asked.clear()
    assert run(device="cuda").ended == "finished" and asked == [False, True]
    asked.clear()
    assert run(device="cuda", seed=1).ended == "finished" and asked == [False], "a seeded run is repeatable"


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.RMSprop, torch.optim.SGD])
def test_any_optimizer_of_torch_works_on_a_gpu(kind: type[torch.optim.Optimizer]) -> None:
    here, there = network(), network()
    run(here, optimizer=kind(here.parameters(), lr=0.01), seed=1)  # type: ignore[call-arg]
    run(there, optimizer=kind(there.parameters(), lr=0.01), seed=1, device="cuda")  # type: ignore[call-arg]
    close(here, there)


def test_images_through_a_convolutional_network_on_a_gpu() -> None:
    torch.manual_seed(0)
    here = nn.Sequential(nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 2))
    there = copy.deepcopy(here)
    images = torch.randn(400, 1, 8, 8, generator=torch.Generator().manual_seed(1)), blobs()[1]
    run(here, data=images, seed=2)
    run(there, data=images, seed=2, device="cuda")
    close(here, there)
