"""Judges a model: hush's per-example gradients against single backward passes of float64, batch after batch."""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hush.gradients.engine import Gradients

Inputs = tuple[Any, ...]
Losses = Callable[..., Tensor]


@dataclass(frozen=True)
class Case:
    """A model, inputs of so many rows and so long, and one loss for each row."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int, int], Inputs]
    losses: Losses
    batches: tuple[tuple[int, int], ...] = ((5, 4), (3, 4), (2, 5), (1, 4), (7, 6))
    """Rows and length of each batch; the first one is analysed."""
    draws: bool = False
    """Whether the forward pass draws random numbers: the definition is then read from the batch's own losses."""
    tolerance: float = 2e-4
    exact: bool = True
    """Whether the model has a float64 form."""
    seed: int = 0
    slow: int = 0
    """How many parameters may go one by one."""
    always: bool = False
    """Whether the short form takes it."""


@dataclass
class Verdict:
    worst: float = 0.0
    slow: tuple[str, ...] = ()
    looked_up: int = 0
    analyses: int = 0
    parameters: int = 0
    hows: dict[str, str] = field(default_factory=dict)


def judge(case: Case) -> Verdict:
    """The largest deviation from the definition over all batches, relative to the largest gradient of its example."""
    torch.manual_seed(case.seed)
    model = case.build()
    gradients = Gradients(case.losses, model, look_seed=0)
    verdict = Verdict()
    for number, (rows, length) in enumerate(case.batches):
        torch.manual_seed(100 + number)
        inputs = case.inputs(rows, length)
        state = torch.get_rng_state()
        found = gradients.per_example(inputs)
        if case.draws:
            torch.set_rng_state(state)
        norms = gradients.squared_norms(inputs) if not case.draws else None
        truth = _in_company(model, case, inputs, state) if case.draws else _alone(model, case, inputs)
        verdict.worst = max(verdict.worst, _deviation(found, truth))
        if norms is not None:
            squares = {n: v.double().reshape(len(v), -1).square().sum(1).sqrt()[:, None] for n, v in found.items()}
            verdict.worst = max(verdict.worst, _deviation({n: v.sqrt()[:, None] for n, v in norms.items()}, squares))
    explained = gradients.explain()
    verdict.hows = {row.name: row.how for row in explained.rows}
    verdict.slow = tuple(name for name, how in verdict.hows.items() if how == "one by one")
    verdict.looked_up, verdict.analyses = gradients._analyst.lookups, gradients._analyst.analyses
    verdict.parameters = sum(p.requires_grad for p in model.parameters())
    return verdict


def _alone(model: nn.Module, case: Case, inputs: Inputs) -> Iterable[dict[str, Tensor]]:
    """Each example by itself, through a float64 copy of the model."""
    exact = copy.deepcopy(model).double() if case.exact else copy.deepcopy(model)
    names = [name for name, p in exact.named_parameters() if p.requires_grad]
    for row in range(_rows(inputs)):
        loss = case.losses(exact, *[_cut(value, row, case.exact) for value in inputs])
        yield _gradient(loss.mean(), names, [exact.get_parameter(name) for name in names])


def _in_company(model: nn.Module, case: Case, inputs: Inputs, state: Tensor) -> Iterable[dict[str, Tensor]]:
    torch.set_rng_state(state)
    losses = case.losses(model, *inputs)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    for loss in losses:
        yield _gradient(loss, names, [model.get_parameter(name) for name in names])


def _gradient(loss: Tensor, names: list[str], params: list[Tensor]) -> dict[str, Tensor]:
    found = torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True)
    zeros = [torch.zeros_like(p) if g is None else g for p, g in zip(params, found, strict=True)]
    return {name: (g.to_dense() if g.is_sparse else g).double() for name, g in zip(names, zeros, strict=True)}


def _deviation(found: dict[str, Tensor], truth: Any) -> float:
    """What is not finite must not be finite on either side, in some parameter."""
    worst = 0.0
    if isinstance(truth, dict):
        truth = [dict(zip(truth, row, strict=True)) for row in zip(*truth.values(), strict=True)]
    for row, exact in enumerate(truth):
        ours = {name: found[name][row].double() for name in exact}
        if not all(bool(g.isfinite().all()) for g in exact.values()):
            assert not all(bool(g.isfinite().all()) for g in ours.values()), "a non-finite gradient came out finite"
            continue
        largest = max(float(g.abs().max()) for g in exact.values() if g.numel())
        for name, value in exact.items():
            assert ours[name].shape == value.shape
            if value.numel():
                worst = max(worst, float((ours[name] - value).abs().nan_to_num(1e9).max()) / (largest + 1e-9))
    return worst


def _rows(inputs: Inputs) -> int:
    return next(len(value) for value in inputs if isinstance(value, Tensor))


def _cut(value: Any, row: int, exact: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    one = value[row : row + 1]
    return one.double() if exact and one.is_floating_point() else one
