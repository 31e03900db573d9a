"""The step as a pure function: traced to a flat graph of operators, with the results of the eager one."""

import pytest
import torch
import torch.nn.functional as F
from support.finished import clipped_sum
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

from hush.clipping import FlatClip


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(self.table(tokens)).mean(1))


MODELS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), lambda: torch.randn(4, 6)),
    "rows": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Flatten(), nn.Linear(40, 3)),
        lambda: torch.randn(4, 5, 6),
    ),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)),
        lambda: torch.randn(4, 2, 6, 6),
    ),
    "attention": (Attention, lambda: torch.randint(0, 11, (4, 5))),
}


@pytest.mark.parametrize("name", MODELS)
def test_traced_step_equals_eager(name: str) -> None:
    torch.manual_seed(0)
    build, batch = MODELS[name]
    model, data, labels = build(), batch(), torch.randint(0, 3, (4,))
    names = [name for name, _ in model.named_parameters()]

    def step(values: list[Tensor], data: Tensor, labels: Tensor, mask: Tensor) -> list[Tensor]:
        params = {name: value.detach().requires_grad_() for name, value in zip(names, values, strict=True)}
        losses = F.cross_entropy(functional_call(model, params, (data,)), labels, reduction="none")
        return list(clipped_sum(losses, params, FlatClip(0.1), mask=mask).tensors.values())

    values = [param.detach() for param in model.parameters()]
    eager = step(values, data, labels, torch.ones(4))
    traced = make_fx(step)(values, data, labels, torch.ones(4))
    kinds = {node.op for node in traced.graph.nodes}
    assert kinds <= {"placeholder", "call_function", "get_attr", "output"}
    for one, other in zip(traced(values, data, labels, torch.ones(4)), eager, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    # The trace holds for other data, other masks and for examples that are not finite: no value was baked in.
    data, mask = batch(), torch.tensor([1.0, 0.0, 1.0, 1.0])
    if data.is_floating_point():
        data[3] = float("nan")
    for one, other in zip(traced(values, data, labels, mask), step(values, data, labels, mask), strict=True):
        assert bool(one.isfinite().all())
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
