"""DP-PCA (section 4 of the paper): rows to unit norm, Gaussian noise on A^T A, its top eigenvectors as a projection."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from hush.accounting.events import Event, Gaussian, PoissonSampled, parts_of
from hush.clipping.bounded_sum import BoundedSum, Group
from hush.noise.gaussian import add_noise
from hush.randomness.gaussian_samples import Normals
from hush.randomness.streams import Key

_BLOCK = 4096  # rows multiplied at a time
_UNIT = 2.0**-53  # rounding of float64
_MADE = WeakIdKeyDictionary()
"""Tensors that a projection made, for as long as they live: a run on one of them must have its event in the plan."""


class ProjectionLayer(nn.Module):
    """x [B, ...] -> x flattened times a fixed matrix [d, k]; a buffer, nothing in it is trained.

    It knows the event that finding the matrix was: a run that uses it must have that event in its plan.
    """

    def __init__(self, matrix: Tensor, *, event: Event | None = None, seeded: bool = False) -> None:
        super().__init__()
        self.register_buffer("matrix", matrix)
        self.matrix: Tensor
        self.event, self.seeded = event, seeded

    def take(self, projection: "Projection") -> None:
        """Hold these directions from now on."""
        self.matrix.copy_(projection.matrix)
        self.event, self.seeded = projection.event, projection.seeded

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ self.matrix.to(x.dtype)


@dataclass(frozen=True)
class Projection:
    """The directions found, as the columns of a [d, k] matrix, and the event that finding them was.

    `seeded` is true where the noise came from a fixed seed; such a projection is NOT PRIVATE.
    """

    matrix: Tensor
    event: Event
    seeded: bool

    def layer(self) -> ProjectionLayer:
        """A frozen first layer for a network, in float32."""
        return ProjectionLayer(self.matrix.float(), event=self.event, seeded=self.seeded)

    def __call__(self, x: Tensor) -> Tensor:
        """Project rows [N, ...] as they are (they are not scaled to unit norm)."""
        made = x.flatten(1) @ self.matrix.to(device=x.device, dtype=x.dtype)
        _MADE[made] = self
        return made


def projections_behind(model: nn.Module, arrays: Iterable[Tensor]) -> "list[ProjectionLayer | Projection]":
    """The projections that a model holds, or that made one of the arrays."""
    held: list[ProjectionLayer | Projection] = [
        m for m in model.modules() if isinstance(m, ProjectionLayer) and m.event
    ]
    return held + [_MADE[array] for array in arrays if array in _MADE]


def refuse_uncharged(used: "Iterable[ProjectionLayer | Projection]", preprocessing: Event) -> bool:
    """Refuse projections whose event is not part of what the plan has charged; whether one of them was seeded."""
    used = list(used)
    charged = [part for part, _ in parts_of(preprocessing)]
    for projection in used:
        for part, _ in parts_of(projection.event) if projection.event is not None else ():
            if part not in charged:
                raise ValueError(
                    f"the model or the data was made with a DP-PCA that the plan does not contain: {part}. Make the "
                    "plan with preprocessing=projection.event, so that one epsilon counts both"
                )
    return any(projection.seeded for projection in used)


def dp_pca(
    x: Tensor | Iterable[Tensor],
    *,
    dimensions: int,
    noise_multiplier: float,
    sample_rate: float = 1.0,
    key: Key | None = None,
) -> Projection:
    """The top eigenvectors of a noisy A^T A, where A holds the rows of x scaled to unit norm.

    Guarantee: `event` under zero-out. One row moves A^T A by at most 1 in Frobenius norm; all d^2 entries get
    independent noise of noise_multiplier times that bound, slack of rounding included, and the sum is then
    symmetrised, which is post-processing and halves the variance off the diagonal. A row of zeros, or one with a
    value that is not finite, contributes nothing.

    x is a tensor [N, ...] or yields such tensors one after another, so that the data need not fit in memory. With
    `sample_rate` below 1 every row takes part independently with that probability, and the event is the sampled one.
    The number of rows is taken to be public. `key` is for tests and experiments; without it the operating system's
    randomness is used. Every call has noise of its own, with the same key too.

    >>> rows = torch.eye(3)[[0, 0, 0, 1]].repeat(5_000, 1)
    >>> found = dp_pca(rows, dimensions=1, noise_multiplier=4.0)
    >>> found.event, int(found.matrix.abs().argmax())
    (Gaussian(noise_multiplier=4.0), 0)
    """
    if not 0 < sample_rate <= 1:
        raise ValueError(f"sample_rate must lie in (0, 1], got {sample_rate!r}")
    event: Event = Gaussian(noise_multiplier)  # refuses a noise multiplier that is not positive
    if sample_rate < 1:
        event = PoissonSampled(sample_rate, Gaussian(noise_multiplier))
    key = Key.from_os() if key is None else key.child("dp_pca")
    total = _second_moment(_sampled(_blocks(x), sample_rate, key))
    width = len(total.tensors["moment"])
    if not 1 <= dimensions <= width:
        raise ValueError(f"dimensions must lie in 1 .. {width}, the number of columns of x, got {dimensions!r}")
    noisy = add_noise(total, noise_multiplier=noise_multiplier, normals=Normals(key))["moment"]
    device = x.device if isinstance(x, Tensor) else noisy.device  # a GPU decomposes many times faster
    vectors = torch.linalg.eigh(((noisy + noisy.T) / 2).to(device)).eigenvectors.cpu()
    top = vectors[:, -dimensions:].flip(1)
    largest = top.gather(0, top.abs().argmax(0, keepdim=True))
    return Projection(top * largest.sign(), event, seeded=not key.private)


def _blocks(x: Tensor | Iterable[Tensor]) -> Iterator[Tensor]:
    """The rows, flattened, a few thousand at a time."""
    width: int | None = None
    for chunk in [x] if isinstance(x, Tensor) else x:
        if chunk.ndim < 2 or not (chunk.is_floating_point() or chunk.dtype == torch.uint8):
            raise ValueError(f"expected rows [N, d] of numbers, got {list(chunk.shape)} of {chunk.dtype}")
        rows = chunk.detach().flatten(1)
        if width is not None and rows.shape[1] != width:
            raise ValueError(f"every chunk has the same number of columns: expected {width}, got {rows.shape[1]}")
        width = rows.shape[1]
        yield from rows.split(_BLOCK)


def _sampled(blocks: Iterable[Tensor], rate: float, key: Key) -> Iterator[Tensor]:
    """Rows that were not drawn become zero, so that the number of rows stays what it is."""
    if rate == 1:
        yield from blocks
        return
    stream = key.stream("sample")
    threshold = math.floor(rate * 2.0**64)  # a row is drawn with probability at most the rate
    for rows in blocks:
        drawn = torch.from_numpy(stream.uint64(len(rows)) < threshold).to(rows.device)
        yield torch.where(drawn[:, None], rows, torch.zeros((), dtype=rows.dtype, device=rows.device))


def _second_moment(blocks: Iterable[Tensor]) -> BoundedSum:
    """A^T A of the rows scaled to unit norm, in float64, and how far one row can move what was computed."""
    total: Tensor | None = None
    rows = count = 0
    for block in blocks:
        unit = _unit_rows(block.to(torch.float64))
        product = unit.T @ unit
        total = product if total is None else total.add_(product)
        rows, count = rows + len(block), count + 1
    if total is None:
        raise ValueError("dp_pca needs at least one row, got none")
    # A sum of products in any order errs by at most (number of terms) * unit * sum of |terms|, and the sum over rows
    # of the Frobenius norms of |a| |a|^T is at most their number; both neighbours err. A scaled row may be longer
    # than 1 by the rounding of its own norm.
    scaling = (2 * len(total) + 32) * _UNIT
    summing = 2 * rows * (min(rows, _BLOCK) + count + 2) * _UNIT
    return BoundedSum({"moment": total.cpu()}, (Group(("moment",), bound=1 + scaling + 1.001 * summing),))


def _unit_rows(rows: Tensor) -> Tensor:
    """Rows divided by their norms; rows of zeros, and rows with a value that is not finite, become zero."""
    finite = rows.isfinite().all(1, keepdim=True)
    rows = torch.where(finite, rows, 0.0)
    largest = rows.abs().amax(1, keepdim=True)  # first, so that squares neither overflow nor vanish
    rows = torch.where(largest > 0, rows / largest, 0.0)
    norms = rows.square().sum(1, keepdim=True).sqrt()
    return torch.where(largest > 0, rows / norms, 0.0)
