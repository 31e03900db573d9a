"""A run's folder: held by one run, its checkpoint, its trained model, and what is put back when it is resumed."""

import io
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hush.ledger import LedgerError, checkpoints, owned
from hush.ledger.checkpoints import Checkpoint, CheckpointError
from hush.ledger.plain import plain
from hush.plan import Plan, clip_to_dict
from hush.training.choosing import Judge
from hush.training.options import Conduct, Job
from hush.training.planning import PrivacyWarning

CHECKPOINT, MODEL = "checkpoint", "model.pt"
_TRACES = (MODEL, "report.html", "report.json", "report.txt", "ledger.hush")


@contextmanager
def held(folder: Path | None) -> Iterator[None]:
    """The folder for one run alone, from before its first charge to its end; without a folder nothing."""
    with ExitStack() as stack:
        try:
            if folder is not None:
                stack.enter_context(owned.held(folder))
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
            raise ValueError("resume needs the folder of the run: give out=FOLDER (--out FOLDER)")
        return None
    if not checkpoints.exists(folder / CHECKPOINT):
        if resume:
            _say_what_is_lost(folder)
        return None
    saved = checkpoints.load(folder / CHECKPOINT)
    if resume:
        return saved
    if saved.facts.get("ended") is None:
        raise ValueError(
            f"{folder} holds a run that has not ended: go on with resume=True (--resume), or choose another folder"
        )
    return None


def check_same_run(saved: Checkpoint, job: Job, conduct: Conduct, examples: int) -> Plan:
    """The plan of the saved run, if what is asked for now is the same run."""
    plan = Plan.from_dict(saved.facts["run"]["plan"])
    wanted = {
        "examples": (examples, plan.lots.examples),
        "lot size": (job.lot_size, plan.lots.expected_size),
        "clip": (clip_to_dict(job.clip), clip_to_dict(plan.clip)) if not callable(_bound(job)) else (0, 0),
        "budget": (conduct.budget, plan.budget),
        "noise kind": (conduct.noise, saved.facts["noise"]),
        "seed": (conduct.seed, saved.facts["seed"]),
        "upfront access": (job.upfront is not None, saved.facts["upfront"]["name"] is not None),
    }
    for name, (now, then) in wanted.items():
        if now != then:
            raise ValueError(f"the saved run has {name} {then}, and now it is {now}: resume with what it began with")
    return plan


def pack(job: Job, judge: Judge) -> dict[str, Any]:
    """Everything that moves in training, as tensors and plain values."""
    state: dict[str, Any] = {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()}
    if job.scheduler is not None:
        state["scheduler"] = job.scheduler.state_dict()
    if judge.average is not None:
        state["average"] = judge.average.state_dict()
    if judge.best is not None:
        state["best"] = judge.best
    return state


def unpack(state: Mapping[str, Any], job: Job, judge: Judge) -> None:
    """Put a packed state back."""
    if ("scheduler" in state) != (job.scheduler is not None) or ("average" in state) != (judge.average is not None):
        raise ValueError("the saved run has another scheduler or averaging: resume with what it began with")
    job.model.load_state_dict(state["model"])
    job.optimizer.load_state_dict(state["optimizer"])
    if job.scheduler is not None:
        job.scheduler.load_state_dict(state["scheduler"])
    if judge.average is not None:
        judge.average.load_state_dict(state["average"])
    judge.best = state.get("best")


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
    torch.save(model.state_dict(), buffer)
    owned.write_whole(folder / MODEL, buffer.getbuffer())
    return folder / MODEL


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


def _bound(job: Job) -> object:
    return getattr(job.clip, "bound", getattr(job.clip, "bounds", None))
