"""Run: where a training lives on disk, and what it shows."""

import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from os import PathLike
from pathlib import Path

from hush.ledger import Ledger
from hush.report import About
from hush.training.callbacks import Callback
from hush.training.ranges import whole


@dataclass(frozen=True)
class Run:
    """How a call of `fit` is conducted.

    `folder` gets checkpoints every `checkpoint_every` steps (by default an epoch), the trained model and the report;
    without it nothing is kept. With `resume` a run goes on from its last checkpoint; steps since then stay spent and
    are done again out of the plan's reserve, or the run ends short and says so. `ledger` is the account of the dataset
    over all its runs, made if it is not there only with `create_ledger`; without one a run with a folder keeps its own.
    `about` is what you state in the report. `seed`
    makes the run reproducible and NOT PRIVATE. Schedulers, averages and TensorBoard are `callbacks`. Numbers from
    training data are private: only `unsafe_diagnostics` shows them, and the report then says so for good.

    >>> Run("runs/mine").path.name
    'mine'
    """

    folder: str | PathLike[str] | None = None
    _: KW_ONLY
    about: About = field(default_factory=About)
    ledger: str | PathLike[str] | Ledger | None = None
    create_ledger: bool = False
    resume: bool = False
    checkpoint_every: int | None = None
    seed: int | None = None
    progress: bool = True
    callbacks: Sequence[Callback] = ()
    unsafe_diagnostics: bool = False

    def __post_init__(self) -> None:
        for name in ("folder", "ledger"):
            if isinstance(value := getattr(self, name), str | PathLike):
                object.__setattr__(self, name, _a_path(name, value))
        if self.checkpoint_every is not None:
            object.__setattr__(self, "checkpoint_every", whole("checkpoint_every", self.checkpoint_every, least=1))
        if self.seed is not None:
            object.__setattr__(self, "seed", whole("seed", self.seed, least=0, most=2**63 - 1))
        if not isinstance(self.about, About):
            raise TypeError(f"expected about=hush.About(...), got {type(self.about).__name__}")
        for callback in self.callbacks:
            if not isinstance(callback, Callback):
                raise TypeError(
                    f"expected callbacks of hush.Callback, got {type(callback).__name__}; a scheduler of torch goes "
                    "into hush.Scheduler(...)"
                )

    @property
    def path(self) -> Path | None:
        """The folder as a path."""
        return None if self.folder is None else Path(self.folder)


def _a_path(name: str, value: str | PathLike[str]) -> Path:
    """The path from the root, whatever becomes of the working directory; refused where it names nothing."""
    path = os.fspath(value)
    if not path or "\0" in path:
        raise ValueError(f"{name} must be a path, got {path!r}")
    return Path(path).absolute()
