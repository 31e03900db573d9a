"""Evaluation on held-out data: what it measures, what may be decided by it, and whether its records are at stake."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from hush.sampling.loader import Collate, Loader, leaves_of, map_leaves
from hush.sampling.lots import Lot
from hush.training.ranges import one_of, text, whole

_BATCH = 1000
_TRIED = 8  # records


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
        object.__setattr__(self, "every", whole("every", self.every, least=1))
        if self.patience is not None:
            object.__setattr__(self, "patience", whole("patience", self.patience, least=1))
        one_of("choose", self.choose, ("last", "best"))
        text("the name of held-out data", self.name, least=1)
        text("the label of a metric", self.label, least=1)
        if not callable(self.metric):
            raise TypeError(f"metric must be a function of (outputs, targets), got {type(self.metric).__name__}")
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


def measure(model: nn.Module, held_out: HeldOut, device: torch.device, *, most: int | None = None) -> float:
    """The mean of the metric over the held-out data (its first `most` records), in eval mode and without gradients.

    The modes of the model's parts are put back.
    """
    loader = Loader(held_out.data, collate=held_out.collate)
    if loader.examples == 0:
        raise ValueError(f"{held_out.name} is empty")
    count = min(loader.examples, most or loader.examples)
    total = torch.zeros((), dtype=torch.float64, device=device)
    with evaluating(model), torch.no_grad():
        for batch in loader.batches(Lot(0, np.arange(count)), _BATCH):
            total += _values(model, held_out, on_device(batch, device)).double().sum()
    return total.item() / count


def try_measuring(model: nn.Module, held_out: HeldOut, device: torch.device) -> None:
    """Measure a few records once, before anything is charged: what cannot be measured at all is said now."""
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            measure(model, held_out, device, most=_TRIED)
    except KeyboardInterrupt:
        raise
    except Exception as error:
        raise ValueError(
            f"{held_out.name} cannot be measured: {type(error).__name__}: {error} (tried on its first records, before "
            "anything was charged)"
        ) from error


def _values(model: nn.Module, held_out: HeldOut, batch: Any) -> Tensor:
    """The metric of each record of a batch."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        came = f"{len(batch)} parts" if isinstance(batch, tuple | list) else type(batch).__name__
        raise ValueError(f"held-out data must give batches of (inputs, targets), got {came}")
    values = held_out.metric(model(batch[0]), batch[1])
    rows = next((len(leaf) for leaf in leaves_of(batch) if isinstance(leaf, Tensor) and leaf.ndim), None)
    if not isinstance(values, Tensor) or values.shape != (rows,):
        came = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(f"the metric must give one value for each of {rows} records, got {came}")
    return values


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
