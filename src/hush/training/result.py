"""What a run gives back."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from hush.accounting import Bounds, rounded_up
from hush.report import Report, Statement


@dataclass(frozen=True, repr=False)
class Result:
    """A trained model and the guarantee that can be quoted for it.

    `model` is the one that was given, now holding what was trained (the averaged or the best parameters, where those
    were asked for). `history` has one entry for each measured epoch. `ended` says why the run ended: "finished",
    "budget" (fewer epochs than wanted, because one step more would exceed the budget), "account" (a resumed run whose
    lost steps could not be done again), or "held-out" (early stopping). `report` has the paths of
    its three forms (html, json, text); None without `out`.
    """

    model: nn.Module
    statement: Statement
    history: tuple[Mapping[str, Any], ...]
    ended: str
    steps: int
    seconds: float
    report: Report | None

    def __repr__(self) -> str:
        guarantee = (
            f"epsilon {self.epsilon} at delta {rounded_up(self.statement.delta, 6)}"
            if self.statement.private
            else "NOT PRIVATE"
        )
        return f"Result({self.ended} after {self.steps} steps, {guarantee}, measured {self.measured})"

    @property
    def epsilon(self) -> Bounds:
        """The guarantee of the whole plan, at the budget's delta."""
        return self.statement.epsilon

    @property
    def measured(self) -> float | None:
        """The held-out metric of the model that is given back; None where nothing was held out."""
        return self.statement.measured
