"""Triton kernels for CUDA tensors. Triton is imported only when one of them runs."""

import functools
import importlib.util
from collections.abc import Sequence

from torch import Tensor


@functools.cache
def available() -> bool:
    """Whether Triton is installed, so that noise for CUDA tensors can be made on the GPU."""
    return importlib.util.find_spec("triton") is not None


def release(parts: Sequence[tuple[Tensor, float, Tensor]], *, scale: float, subkey: bytes, step: int) -> None:
    """Write (total + deviation * normal numbers) * scale into out, for parts (total, deviation, out) on one GPU."""
    from hush.kernels.gaussian import release as release_on_gpu

    release_on_gpu(parts, scale=scale, subkey=subkey, step=step)
