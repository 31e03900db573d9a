"""What may happen between steps: a small protocol, and schedulers, averages and TensorBoard as its users."""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hush.ledger import owned
from hush.training.averaging import Average
from hush.training.ranges import number, one_of

if TYPE_CHECKING:
    from hush.training.evaluation import HeldOut


class Callback:
    """Called at the moments of a training; override what you need. No value that is private ever reaches it.

    It sees the number of steps, the released model and optimizer, and what is measured on held-out data. It must not
    read the training data: what it does with the optimizer would then depend on records without noise.
    """

    def begin(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path | None, held_out: "HeldOut | None"
    ) -> None:
        """Before anything is charged; the place to refuse."""

    def after_step(self, step: int, *, epoch_ended: bool) -> None:
        """After each step; `step` counts those that are done."""

    def measured(self, entry: Mapping[str, Any]) -> None:
        """After each measurement: step, epoch, epsilon, learning_rate, and the held-out value by its label."""

    def end(self) -> None:
        """When the training is over, whatever ended it."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of it: tensors and plain values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what `state_dict` gave."""


class Scheduler(Callback):
    """Any scheduler of torch that reads no training metric; stepped after each lot, or after each epoch.

    ReduceLROnPlateau reads the measurement of held-out data that was declared public.
    """

    def __init__(self, scheduler: Any, *, every: Literal["step", "epoch"] = "step") -> None:
        if not isinstance(scheduler, LRScheduler):
            raise TypeError(f"expected a scheduler of torch.optim.lr_scheduler, got {type(scheduler).__name__}")
        one_of("every", every, ("step", "epoch"))
        self.scheduler = scheduler
        self._every = every
        self._label: str | None = None

    def begin(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path | None, held_out: "HeldOut | None"
    ) -> None:
        if self.scheduler.optimizer is not optimizer:
            raise ValueError("the scheduler belongs to another optimizer; make it with the one that is given to fit")
        if not isinstance(self.scheduler, ReduceLROnPlateau):
            return
        if held_out is None or not held_out.public:
            raise ValueError(
                "ReduceLROnPlateau reads a metric, and a loss on the training set is private: it would steer the run "
                "by data that no noise protects. Use a schedule of the step alone, or give held_out=HeldOut(..., "
                "public=True), whose measurement it then reads"
            )
        self._label = held_out.label

    def after_step(self, step: int, *, epoch_ended: bool) -> None:
        if self._label is None and (self._every == "step" or epoch_ended):
            self.scheduler.step()

    def measured(self, entry: Mapping[str, Any]) -> None:
        if self._label is not None and entry.get(self._label) is not None:
            self.scheduler.step(entry[self._label])

    def state_dict(self) -> dict[str, Any]:
        return self.scheduler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scheduler.load_state_dict(dict(state))


class Averaging(Callback):
    """Gives back a moving average of the released parameters, at no cost; held-out data is measured on it."""

    def __init__(self, decay: float = 0.9999) -> None:
        self.decay = number("decay", decay, least=0.0, most=math.nextafter(1.0, 0.0))
        self.average: Average | None = None

    def begin(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path | None, held_out: "HeldOut | None"
    ) -> None:
        self.average = Average(model, self.decay)

    def after_step(self, step: int, *, epoch_ended: bool) -> None:
        assert self.average is not None
        self.average.update()

    def state_dict(self) -> dict[str, Any]:
        return {} if self.average is None else self.average.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert self.average is not None
        self.average.load_state_dict(dict(state))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model with the average inside."""
        assert self.average is not None
        with self.average.applied():
            yield


class TensorBoard(Callback):
    """Event files in FOLDER/tensorboard: epsilon, learning rate, and what is measured on held-out data."""

    def __init__(self) -> None:
        self._writer: Any = None
        self._began = time.time() // 60 * 60  # one time for all entries: how long an epoch took is not ours to tell

    def begin(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path | None, held_out: "HeldOut | None"
    ) -> None:
        if folder is None:
            raise ValueError("tensorboard needs a folder to write into: give Run(FOLDER) (--out FOLDER)")
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ValueError("tensorboard is not installed: pip install tensorboard, or leave it out") from None
        self._folder, self._new = folder / "tensorboard", SummaryWriter

    def measured(self, entry: Mapping[str, Any]) -> None:
        if self._writer is None:
            owned.make_folder(self._folder)
            self._writer = self._new(str(self._folder))
        for name, value in entry.items():
            if name not in ("step", "epoch") and isinstance(value, int | float):
                self._writer.add_scalar(name, value, entry["step"], walltime=self._began)

    def end(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
