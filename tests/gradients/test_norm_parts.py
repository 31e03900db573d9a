"""Sums over the rows of an example for biases and layer norms, taken in parts as on a GPU."""

import pytest
import torch
from support.finished import clipped_sum
from torch import Tensor, nn

from hush.clipping import FlatClip
from hush.gradients.sums import small as bundles


def test_sums_in_parts_are_those_of_single_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Tanh())
    params = dict(model.named_parameters())
    x = torch.randn(3, 2 * bundles._PART, 6)

    def losses(x: Tensor) -> Tensor:
        return model(x).square().sum(2).mean(1)

    used: list[int] = []
    monkeypatch.setattr(bundles, "_in_parts", lambda rows: used.append(rows.shape[1]) or True)
    total = clipped_sum(losses(x), params, FlatClip(float("inf")))
    assert len(used) >= 3 and set(used) == {2 * bundles._PART}  # both of the norm, and the bias of the linear layer
    want = {name: torch.zeros(param.shape, dtype=torch.float64) for name, param in params.items()}
    model.double()
    for one in x.double():
        for name, gradient in zip(params, torch.autograd.grad(losses(one[None]).sum(), params.values()), strict=True):
            want[name] += gradient
    for name in params:
        torch.testing.assert_close(total.tensors[name].double(), want[name], rtol=1e-5, atol=1e-6)


def test_only_many_rows_on_a_gpu_are_taken_in_parts() -> None:
    assert not bundles._in_parts(torch.zeros(2, 4 * bundles._PART, 3))
    if torch.cuda.is_available():
        assert bundles._in_parts(torch.zeros(2, 4 * bundles._PART, 3, device="cuda"))
        assert not bundles._in_parts(torch.zeros(2, bundles._PART, 3, device="cuda"))
        assert not bundles._in_parts(torch.zeros(2, 4 * bundles._PART + 1, 3, device="cuda"))
        assert not bundles._in_parts(torch.zeros(16, 4 * bundles._PART, 2048, device="cuda"))
