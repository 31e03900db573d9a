"""Evaluation on held-out data: what it measures, what may be decided by it, and whether its records are at stake."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hush.gradients.engine import Inputs
from hush.sampling.loader import Loader, on_device
from hush.training.ranges import one_of, text, whole

_BATCH = 1000
_TRIED = 8  # records


def correct(model: nn.Module, *inputs: Any) -> Tensor:
    """1 for each example whose largest output is at its target, else 0; for batches of (inputs, targets)."""
    if len(inputs) != 2:
        raise ValueError(
            f"accuracy needs held-out batches of (inputs, targets), got {len(inputs)} parts: give "
            "HeldOut(metric_of=...), a function of the model and a batch with one value for each row"
        )
    return (model(inputs[0]).argmax(1) == inputs[1]).float()


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Data that no gradient is computed on, to measure the model by, and perhaps to choose by.

    The guarantee of a run covers the training set alone. What is measured here comes from these records without
    noise, so the report names them as outside of it, unless `public` declares that nobody in them needs protection.
    `metric_of(model, *inputs)` gives one value for each row, of the same kind of batch that losses_of gets, in any
    number of parts; their mean is the measurement, `label` its name. `data` may be a `hush.Loader`. Every
    `every` epochs it is taken. `choose="best"` keeps the best model instead of the last one; with `patience` = k the
    run ends after k measurements without a better one. Either way the run pays for its whole plan.
    """

    data: Any
    public: bool = False
    name: str = "the test set"
    metric_of: Callable[..., Tensor] = correct
    label: str = "accuracy"
    larger_is_better: bool = True
    every: int = 1
    choose: Literal["last", "best"] = "last"
    patience: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "every", whole("every", self.every, least=1))
        if self.patience is not None:
            object.__setattr__(self, "patience", whole("patience", self.patience, least=1))
        one_of("choose", self.choose, ("last", "best"))
        text("the name of held-out data", self.name, least=1)
        text("the label of a metric", self.label, least=1)
        if not callable(self.metric_of):
            raise TypeError(
                f"metric_of must be a function of the model and a batch, got {type(self.metric_of).__name__}"
            )
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


_REMEDY = (
    "; without metric_of= the data is (inputs, targets) and the model gives one score for each class: else give "
    "HeldOut(data=..., metric_of=f), where f(model, *inputs) or f(model, **columns) is one value for each record"
)


def measure(model: nn.Module, held_out: HeldOut, device: torch.device, *, most: int | None = None) -> float:
    """The mean of the metric over the held-out data (its first `most` records), in eval mode and without gradients.

    The modes of the model's parts are put back.
    """
    loader = Loader.of(held_out.data)
    if loader.examples == 0:
        raise ValueError(f"{held_out.name} is empty")
    total, count = torch.zeros((), dtype=torch.float64, device=device), 0
    with evaluating(model), torch.no_grad():
        for rows in loader.parts(_BATCH, most=most):
            inputs = Inputs.of(on_device(rows, device))
            total, count = total + _values(model, held_out, inputs).double().sum(), count + inputs.rows
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
            f"anything was charged){_REMEDY if held_out.metric_of is correct else ''}"
        ) from error


def _values(model: nn.Module, held_out: HeldOut, inputs: Inputs) -> Tensor:
    """The metric of each record of a batch."""
    values = held_out.metric_of(model, *inputs.args, **inputs.kwargs)
    if not isinstance(values, Tensor) or values.shape != (inputs.rows,):
        came = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(f"metric_of must give one value for each of {inputs.rows} records, got {came}")
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
