"""How far the clipped sums of hush are from a float64 loop over the examples, for each way to run it.

Weights on the losses make gradients of any size with one compiled graph. With weights that bring every norm to C / 2
nothing is clipped and the sum itself is compared. With weights that bring norms to 0.4 C, 0.8 C, .. some are clipped;
factors may lie below C / norm by what rounding can add, never above: the norm of one example alone must not exceed C.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace

import torch
from cases import Case
from forms import Eager, prepare
from oracle import Reference, difference, norm_of
from torch import Tensor, nn

from hush.clipping.clips import FlatClip
from hush.gradients.engine import Gradients
from hush.machine import Machine
from hush.plan import Plan
from hush.private import Private
from hush.sampling.lots import PoissonLots

ROWS = 6
"""Rows of the batch that is compared, a third of them padding."""
FP32 = 1e-5
BF16 = 4.0
"""In bf16 the sum may be at most so many times as far from float64 as the gradient of plain PyTorch in bf16."""


@dataclass(frozen=True)
class Errors:
    """Relative errors against float64, and the largest norm of one example alone in units of C."""

    unclipped: float
    clipped: float
    largest: float


def exactness(case: Case, kind: str, device: str) -> Iterator[dict]:
    """In "fp32" or "bf16" the errors of norms, of plain PyTorch, and of each way: all that is known, after each way."""
    case = replace(case, autocast=kind == "bf16")
    model, x, y, _ = prepare(case, device)
    x, y = x[:ROWS], y[:ROWS]
    count = len(x) - len(x) // 3
    exact = Reference(model, x[:count], y[:count], lambda model, x, y: case.losses(model(x), y))
    low = 0.5 / exact.norms.float()
    mixed = torch.arange(1, count + 1, device=device) * 0.4 / exact.norms.float()
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    norms = Gradients(lambda model, x, y: case.forward(model, x, y), model).squared_norms((x[:count], y[:count]))
    norms = torch.stack([norm.double() for norm in norms.values()]).sum(0).sqrt()
    loss = (case.forward(model, x[:count], y[:count]) * low).sum()
    plain = torch.autograd.grad(loss, list(params.values()))
    unclipped, clipped, norms_of = exact.clipped_sum(low, 1.0), exact.clipped_sum(mixed, 1.0), exact.norms
    del exact
    found = {
        "examples": count,
        "padding": len(x) - count,
        "norms": float(((norms - norms_of) / norms_of).abs().max()),
        "plain": difference(list(plain), unclipped),
        "ways": {},
    }
    yield found
    for way, run in _ways(case, model, (x, y), count, device):
        of_low, of_mixed = difference(run(low), unclipped), difference(run(mixed), clipped)
        alone = [norm_of(run(4 * mixed * (torch.arange(count, device=device) == at))) for at in range(count)]
        found["ways"][way] = asdict(Errors(of_low, of_mixed, float(max(alone))))
        yield found


def _ways(
    case: Case, model: nn.Module, batch: tuple[Tensor, Tensor], count: int, device: str
) -> Iterator[tuple[str, Callable[[Tensor], list[Tensor]]]]:
    """Functions from weights to the clipped sum, through the training loop with noise multiplier 0."""
    for name, compile in {"hush": None, "hush captured": False, "hush compiled+captured": True}.items():
        if compile is None or device == "cuda":
            loop = _Loop(case, model, batch, count, Eager() if compile is None else Machine(compile=compile))
            yield name, loop
            loop.private.close()


class _Loop:
    """One step of the training loop without noise, as a function from weights to the clipped sum."""

    def __init__(
        self, case: Case, model: nn.Module, batch: tuple[Tensor, Tensor], count: int, machine: Machine
    ) -> None:
        self._x, self._y = batch
        self._count = count
        self._trainable = [p for p in model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.SGD(self._trainable, lr=0.0)
        plan = Plan(
            lots=PoissonLots(examples=count, lot_size=count), steps=100, clip=FlatClip(1.0), noise_multiplier=0.0
        )
        losses_of = lambda model, x, y, weights: case.forward(model, x, y) * weights  # noqa: E731
        self.private = Private(model, plan, losses_of, machine=machine)
        self._lots = self.private.lots()

    def __call__(self, weights: Tensor) -> list[Tensor]:
        lot, count = next(self._lots), self._count
        padded = torch.cat([weights, weights.new_ones(len(self._x) - count)])
        for batch in lot.batches(len(self._x) if self.private.captured is not None else count):
            rows = len(batch)
            self.private.add(batch, self._x[:rows], self._y[:rows], padded[:rows])
        self.private.step(self._optimizer)
        return [p.grad * count for p in self._trainable]


def lines(kind: str, errors: dict) -> Iterator[str]:
    """A line for each way; what is not within the tolerance is said so."""
    if "failed" in errors:
        yield f"exactness {kind} not known for all ways: {errors['failed']}"
    if "plain" not in errors:
        return
    allowed = max(FP32, 2 * errors["plain"]) if kind == "fp32" else BF16 * errors["plain"]
    norms = errors["norms"]
    told = f"norms {norms:.1e}{'' if norms <= allowed else ' TOO FAR'}, plain PyTorch {errors['plain']:.1e}"
    yield f"exactness {kind} ({errors['examples']} examples, {errors['padding']} padding rows): {told}"
    for way, error in errors["ways"].items():
        bad = "" if error["unclipped"] <= allowed and error["largest"] <= 1 else "  NOT EXACT"
        told = f"sum {error['unclipped']:.1e}, clipped {error['clipped']:.1e}, one alone {error['largest']:.6f} C"
        yield f"    {way:24s} {told}{bad}"
