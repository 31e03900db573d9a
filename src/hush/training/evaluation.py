"""Evaluation on held-out data: what it measures, what may be decided by it, and whether its records are at stake."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from hush.sampling.loader import Collate, Loader, map_leaves
from hush.sampling.lots import Lot

_BATCH = 1000


def correct(outputs: Tensor, targets: Tensor) -> Tensor:
    """1 for each example whose largest output is at its target, else 0."""
    return (outputs.argmax(1) == targets).float()


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Data that no gradient is computed on, to measure the model by, and perhaps to choose by.

    The guarantee of a run covers the training set alone. What is measured here comes from these records without
    noise, so the report names them as outside of it, unless `public` declares that nobody in them needs protection.
    `metric(outputs, targets)` gives one value per example; their mean is the measurement, `label` its name. Every
    `every` epochs it is taken. `choose="best"` keeps the best model instead of the last one; with `patience` = k the
    run ends after k measurements without a better one. Either way the run pays for its whole plan.
    """

    data: Any
    public: bool = False
    name: str = "the test set"
    metric: Callable[[Any, Any], Tensor] = correct
    label: str = "accuracy"
    larger_is_better: bool = True
    every: int = 1
    choose: Literal["last", "best"] = "last"
    patience: int | None = None
    collate: Collate | None = None

    def __post_init__(self) -> None:
        if self.every < 1 or (self.patience is not None and self.patience < 1):
            raise ValueError(f"every and patience are whole numbers >= 1, got {self.every} and {self.patience}")
        if self.choose not in ("last", "best"):
            raise ValueError(f"choose must be 'last' or 'best', got {self.choose!r}")

        if self.label in ("step", "epoch", "epsilon", "learning_rate") or self.label.startswith("unsafe"):
            raise ValueError(f"the label {self.label!r} has a meaning of its own in a history; choose another")

    @property
    def decides(self) -> bool:
        """Whether something about the released model depends on these records."""
        return self.choose == "best" or self.patience is not None

    def better(self, value: float, than: float) -> bool:
        """Whether a measurement beats another."""
        return value > than if self.larger_is_better else value < than

    def to_dict(self) -> dict[str, Any]:
        """What a report needs to know, as plain values."""
        names = ("name", "public", "label", "larger_is_better", "choose", "patience")
        return {name: getattr(self, name) for name in names}


def measure(model: nn.Module, held_out: HeldOut, device: torch.device) -> float:
    """The mean of the metric over the held-out data, in eval mode and without gradients; modes are put back."""
    loader = Loader(held_out.data, collate=held_out.collate)
    if loader.examples == 0:
        raise ValueError(f"{held_out.name} is empty")
    everything = Lot(0, np.arange(loader.examples))
    total = torch.zeros((), dtype=torch.float64, device=device)
    with evaluating(model), torch.no_grad():
        for batch in loader.batches(everything, _BATCH):
            inputs, targets = on_device(batch, device)
            total += held_out.metric(model(inputs), targets).double().sum()
    return total.item() / loader.examples


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; every module gets its own mode back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def on_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on the device; copies run beside other work where they can."""
    return map_leaves(lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf, batch)
