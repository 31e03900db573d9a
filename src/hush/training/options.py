"""What is trained, and how its run is conducted, as values: `fit` and `hush train` both put these two together."""

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from os import PathLike
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hush.accounting import Accountant, Budget, Event
from hush.clipping.clips import Clip
from hush.ledger import Ledger
from hush.sampling.loader import Collate
from hush.training.compiling import Compile
from hush.training.evaluation import HeldOut

Sampling = Literal["poisson", "allocated", "shuffled"]


@dataclass(frozen=True, kw_only=True)
class Upfront:
    """An access to the data before training, such as DP-PCA: it is charged with the account and only then done.

    `run()` does it and returns the event that it was, which must be the declared one. It may fill buffers of the
    model; they travel in checkpoints, so a resumed run does not do it again.
    """

    name: str
    event: Event
    run: Callable[[], Event]


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything a private training needs but the budget; what a function named to `hush train` returns.

    `loss` is called as loss(model(inputs), targets) and gives one loss per example; a loss with a `reduction` (as
    torch's have) is asked for "none". For batches that are not (inputs, targets), `losses(model, *batch)` is called
    instead. `average` is the decay of a moving average of the parameters, 0 for none. `steps` counts lots and comes
    from `epochs` where it is left out. `fingerprint_of` is what a ledger knows the data by, the training set itself
    by default. `settings_from` says in the report how the settings were chosen.
    """

    model: nn.Module
    train_set: Any
    optimizer: torch.optim.Optimizer
    lot_size: int
    epochs: float
    clip: Clip
    loss: Callable[..., Tensor] | None = None
    losses: Callable[..., Tensor] | None = None
    steps: int | None = None
    batch_size: int | None = None
    held_out: HeldOut | None = None
    scheduler: Any = None
    scheduler_every: Literal["step", "epoch"] = "step"
    average: float = 0.0
    upfront: Upfront | None = None
    collate: Collate | None = None
    workers: int = 0
    public_buffers: tuple[str, ...] = ()
    fingerprint_of: Any = None
    data_name: str = "the training set"
    settings_from: str = ""

    def __post_init__(self) -> None:
        if self.batch_size is not None and self.batch_size < 1:
            raise ValueError(f"batch_size must be a whole number >= 1, or left out to be found, got {self.batch_size}")
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise TypeError(f"expected an optimizer made with the model's parameters, got {self.optimizer!r}")
        if self.held_out is not None and not isinstance(self.held_out, HeldOut):
            raise TypeError(f"expected held_out=hush.HeldOut(data=...), got {type(self.held_out).__name__}")

    def losses_of(self) -> Callable[..., Tensor]:
        """The losses of a batch as a function of the batch."""
        if (self.loss is None) == (self.losses is None):
            raise ValueError("give loss(outputs, targets) or losses(model, *batch), one of the two")
        model = self.model
        if self.losses is not None:
            return partial(self.losses, model)
        one_each = per_example(self.loss)

        def losses(*batch: Any) -> Tensor:
            if len(batch) != 2:
                raise ValueError(
                    f"loss(outputs, targets) needs batches of (inputs, targets), got {len(batch)} parts; give "
                    "losses(model, *batch) instead"
                )
            return one_each(model(batch[0]), batch[1])

        return losses


@dataclass(frozen=True, kw_only=True)
class Conduct:
    """How a run is conducted: its budget, its place on disk, its randomness, what it shows. See `fit`."""

    budget: Budget
    noise_multiplier: float | None = None
    sampling: Sampling = "poisson"
    reserve: int = 0
    accountant: Accountant = "pld"
    out: str | PathLike[str] | None = None
    resume: bool = False
    checkpoint_every: int | None = None
    ledger: str | PathLike[str] | Ledger | None = None
    device: str | torch.device | None = None
    padded: bool | None = None
    compile: Compile = "auto"
    noise: Literal["gaussian", "discrete"] = "gaussian"
    seed: int | None = None
    unsafe_diagnostics: bool = False
    tensorboard: bool = False
    progress: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.budget, Budget):
            raise TypeError(f"expected budget=hush.Budget(epsilon=..., delta=...), got {self.budget!r}")
        if self.compile not in (True, False, "auto"):
            raise ValueError(f"compile must be True, False or 'auto', got {self.compile!r}")


def per_example(loss: Any) -> Callable[..., Tensor]:
    """The loss with reduction "none", where it has a reduction to choose.

    >>> per_example(nn.functional.mse_loss)(torch.zeros(2), torch.ones(2))
    tensor([1., 1.])
    """
    if isinstance(loss, nn.Module) and hasattr(loss, "reduction"):
        own = copy.copy(loss)  # the caller's module is left as it is
        own.reduction = "none"  # type: ignore[assignment]
        return own
    try:
        names: Mapping[str, Any] = inspect.signature(loss).parameters
    except (TypeError, ValueError):
        names = {}
    if "reduction" in names and not (isinstance(loss, partial) and "reduction" in loss.keywords):
        return partial(loss, reduction="none")
    return loss
