"""What is true about a run, as plain values: a checkpoint keeps them, and the report is written from them alone."""

import math
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from hush.training.run import Run


def facts_of(run: "Run") -> dict[str, Any]:
    """The facts of a run as it stands; settles its account."""
    job, conduct, plan = run.job, run.conduct, run.plan
    standing = run.private.state_dict() if run.private is not None else {"plan": plan.to_dict(), "step": 0}
    trained = [p for p in job.model.parameters() if p.requires_grad]
    return {
        "run": standing,
        "accountant": conduct.accountant,
        "account": run.charged.to_dict(),
        "upfront": {"name": None if job.upfront is None else job.upfront.name, "state": run.upfront},
        "data": {"name": job.data_name, "examples": run.loader.examples},
        "held_out": None if job.held_out is None else job.held_out.to_dict(),
        "history": finite(run.history),
        "chosen": finite(run.judge.chosen_entry(run.history)),
        "since_best": run.judge.since_best,
        "ended": run.ended,
        "seconds": rounded_time(run.earlier_seconds + time.monotonic() - run.began),
        "resumed": run.resumed,
        "model": {"kind": type(job.model).__name__, "trained_parameters": sum(p.numel() for p in trained)},
        "optimizer": _optimizer(job.optimizer),
        "scheduler": None if job.scheduler is None else type(job.scheduler).__name__,
        "average": job.average,
        "batch_size": run.batch_size,
        "noise": conduct.noise,
        "distance": 0.0 if run.private is None else run.private.distance,
        "seed": conduct.seed,
        "unsafe_diagnostics": conduct.unsafe_diagnostics,
        "settings_from": job.settings_from,
        "notes": run.notes,
        "device": _device_name(run.device),
        "versions": versions(),
    }


def rounded_time(seconds: float) -> int:
    """Whole seconds, two digits, rounded up: how long a run took follows the sizes its lots really had.

    >>> rounded_time(0.10128913), rounded_time(61.2), rounded_time(12345.6)
    (1, 62, 13000)
    """
    unit = 10 ** max(0, len(str(int(seconds))) - 2)
    return max(1, math.ceil(seconds / unit)) * unit


def finite(value: Any) -> Any:
    """The same plain values with None for numbers that are not finite, which JSON does not know.

    >>> finite([{"loss": float("nan"), "step": 1}])
    [{'loss': None, 'step': 1}]
    """
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def versions() -> dict[str, str]:
    """What computed: the library, its neighbours, Python and the system."""
    found = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    for name in ("hush", "torch", "numpy", "scipy", "cryptography"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _optimizer(optimizer: torch.optim.Optimizer) -> str:
    group = optimizer.defaults
    known = [f"{name}={group[name]:g}" for name in ("lr", "momentum", "weight_decay") if group.get(name)]
    return f"{type(optimizer).__name__}({', '.join(known)})"


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
