"""Noise: a BoundedSum and a noise multiplier become the released gradient. The only Gaussian noise in the house."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hush import kernels
from hush.clipping.bounded_sum import BoundedSum
from hush.randomness.gaussian_samples import Floats, Normals

_LEAST = 1e-30  # of a deviation in float32: normal numbers, and their products with what is drawn


class Part(NamedTuple):
    """One tensor's share of a release: out = (total + deviation * normal numbers) * scale."""

    total: Tensor
    deviation: float
    out: Tensor


def add_noise(
    total: BoundedSum,
    *,
    noise_multiplier: float,
    normals: Normals,
    step: int | None = None,
    scale: float = 1.0,
    out: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Release a bounded sum: (total + noise) * scale, the noise's scale read from the sum's own bounds.

    Guarantee: with m groups, the tensors of group l get independent Gaussian noise of standard deviation
    noise_multiplier * sqrt(m) * bound_l, so that the release is the event Gaussian(noise_multiplier) under zero-out.
    The noise is that of `step`, of the next one where none is given, and is never drawn again.
    Noise is computed and added in float32; sums in half precision come back as float32. A float64 sum comes back in
    float64, rounded to float32: below the last bit of the noise its own bits would stay bare. `out` gives tensors to
    write into, in their own dtype. A noise multiplier of 0 adds nothing: NOT PRIVATE.

    >>> from hush.clipping.bounded_sum import Group
    >>> from hush.randomness.streams import Key
    >>> total = BoundedSum({"w": torch.zeros(2)}, (Group(("w",), bound=1.0),))
    >>> add_noise(total, noise_multiplier=2.0, normals=Normals(Key.from_seed(0)), step=0)["w"].shape
    torch.Size([2])
    """
    check_release(total, noise_multiplier, scale, out)
    deviations = standard_deviations(total, noise_multiplier)
    _refuse_lost_noise(deviations)
    for tensor in total.tensors.values():
        refuse_capture(tensor.device)
    claim = normals.begin(step)
    released: dict[str, Tensor] = {}
    devices = {tensor.device: None for tensor in total.tensors.values()}
    for number, device in enumerate(devices):
        names = [name for name, tensor in total.tensors.items() if tensor.device == device]
        parts = [
            Part(
                total.tensors[name],
                deviations[name],
                place_for(total.tensors[name], None if out is None else out[name]),
            )
            for name in names
        ]
        if noise_multiplier == 0:
            for part in parts:
                part.out.copy_(part.total.to(torch.promote_types(part.total.dtype, torch.float32)) * scale)
        elif device.type == "cuda" and kernels.available():
            kernels.release(parts, scale=scale, subkey=claim.subkey(number), step=claim.step)
        else:
            _release(parts, scale, normals.on_cpu(claim, sum(part.total.numel() for part in parts), number))
        released.update((name, part.out) for name, part in zip(names, parts, strict=True))
    return {name: released[name] for name in total.tensors}


def standard_deviations(total: BoundedSum, noise_multiplier: float) -> dict[str, float]:
    """The noise's standard deviation for each tensor: noise_multiplier * sqrt(number of groups) * the group's bound."""
    if noise_multiplier == 0:
        return dict.fromkeys(total.tensors, 0.0)
    factor = noise_multiplier * math.sqrt(len(total.groups))
    return {name: factor * group.bound for group in total.groups for name in group.names}


def check_release(
    total: BoundedSum, noise_multiplier: float, scale: float, out: Mapping[str, Tensor] | None = None
) -> None:
    """Refuse what cannot be released with a guarantee."""
    if not (noise_multiplier >= 0 and math.isfinite(noise_multiplier)):
        raise ValueError(f"noise_multiplier must be a finite number >= 0, got {noise_multiplier!r}")
    if not math.isfinite(scale):
        raise ValueError(f"scale must be a finite number, got {scale!r}")
    names = [name for group in total.groups for name in group.names]
    if sorted(names) != sorted(total.tensors):
        raise ValueError(
            f"every tensor must belong to exactly one group, got tensors {sorted(total.tensors)} and groups {names}"
        )
    if out is not None and set(out) != set(names):
        raise ValueError(f"out must name the tensors of the sum, {sorted(names)}; got {sorted(out)}")
    for name, tensor in total.tensors.items():
        if not tensor.is_floating_point() or tensor.layout != torch.strided:
            raise TypeError(f"{name}: noise is added to dense floating point sums, got {tensor.dtype}, {tensor.layout}")
    for group in total.groups:
        if noise_multiplier > 0 and not (group.bound >= 0 and math.isfinite(group.bound)):
            raise ValueError(f"a bound must be a finite number >= 0, got {group.bound!r} for {', '.join(group.names)}")


def _refuse_lost_noise(deviations: Mapping[str, float]) -> None:
    """Refuse noise that float32 would make zero, or infinite, while a wider sum keeps its numbers."""
    for name, deviation in deviations.items():
        if not _LEAST <= deviation <= 1 / _LEAST and deviation > 0:
            raise ValueError(
                f"{name}: noise of deviation {deviation:.3g} does not fit float32, expected {_LEAST:.0e} to "
                f"{1 / _LEAST:.0e}: use another clipping bound"
            )


def refuse_capture(device: torch.device) -> None:
    """Refuse to be recorded in a CUDA graph, whose replays would all add the same noise."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a captured CUDA graph would add the same noise at every replay; release outside the graph")


def place_for(total: Tensor, out: Tensor | None) -> Tensor:
    """Where a tensor's release is written: the given tensor, or a new one in float32 or wider."""
    if out is None:
        return torch.empty_like(total, dtype=torch.promote_types(total.dtype, torch.float32))
    if out.shape != total.shape or out.device != total.device:
        raise ValueError(
            f"out must have the sum's shape and device, {tuple(total.shape)} on {total.device}; "
            f"got {tuple(out.shape)} on {out.device}"
        )
    return out


def _release(parts: Sequence[Part], scale: float, numbers: Floats) -> None:
    noise = torch.from_numpy(numbers).to(parts[0].total.device)
    noises = noise.split([part.total.numel() for part in parts])
    # Sum and noise meet in float32 before anything else rounds: what the noise leaves bare of a wider sum is cut off,
    # and scaling is post-processing. The deviation is a float32 number for every sum: a lot of one batch has a sum in
    # float32, one of several in float64, and their noise must not tell.
    for part, own in zip(parts, noises, strict=True):
        noised, deviation = own.view(part.total.shape), torch.tensor(part.deviation, dtype=torch.float32).item()
        torch.add(part.total, noised, alpha=deviation, out=noised)
        torch.mul(noised, scale, out=part.out)
