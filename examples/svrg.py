"""SVRG on private gradients: the paper's conclusion names it among the methods that need only sanitised gradients.

SVRG steps along g(w) - g(v) + m, where v is an older copy of the weights and m the mean gradient over all data at v.
All three are released: m by a full-batch step at the beginning of each round, g(w) and g(v) together. A pair of copies
with the sum of both losses has the per-example gradient (g_i(w), g_i(v)), which is clipped as one vector.
"""

import copy

import torch
from torch import nn
from torch.nn import functional as F

import hush


class SVRG(torch.optim.Optimizer):
    """w -= lr * (g(w) - g(v) + m), from the released gradients of the pair."""

    def __init__(self, now: nn.Module, then: nn.Module, mean: list[torch.Tensor], lr: float) -> None:
        super().__init__([*now.parameters(), *then.parameters()], {"lr": lr})
        self._triples = list(zip(now.parameters(), then.parameters(), mean, strict=True))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for w, v, m in self._triples:
            assert w.grad is not None and v.grad is not None
            w.sub_(w.grad - v.grad + m, alpha=self.param_groups[0]["lr"])


def one_round(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, full: hush.Plan, inner: hush.Plan
) -> hush.accounting.Event:
    """One round of SVRG in place; returns what it did to the data."""

    def losses_of(network: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(network(x), y, reduction="none")

    def of_both(pair: nn.ModuleDict, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return losses_of(pair["now"], x, y) + losses_of(pair["then"], x, y)

    with hush.Private(model, full, losses_of, data=(x, y)) as all_data:
        for lot in all_data.lots():
            for batch in lot.batches(1024):
                all_data.add(batch)
            all_data.step()  # no optimizer: the released gradient is what is wanted
            mean = [p.grad.clone() for p in model.parameters() if p.grad is not None]

    pair = nn.ModuleDict({"now": model, "then": copy.deepcopy(model)})
    optimizer = SVRG(pair["now"], pair["then"], mean, lr=0.5)
    with hush.Private(pair, inner, of_both, data=(x, y)) as private:
        for lot in private.lots():
            for batch in lot.batches(256):
                private.add(batch)
            private.step(optimizer)
    return full.event + inner.event


def main(rounds: int = 3, steps: int = 20, noise: float = 2.0) -> tuple[float, hush.Bounds]:
    torch.manual_seed(0)
    x = torch.randn(4000, 10)
    y = (x @ torch.randn(10) > 0).long()
    model = nn.Linear(10, 2)
    full = hush.Plan(
        lots=hush.PoissonLots(examples=len(x), lot_size=len(x)),
        steps=1,
        clip=hush.FlatClip(1.0),
        noise_multiplier=10 * noise,
    )
    inner = hush.Plan(
        lots=hush.PoissonLots(examples=len(x), lot_size=200),
        steps=steps,
        clip=hush.FlatClip(1.0),
        noise_multiplier=noise,
    )
    event: hush.accounting.Event = hush.accounting.NOTHING
    for _ in range(rounds):
        event = event + one_round(model, x, y, full, inner)
    with torch.no_grad():
        accuracy = (model(x).argmax(1) == y).float().mean().item()  # of synthetic data; on real data this is private
    spent = hush.accounting.epsilon(event, delta=1e-5)
    print(f"accuracy {accuracy:.1%}, epsilon {spent} at delta 1e-5")
    return accuracy, spent


if __name__ == "__main__":
    main()
