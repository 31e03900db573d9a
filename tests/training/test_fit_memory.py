"""Memory that runs out in fit: the physical batch is halved, and nothing counts twice or is lost."""

import pytest
import torch
from support.small_fit import network, run
from support.watching import watch
from torch import Tensor
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from hush.sampling.lots import PoissonLots
from hush.training import Scheduler
from hush.training.physical_batches import first_size


def test_the_physical_batch_is_halved_until_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def hungry(out: Tensor, y: Tensor) -> Tensor:
        sizes.append(len(y))
        if len(y) > 16:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return F.cross_entropy(out, y, reduction="none")

    seen = watch(monkeypatch)
    result = run(loss=hungry, batch_size=100, seed=3)
    assert result.statement.facts["batch_size"] == 100 and 13 in sizes and result.steps == 30 == len(seen.multipliers)
    plain = run(seed=3, batch_size=13)
    for a, b in zip(result.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)

    # Memory that runs out after a first batch was added up: the lot begins again, and nothing counts twice.
    since_first_step: list[int] = []

    def arm(step: int) -> float:
        since_first_step.extend([0] if step == 1 else [])
        return 1.0

    def sudden(out: Tensor, y: Tensor) -> Tensor:
        if since_first_step:
            since_first_step.append(1)
            if len(since_first_step) == 3:
                raise torch.OutOfMemoryError("CUDA out of memory")
        return F.cross_entropy(out, y, reduction="none")

    model, whole = network(), {"lot_size": 400, "batch_size": 100, "seed": 3}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    interrupted = run(model, optimizer=optimizer, callbacks=[Scheduler(LambdaLR(optimizer, arm))], loss=sudden, **whole)
    assert interrupted.steps == run(**whole).steps
    for a, b in zip(interrupted.model.parameters(), run(**whole).model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)

    def broken(out: Tensor, y: Tensor) -> Tensor:
        if len(y) != 8:
            raise RuntimeError("shapes differ")
        return F.cross_entropy(out, y, reduction="none")

    with pytest.raises(ValueError, match="shapes differ"):
        run(loss=broken)

    def insatiable(out: Tensor, y: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        run(loss=insatiable)
    assert first_size(PoissonLots(examples=60_000, lot_size=2400), torch.device("cpu")) <= 1024
