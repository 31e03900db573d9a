"""What is true about a training beside the facts of its `Private`: for its checkpoints and its report."""

import time
from typing import TYPE_CHECKING, Any

import torch

from hush.report.facts import facts_of, finite, rounded_time
from hush.training.callbacks import Scheduler

if TYPE_CHECKING:
    from hush.training.trainer import Trainer


def facts_of_training(training: "Trainer") -> dict[str, Any]:
    """The facts of a training as it stands; settles its account."""
    access, callbacks = training.plan.access, training.run.callbacks
    preprocessing = {"name": None if access is None else access.name, "state": training.preprocessing}
    account = training.charged.to_dict()
    if training.private is None:
        standing = {"plan": training.plan.to_dict(), "step": 0}
        return {"run": standing, "account": account, "ended": None, "preprocessing": preprocessing}
    schedulers = [type(one.scheduler).__name__ for one in callbacks if isinstance(one, Scheduler)]
    others = [type(one).__name__ for one in callbacks if type(one).__module__.split(".")[0] != "hush"]
    of_private = facts_of(training.private, training.run.about)
    return of_private | {
        "account": training.charged.to_dict(),
        "preprocessing": preprocessing,
        "held_out": None if training.held_out is None else training.held_out.to_dict(),
        "history": finite(training.history),
        "chosen": finite(training.judge.chosen_entry(training.history)),
        "since_best": training.judge.since_best,
        "ended": training.ended,
        "seconds": rounded_time(training.earlier_seconds + time.monotonic() - training.began),
        "resumed": training.resumed,
        "optimizer": _named(training.optimizer),
        "scheduler": ", ".join(schedulers) or None,
        "average": 0.0 if training.averaging is None else training.averaging.decay,
        "callbacks": others,
        "batch_size": training.batch_size,
        "unsafe_diagnostics": training.shown,
        "notes": [*training.notes, *(note for note in of_private["notes"] if note not in training.notes)],
    }


def _named(optimizer: torch.optim.Optimizer) -> str:
    group = optimizer.defaults
    known = [f"{name}={group[name]:g}" for name in ("lr", "momentum", "weight_decay") if group.get(name)]
    return f"{type(optimizer).__name__}({', '.join(known)})"
