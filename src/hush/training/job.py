"""Job: what a recipe, or a function named to `hush train`, returns: the arguments of `fit` but for budget and place."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hush.accounting import Budget
from hush.clipping.clips import Clip
from hush.plan import Plan, PrivatePreprocessing
from hush.report import About
from hush.sampling.loader import Loader
from hush.training.callbacks import Callback
from hush.training.evaluation import HeldOut


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that a private training needs but the budget: model, data, losses_of, optimizer, settings of a plan.

    `job.plan(budget)` makes the plan; `hush.fit(job.model, job.data, job.losses_of, job.optimizer, plan,
    held_out=job.held_out, run=hush.Run(..., about=job.about, callbacks=job.callbacks))` runs it, as `hush train` does.
    """

    model: nn.Module
    data: Any
    losses_of: Callable[..., Tensor]
    optimizer: torch.optim.Optimizer
    lot_size: int
    clip: Clip
    epochs: float | None = None
    steps: int | None = None
    preprocessing: PrivatePreprocessing | None = None
    held_out: HeldOut | None = None
    callbacks: Sequence[Callback] = ()
    about: About = field(default_factory=About)

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise TypeError(f"expected a torch.nn.Module as the model, got {type(self.model).__name__}")
        if not callable(self.losses_of):
            raise TypeError(f"expected losses_of(model, *inputs), a function, got {type(self.losses_of).__name__}")

    def plan(self, budget: Budget, **settings: Any) -> Plan:
        """The plan for a budget; `settings` are arguments of `Plan.for_budget` that stand in for the job's own."""
        own: dict[str, Any] = {
            "examples": len(Loader.of(self.data)),
            "lot_size": self.lot_size,
            "clip": self.clip,
            "preprocessing": self.preprocessing,
        }
        if "epochs" not in settings and "steps" not in settings:
            own |= {"epochs": self.epochs, "steps": self.steps}
        return Plan.for_budget(budget, **own | settings)
