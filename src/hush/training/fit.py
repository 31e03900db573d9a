"""hush.fit: a model, data and a budget in; a trained model and a guarantee out."""

from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hush.accounting import Accountant, Budget
from hush.clipping.clips import Clip
from hush.ledger import Ledger
from hush.sampling.loader import Collate
from hush.training.compiling import Compile
from hush.training.evaluation import HeldOut
from hush.training.options import Conduct, Job, Sampling, Upfront
from hush.training.result import Result
from hush.training.run import train


def fit(
    model: nn.Module,
    train_set: Any,
    *,
    loss: Callable[..., Tensor] | None = None,
    losses: Callable[..., Tensor] | None = None,
    optimizer: torch.optim.Optimizer,
    budget: Budget,
    lot_size: int,
    epochs: float,
    clip: Clip,
    batch_size: int | None = None,
    noise_multiplier: float | None = None,
    sampling: Sampling = "poisson",
    upfront: Upfront | None = None,
    reserve: int = 0,
    accountant: Accountant = "pld",
    held_out: HeldOut | None = None,
    scheduler: Any = None,
    scheduler_every: Literal["step", "epoch"] = "step",
    average: float = 0.0,
    out: str | PathLike[str] | None = None,
    resume: bool = False,
    checkpoint_every: int | None = None,
    ledger: str | PathLike[str] | Ledger | None = None,
    fingerprint_of: Any = None,
    device: str | torch.device | None = None,
    padded: bool | None = None,
    compile: Compile = "auto",
    noise: Literal["gaussian", "discrete"] = "gaussian",
    seed: int | None = None,
    public_buffers: Sequence[str] = (),
    collate: Collate | None = None,
    workers: int = 0,
    data_name: str = "the training set",
    settings_from: str = "",
    unsafe_diagnostics: bool = False,
    tensorboard: bool = False,
    progress: bool = True,
) -> Result:
    """Train the model on the data by DP-SGD without ever spending more than the budget.

    Guarantee: everything that leaves the run (the model, its checkpoints, its history) is (epsilon, delta)-
    differentially private for the records of the training set, as `result.statement` says; it also says what is not
    covered. The noise is the least that fits `epochs` into the budget. With a `noise_multiplier` the run instead ends
    exactly where one step more would exceed the budget.

    Data: arrays, tensors, a map-style dataset, or a tuple or dict of arrays, never a DataLoader. `loss(outputs,
    targets)` gives one loss per example (torch's own losses are asked for reduction="none"); `losses(model, *batch)`
    serves batches of another form. Physical batches of `batch_size` change nothing but memory; without it a size is
    found, and halved where memory runs out. Batches are `padded` to one shape by default where the data is arrays or
    the device a GPU, on which forward and backward are then captured once and replayed; `compile` lets the compiler
    fuse them first, by default where some timed batches say that the run is long enough for that to pay (a seeded run
    is never compiled by itself, since timing is not reproducible). `upfront` is an access before training, charged
    before it is done.

    Measuring: `held_out` data is evaluated every epoch. Numbers from training data are private: only
    `unsafe_diagnostics` shows them, and the report then says so. `scheduler` is any scheduler of torch that reads no
    training metric.

    On disk: `out` is the run's folder: checkpoints every `checkpoint_every` steps (an epoch by default), the trained
    model, report.html, report.json, report.txt, and TensorBoard files if asked. With `resume` a run goes on from its
    last checkpoint; steps since then stay spent and are done again out of `reserve`, or the run ends short and says
    so. `ledger` is the account of the dataset over all its runs; without one a run with a folder keeps its own.

    `seed` makes the run reproducible and NOT PRIVATE. A delta of 1/N or more gives a PrivacyWarning.

    >>> from hush.clipping.clips import FlatClip
    >>> x, model = torch.randn(200, 3), nn.Linear(3, 2)
    >>> result = fit(model, (x, (x.sum(1) > 0).long()), loss=nn.functional.cross_entropy,
    ...              optimizer=torch.optim.SGD(model.parameters(), lr=0.1), budget=Budget(epsilon=2.0, delta=1e-4),
    ...              lot_size=20, epochs=2, clip=FlatClip(1.0), progress=False)
    >>> result.steps, result.epsilon.upper <= 2.0
    (20, True)
    """
    job = Job(
        model=model,
        train_set=train_set,
        optimizer=optimizer,
        lot_size=lot_size,
        epochs=epochs,
        clip=clip,
        loss=loss,
        losses=losses,
        batch_size=batch_size,
        held_out=held_out,
        scheduler=scheduler,
        scheduler_every=scheduler_every,
        average=average,
        upfront=upfront,
        collate=collate,
        workers=workers,
        public_buffers=public_buffers,
        fingerprint_of=fingerprint_of,
        data_name=data_name,
        settings_from=settings_from,
    )
    conduct = Conduct(
        budget=budget,
        noise_multiplier=noise_multiplier,
        sampling=sampling,
        reserve=reserve,
        accountant=accountant,
        out=out,
        resume=resume,
        checkpoint_every=checkpoint_every,
        ledger=ledger,
        device=device,
        padded=padded,
        compile=compile,
        noise=noise,
        seed=seed,
        unsafe_diagnostics=unsafe_diagnostics,
        tensorboard=tensorboard,
        progress=progress,
    )
    return train(job, conduct)
