"""A run's folder: its checkpoint, its trained model, and what is put back when it is resumed."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hush.ledger import checkpoints
from hush.ledger.checkpoints import Checkpoint
from hush.plan import Plan, clip_to_dict
from hush.training.choosing import Judge
from hush.training.options import Conduct, Job

CHECKPOINT, MODEL = "checkpoint", "model.pt"


def find_saved(folder: Path | None, *, resume: bool) -> Checkpoint | None:
    """The checkpoint to go on from; None for a new run. An unfinished run is never overwritten."""
    if folder is None:
        if resume:
            raise ValueError("resume needs the folder of the run: give out=FOLDER (--out FOLDER)")
        return None
    if not checkpoints.exists(folder / CHECKPOINT):
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
    path, partial = folder / MODEL, folder / (MODEL + ".part")
    torch.save(model.state_dict(), partial)
    os.replace(partial, path)
    return path


def _bound(job: Job) -> object:
    return getattr(job.clip, "bound", getattr(job.clip, "bounds", None))
