"""A run's folder: held by one run, its checkpoint, its trained model, and what is put back when it is resumed."""

import errno
import io
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hush.ledger import LedgerError, checkpoints, owned
from hush.ledger.checkpoints import Checkpoint, CheckpointError
from hush.ledger.plain import plain
from hush.plan import Plan
from hush.training.callbacks import Callback
from hush.training.choosing import Judge
from hush.training.evaluation import HeldOut
from hush.training.run import Run
from hush.training.warnings import PrivacyWarning

CHECKPOINT, MODEL = "checkpoint", "model.pt"
_WRITTEN = (MODEL, "report.html", "report.json", "report.txt")
_TRACES = (*_WRITTEN, "ledger.hush")


@contextmanager
def held(folder: Path | None) -> Iterator[None]:
    """The folder for one run alone, from before its first charge to its end; without a folder nothing."""
    with ExitStack() as stack:
        try:
            if folder is not None:
                stack.enter_context(owned.held(folder))
                _must_take_a_checkpoint(folder / CHECKPOINT)
        except OSError as error:
            why = error.strerror or str(error)
            raise ValueError(
                f"expected a folder that can be written; came {folder}: {why}; choose another out (--out)"
            ) from None
        yield


@contextmanager
def only_warned(what: str) -> Iterator[None]:
    """What cannot be written at the end is said beside the result, which exists and was paid for."""
    try:
        yield
    except (OSError, ValueError, LedgerError, CheckpointError) as error:
        why = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) and error.strerror else str(error)
        warnings.warn(f"{what}: {plain(why)}", PrivacyWarning, stacklevel=6)


def find_saved(folder: Path | None, *, resume: bool) -> Checkpoint | None:
    """The checkpoint to go on from; None for a new run. An unfinished run is never overwritten."""
    if folder is None:
        if resume:
            raise ValueError("resume needs the folder of the run: give Run(FOLDER, resume=True) (--out FOLDER)")
        return None
    if not checkpoints.exists(folder / CHECKPOINT):
        if resume:
            _say_what_is_lost(folder)
        else:
            _must_overwrite_nothing(folder)
        return None
    saved = checkpoints.load(folder / CHECKPOINT)
    if resume:
        return saved
    if saved.facts.get("ended") is None:
        raise ValueError(
            f"{folder} holds a run that has not ended: go on with Run(..., resume=True) (--resume), or choose another "
            "folder"
        )
    return None


def check_same_run(saved: Checkpoint, plan: Plan, run: Run, held_out: HeldOut | None) -> Plan:
    """The plan of the saved run, if what is asked for now is the same run with the same declarations."""
    then, facts = Plan.from_dict(saved.facts["run"]["plan"]), saved.facts
    ended_early = "held_out" not in facts  # a run that was cut off in its preprocessing
    wanted = {
        "examples": (plan.lots.examples, then.lots.examples),
        "lots": (plan.lots, then.lots),
        "steps": (plan.steps, then.steps),
        "clip": (plan.clip, then.clip),
        "budget": (plan.budget, then.budget),
        "reserve": (plan.reserve, then.reserve),
        "accountant": (plan.accountant, then.accountant),
        "noise": ((plan.noise, plan.noise_multiplier), (then.noise, then.noise_multiplier)),
        "preprocessing": (plan.preprocessing, then.preprocessing),
    }
    if not ended_early:
        declared = None if held_out is None else held_out.to_dict()
        wanted |= {
            "seed": (run.seed, facts["seed"]),
            "held-out data": (declared, facts["held_out"]),
            "about": (run.about.to_dict(), facts["about"]),
        }
    for name, (now, before) in wanted.items():
        if now != before:
            raise ValueError(
                f"the saved run has {name} {before}, and now it is {now}: resume with what it began with, whose words "
                "stay in its statement"
            )
    return replace(then, access=plan.access)


def pack(
    model: nn.Module, optimizer: torch.optim.Optimizer, callbacks: Sequence[Callback], judge: Judge
) -> dict[str, Any]:
    """Everything that moves in training, as tensors and plain values."""
    state: dict[str, Any] = {"model": tensors_of(model), "optimizer": optimizer.state_dict()}
    state["callbacks"] = [{"kind": type(one).__name__, "state": one.state_dict()} for one in callbacks]
    if judge.best is not None:
        state["best"] = judge.best
    return state


def unpack(
    state: Mapping[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    callbacks: Sequence[Callback],
    judge: Judge,
) -> None:
    """Put a packed state back."""
    then, now = [one["kind"] for one in state["callbacks"]], [type(one).__name__ for one in callbacks]
    if then != now:
        raise ValueError(f"the saved run has the callbacks {then}, and now they are {now}: resume with the same")
    model.load_state_dict(state["model"], strict=False)
    optimizer.load_state_dict(state["optimizer"])
    for callback, saved in zip(callbacks, state["callbacks"], strict=True):
        callback.load_state_dict(saved["state"])
    judge.best = state.get("best")


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers that are kept, and nothing else: extra state of a module may hold what it saw."""
    extra = torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX
    return {name: value for name, value in model.state_dict().items() if name.rpartition(".")[2] != extra}


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """Torch's own generators (dropout, augmentation), kept in seeded runs so that they go on bit for bit."""
    state = {"cpu": torch.get_rng_state()}
    return state | {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else state


def set_random_state(state: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Put `random_state` back."""
    torch.set_rng_state(state["cpu"].cpu())
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)


def write_model(folder: Path, model: nn.Module) -> Path:
    """The trained parameters as FOLDER/model.pt, whole or not at all; read with torch.load(weights_only=True)."""
    buffer = io.BytesIO()
    torch.save(tensors_of(model), buffer)
    owned.write_whole(folder / MODEL, buffer.getbuffer())
    return folder / MODEL


def _must_take_a_checkpoint(place: Path) -> None:
    """An OSError where none could be written, which would else come after the first charge."""
    if place.is_symlink() or place.exists():
        os.close(os.open(place, os.O_RDONLY | os.O_DIRECTORY))
        if not os.access(place, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "its checkpoint folder cannot be written", str(place))


def _must_overwrite_nothing(folder: Path) -> None:
    """Files of these names that no checkpoint of a run lies beside are somebody else's."""
    taken = [name for name in _WRITTEN if (folder / name).is_file()]
    if taken:
        raise ValueError(
            f"expected a folder of its own for the run; came {folder}, which holds {', '.join(taken)} and no "
            "checkpoint, and the run would write over that; choose another folder"
        )


def _say_what_is_lost(folder: Path) -> None:
    """A resumed run without a checkpoint begins, and is charged, anew: never where one has been, never in silence."""
    traces = [name for name in _TRACES if (folder / name).exists()]
    if (folder / CHECKPOINT).is_dir() and any((folder / CHECKPOINT).iterdir()):
        traces.append(CHECKPOINT)
    if traces:
        raise ValueError(
            f"expected a checkpoint in {folder} to resume from; came none beside {', '.join(traces)} of an earlier "
            "run; put the checkpoint back, or begin anew in another folder: what was spent stays spent"
        )
    warnings.warn(f"no run in {folder} to resume: a new one begins, and is charged", PrivacyWarning, stacklevel=4)
