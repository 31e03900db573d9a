"""Triton kernels for CUDA tensors. Triton is imported only when one of them runs."""

import functools
import importlib.util
from collections.abc import Sequence

from torch import Tensor

from hush.randomness.rounded_gaussian import OnGrid


@functools.cache
def available() -> bool:
    """Whether Triton is installed, so that noise for CUDA tensors can be made on the GPU."""
    return importlib.util.find_spec("triton") is not None


def release(parts: Sequence[tuple[Tensor, float, Tensor]], *, scale: float, subkey: bytes, step: int) -> None:
    """Write (total + deviation * normal numbers) * scale into out, for parts (total, deviation, out) on one GPU."""
    from hush.kernels.noise.gaussian import release as release_on_gpu

    release_on_gpu(parts, scale=scale, subkey=subkey, step=step)


def release_on_grids(parts: Sequence[tuple[Tensor, OnGrid, Tensor]], *, scale: float, subkey: bytes, step: int) -> bool:
    """Write (round(total / grid step) + integers) * grid step * scale into out; False if it cannot draw a deviation."""
    from hush.kernels.noise import rounded

    if not rounded.can_draw([part[1] for part in parts]):
        return False
    rounded.release(parts, scale=scale, subkey=subkey, step=step)
    return True
