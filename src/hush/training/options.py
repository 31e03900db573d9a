"""What is trained, and how its run is conducted, as values: `fit` and `hush train` both put these two together."""

import copy
import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hush.accounting import ACCOUNTANTS, NOT_VALID, Accountant, Budget, Event
from hush.clipping.clips import Clip
from hush.ledger import Ledger
from hush.sampling.loader import Collate
from hush.training.compiling import Compile
from hush.training.evaluation import HeldOut
from hush.training.ranges import number, one_of, text, whole

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
    public_buffers: Sequence[str] = ()
    fingerprint_of: Any = None
    data_name: str = "the training set"
    settings_from: str = ""

    def __post_init__(self) -> None:
        for name, least in (("lot_size", 1), ("steps", 1), ("batch_size", 1), ("workers", 0)):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, whole(name, value, least=least))
        if self.steps is None:
            number("epochs", self.epochs, least=1e-9, most=1e9)
        number("average", self.average, least=0.0, most=math.nextafter(1.0, 0.0))
        one_of("scheduler_every", self.scheduler_every, ("step", "epoch"))
        text("data_name", self.data_name, least=1)
        text("settings_from", self.settings_from)
        if not isinstance(self.model, nn.Module):
            raise TypeError(f"expected a torch.nn.Module as the model, got {type(self.model).__name__}")
        if isinstance(self.public_buffers, str):
            raise TypeError(f"public_buffers are several patterns: write ({self.public_buffers!r},)")
        object.__setattr__(self, "public_buffers", tuple(self.public_buffers))
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
    create_ledger: bool = False
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
        if self.noise_multiplier is not None:
            number("noise_multiplier", self.noise_multiplier, least=0.01, most=1e6)
        object.__setattr__(self, "reserve", whole("reserve", self.reserve, least=0))
        if self.checkpoint_every is not None:
            object.__setattr__(self, "checkpoint_every", whole("checkpoint_every", self.checkpoint_every, least=1))
        if self.seed is not None:
            object.__setattr__(self, "seed", whole("seed", self.seed, least=0, most=2**63 - 1))
        one_of("sampling", self.sampling, ("poisson", "allocated", "shuffled"))
        one_of("accountant", self.accountant, tuple(name for name in ACCOUNTANTS if name not in NOT_VALID))
        one_of("noise", self.noise, ("gaussian", "discrete"))
        one_of("compile", self.compile, (True, False, "auto"))
        one_of("padded", self.padded, (True, False, None))
        for name in ("out", "ledger"):
            if isinstance(value := getattr(self, name), str | PathLike):
                object.__setattr__(self, name, a_path(name, value))


def a_path(name: str, value: str | PathLike[str]) -> Path:
    """The path; refused where it names nothing."""
    path = os.fspath(value)
    if not path or "\0" in path:
        raise ValueError(f"{name} must be a path, got {path!r}")
    return Path(path)


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
