"""Float-safe noise, opt-in: the sum is rounded to a fixed grid of integers, and exact integer noise is added there.

Ordinary Gaussian noise in floating point has gaps that depend on the sum it is added to, and those can reveal it
(Mironov 2012; Haney et al. 2022). Here the data meet the noise as integers, exactly; only the result becomes a float.

Sensitivity. With g the grid step, k = round(total / g) is a vector of integers. Rounding moves an entry by at most 1/2,
so two vectors of d entries that lie `bound` apart in L2 norm have roundings at most bound / g + sqrt(d) apart. The grid
is the largest power of two for which sqrt(d) is at most a thousandth of bound / g: the noise grows by at most 0.1 %,
and the grid depends on public numbers alone.

Which accountant. The noise is a real Gaussian rounded to integers: k + round(N) = round(k + N) for integers k. That is
post-processing of the Gaussian mechanism, so the event Gaussian(noise_multiplier) holds under every accountant and with
any sampling. (The discrete Gaussian of Canonne, Kamath and Steinke (2020) is another law, of which that is known for
Renyi divergences only.)
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hush import kernels
from hush.clipping.bounded_sum import BoundedSum, Group
from hush.noise.gaussian import check_release, place_for, refuse_capture
from hush.randomness.gaussian_samples import Normals
from hush.randomness.rounded_gaussian import DISTANCE, OnGrid, rounded_gaussian

ADDED_SENSITIVITY = 1e-3
_LARGEST = 2.0**51
_UP = 1 + 2.0**-40  # the few roundings of what is computed with it stay far below


@dataclass(frozen=True)
class Grid:
    """The grid of one group: its step, and the sensitivity of the integers on it.

    >>> grid = Grid.of(bound=1.0, entries=10_000)
    >>> grid.step == 2.0**-17, round(grid.sensitivity), f"{grid.added:.5f}"
    (True, 131172, '0.00076')
    """

    step: float
    sensitivity: float
    added: float

    @classmethod
    def of(cls, *, bound: float, entries: int) -> "Grid":
        """The grid for a group with this bound on this many entries; `added` is what rounding adds to the bound."""
        root = math.sqrt(entries) * _UP
        step = 2.0 ** math.floor(math.log2(ADDED_SENSITIVITY * bound / root))
        return cls(step, (bound / step + root) * _UP, root * step / bound)


def add_float_safe_noise(
    total: BoundedSum,
    *,
    noise_multiplier: float,
    normals: Normals,
    step: int | None = None,
    scale: float = 1.0,
    out: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Release a bounded sum on a fixed integer grid: what `add_noise` does, safe against the gaps of floating point.

    Guarantee: group l of m is released as g (k + noise) * scale, where k are its entries rounded to the group's grid
    and the noise is a Gaussian of noise_multiplier * sqrt(m) * (bound_l / g + sqrt(entries)) grid steps, rounded to
    integers: the release is the event Gaussian(noise_multiplier) under every accountant. The integers are exact;
    making floats of them reveals nothing more. Every bound must be positive, and so must the noise multiplier.

    >>> from hush.randomness.streams import Key
    >>> total = BoundedSum({"w": torch.zeros(3)}, (Group(("w",), bound=1.0),))
    >>> released = add_float_safe_noise(total, noise_multiplier=1.0, normals=Normals(Key.from_seed(0)), step=0)
    >>> bool((released["w"] / Grid.of(bound=1.0, entries=3).step % 1 == 0).all())
    True
    """
    check_release(total, noise_multiplier, scale, out)
    if noise_multiplier == 0:
        raise ValueError("noise_multiplier must be positive on a grid; use add_noise for a sum without noise")
    deviations = grid_deviations(total, noise_multiplier)
    for tensor in total.tensors.values():
        refuse_capture(tensor.device)
    claim = normals.begin(step)
    released = {name: place_for(tensor, None if out is None else out[name]) for name, tensor in total.tensors.items()}
    for number, device in enumerate({tensor.device: None for tensor in total.tensors.values()}):
        parts = [
            (tensor, deviations[name], released[name])
            for name, tensor in total.tensors.items()
            if tensor.device == device
        ]
        subkey = claim.subkey(number)
        on_gpu = device.type == "cuda" and kernels.available()
        if not (on_gpu and kernels.release_on_grids(parts, scale=scale, subkey=subkey, step=claim.step)):
            _release(parts, scale, subkey, claim.step)
    return released


def grid_deviations(total: BoundedSum, noise_multiplier: float) -> dict[str, OnGrid]:
    """The grid and the noise's deviation in its steps, for each tensor: what `standard_deviations` is for a float sum.

    >>> total = BoundedSum({"w": torch.zeros(100, 100)}, (Group(("w",), bound=1.0),))
    >>> grid_deviations(total, noise_multiplier=2.0)["w"].step == 2.0**-17
    True
    """
    factor = noise_multiplier * math.sqrt(len(total.groups)) * _UP
    answer = {}
    for group in total.groups:
        grid = _grid(group, total)
        answer.update(dict.fromkeys(group.names, OnGrid(grid.step, factor * grid.sensitivity)))
    return answer


def distance_over(numbers: int) -> float:
    """How far so many numbers together may lie from their exact law, in total variation, over a whole run.

    `hush.accounting.approximate_noise` says what this adds to delta; `Private`, `fit` and their statements count it.

    >>> from hush.accounting.approximate_noise import added_delta
    >>> numbers = 10**6 * 10**8  # a million steps of a model with 100 million parameters
    >>> f"{added_delta(distance_over(numbers), epsilon=8.0):.1e}"
    '5.7e-17'
    """
    return numbers * DISTANCE


def _release(
    parts: Sequence[tuple[Tensor, OnGrid, Tensor]],
    scale: float,
    subkey: bytes,
    step: int,
) -> None:
    first = 0
    for total, grid, out in parts:
        noise = torch.from_numpy(rounded_gaussian(subkey, step, sigma=grid.sigma, first=first, count=total.numel()))
        integers = _on_grid(total, grid.step) + noise.view(total.shape).to(total.device)
        out.copy_(integers.double() * (grid.step * scale))
        first += total.numel()


def _grid(group: Group, total: BoundedSum) -> Grid:
    entries = sum(total.tensors[name].numel() for name in group.names)
    if not group.bound > 0:
        raise ValueError(f"a grid needs a positive bound, got {group.bound!r} for {', '.join(group.names)}")
    return Grid.of(bound=group.bound, entries=max(entries, 1))


def _on_grid(tensor: Tensor, step: float) -> Tensor:
    """The entries as integers; dividing by a power of two is exact, and cutting at 2^51 moves no two further apart.

    What is cut fits an integer, and with the noise on it still a float64, exactly.
    """
    return (tensor.double() / step).nan_to_num(nan=0.0).clamp(-_LARGEST, _LARGEST).round().long()
