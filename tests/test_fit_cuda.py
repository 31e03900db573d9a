"""hush.fit on a GPU: captured and replayed, the same run as on a CPU."""

import pytest
import torch
from test_fit import blobs, network, run

from hush.fitting import HeldOut

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")


def test_a_seeded_run_on_a_gpu_equals_the_one_on_a_cpu() -> None:
    held_out = HeldOut(data=blobs(100, seed=1), public=True)
    here, there = run(network(), seed=3, held_out=held_out), run(network(), seed=3, held_out=held_out, device="cuda")
    assert there.steps == here.steps and there.epsilon == here.epsilon
    for a, b in zip(here.model.parameters(), there.model.parameters(), strict=True):
        torch.testing.assert_close(a, b.cpu(), rtol=1e-3, atol=1e-4)


def test_a_batch_that_does_not_fit_is_halved() -> None:
    result = run(network(), data=blobs(4000), lot_size=400, device="cuda", batch_size=512)
    assert result.ended == "finished" and result.statement.facts["batch_size"] <= 512
    unpadded = run(network(), device="cuda", padded=False)
    assert unpadded.ended == "finished"
