"""What is true about a run, as plain values: a checkpoint keeps them, and the report is written from them alone."""

import math
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from hush.report.about import About


def facts_of(private: Any, about: About | None = None) -> dict[str, Any]:
    """The facts of a `Private` as it stands, whoever wrote its loop; settles its account."""
    state, plan, about = private.state_dict(), private.plan, about or About()
    trained = [p for p in private.model.parameters() if p.requires_grad]
    account = state["account"] or {"name": None, "ledger": None, "seen": None}
    done = private.steps_done >= plan.steps
    return {
        "run": state,
        "account": account | {"own_ledger": False},
        "preprocessing": {"name": None if plan.access is None else plan.access.name, "state": "done"},
        "data": {"name": private.data_name, "examples": plan.lots.examples},
        "held_out": None,
        "history": [],
        "chosen": None,
        "since_best": 0,
        "ended": "finished" if done else None,
        "seconds": None,
        "resumed": 0,
        "model": {"kind": type(private.model).__name__, "trained_parameters": sum(p.numel() for p in trained)},
        "optimizer": None,
        "scheduler": None,
        "average": 0.0,
        "batch_size": None,
        "distance": private.distance,
        "seed": state["seed"],
        "seeded_parts": state["seeded_parts"],
        "unsafe_diagnostics": False,
        "about": about.to_dict(),
        "public_buffers": list(private.public_buffers),
        "notes": list(private.notes),
        "device": _device_name(next(private.model.parameters()).device),
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


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
