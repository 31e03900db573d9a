"""Machine: where a run computes and how fast. Nothing here changes the law of what is released."""

from dataclasses import dataclass
from typing import Any, Literal

import torch

from hush.clipping.clips import Clip, QuantileClip


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Speed and memory.

    `device` is where `fit` puts model and data, by default where the model is; `Private` moves nothing but batches, so
    there it must be the model's. Physical batches of `batch_size` change nothing but memory; without it `fit` finds a
    size, and halves it where memory runs out. `compile` lets the compiler fuse captured steps; by default `fit` decides
    that by timing some batches (never in a seeded run, since timing is not reproducible). `engine="reference"` computes
    one example after another: independent by construction, and slow.

    >>> Machine(device="cpu", batch_size=64).batch_size
    64
    """

    device: str | torch.device | None = None
    batch_size: int | None = None
    compile: bool | Literal["auto"] = "auto"
    engine: Literal["fast", "reference"] = "fast"

    def __post_init__(self) -> None:
        size: Any = self.batch_size
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ValueError(f"batch_size must be a whole number >= 1, or left out to be found, got {size!r}")
        if self.compile not in (True, False, "auto"):
            raise ValueError(f"compile must be True, False or 'auto', got {self.compile!r}")
        if self.engine not in ("fast", "reference"):
            raise ValueError(f"engine must be 'fast' or 'reference', got {self.engine!r}")

    def captures(self, device: torch.device, first: Clip, last: Clip) -> bool:
        """Whether steps on this device are captured: a captured step has one bound, and fixed shapes."""
        if self.engine == "reference" or isinstance(first, QuantileClip):
            return False
        return can_capture(device) and first == last


def can_capture(device: torch.device) -> bool:
    """Whether work on the device can be recorded and replayed."""
    return device.type == "cuda"


def usable(device: str | torch.device) -> torch.device:
    """The device; refused where nothing can be put on it.

    >>> usable("cpu")
    device(type='cpu')
    """
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {str(device)!r} cannot be used: {str(error).splitlines()[0]}") from None
    return torch.device(device)
