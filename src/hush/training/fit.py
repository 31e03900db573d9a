"""hush.fit: a model, data and a plan in; a trained model and a guarantee out."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hush.checks.processes import require_one_process
from hush.machine import Machine
from hush.plan import Plan
from hush.sampling.loader import Loader
from hush.training import run_folder as saving
from hush.training.evaluation import HeldOut
from hush.training.preflight import check_arguments, device_of, reproducible
from hush.training.result import Result
from hush.training.run import Run
from hush.training.trainer import Trainer


def fit(
    model: nn.Module,
    data: Any,
    losses_of: Callable[..., Tensor],
    optimizer: torch.optim.Optimizer,
    plan: Plan,
    *,
    held_out: HeldOut | None = None,
    run: Run | None = None,
    machine: Machine | None = None,
) -> Result:
    """Train the model on the data by DP-SGD without ever spending more than the plan's budget.

    Guarantee: everything that leaves the run (the model, its checkpoints, its history) is (epsilon, delta)-
    differentially private for the records of the data, as `result.statement` says; it also says what is not covered.

    `data` is arrays, tensors, a map-style dataset, a tuple or dict of arrays, or a `hush.Loader`; never a DataLoader.
    `losses_of(model, *inputs)` gives one loss for each row; `hush.per_example(F.cross_entropy)` makes one from a loss
    of torch. `plan` fixes lots, steps, clip and noise. `held_out` data is measured every epoch. `run` says where it
    lives on disk and what it shows, `machine` where it is computed. All that can be refused is refused before anything
    is charged.

    >>> from hush.accounting import Budget
    >>> from hush.clipping.clips import FlatClip
    >>> from hush.gradients.functional import per_example
    >>> x, model = torch.randn(200, 3), nn.Linear(3, 2)
    >>> plan = Plan.for_budget(Budget(epsilon=2.0, delta=1e-4), examples=200, lot_size=20, epochs=2, clip=FlatClip(1.0))
    >>> result = fit(model, (x, (x.sum(1) > 0).long()), per_example(nn.functional.cross_entropy),
    ...              torch.optim.SGD(model.parameters(), lr=0.1), plan, run=Run(progress=False))
    >>> result.steps, result.epsilon.upper <= 2.0
    (20, True)
    """
    run, machine = run or Run(), machine or Machine()
    require_one_process()
    with saving.held(run.path):
        return _fit(model, data, losses_of, optimizer, plan, held_out, run, machine)


def _fit(
    model: nn.Module,
    data: Any,
    losses_of: Callable[..., Tensor],
    optimizer: torch.optim.Optimizer,
    plan: Plan,
    held_out: HeldOut | None,
    run: Run,
    machine: Machine,
) -> Result:
    device = device_of(model, machine)
    saved = saving.find_saved(run.path, resume=run.resume)
    check_arguments(model, optimizer, plan, held_out, first=saved is None)
    loader = Loader.of(data)
    if saved is not None:
        plan = saving.check_same_run(saved, plan, run, held_out)
    model.to(device)  # first: a callback may copy the parameters where they are
    for callback in run.callbacks:
        callback.begin(model, optimizer, run.path, held_out)
    with reproducible(run.seed, device):
        trainer = Trainer(model, loader, losses_of, optimizer, plan, held_out, run, machine, device)
        try:
            trainer.begin(run.path, saved)
            trainer.train()
            return trainer.finish()
        finally:
            trainer.close_book()
