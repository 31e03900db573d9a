"""Norms of the kernel gradients of a convolution without the gradients.

With g the output gradient, |G|^2 = sum over pairs of outputs p, q of <g_p, g_q> <window_p, window_q>, and the products
of windows are the Gram matrix of the *pixels* (channels, not channels x taps, in the sum), added up along its diagonals
over the taps. Pixels lie in one line (`FlatGrid`), so that every tap is a shift of that line; the taps of a box are
added axis by axis and by doubling: eight additions for a 5 x 5 kernel instead of 24.
"""

import torch
from torch import Tensor

from hush.gradients.layers.convolution.geometry import FlatGrid, Geometry, Taps, flat_grid, phase_combinations
from hush.gradients.sums.per_example import TINY, wide

# Elements of one Gram matrix that are alive at a time: small enough for the cache of a CPU, large enough to share its
# cores; on a GPU a bound on memory. Measured, see benchmarks/NOTES.md.
_CHUNK = {"cpu": 1 << 19, "other": 1 << 26}


def ghost_norms(pixels: Tensor, gradient: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """[batch] squared norms, and [batch] (sum over outputs of |window| |gradient|)^2, to which rounding is relative.

    `pixels` is [batch, channels, *sizes], `gradient` [batch, outputs, *output sizes].
    """
    grid = flat_grid(geometry, pixels.shape[2:], gradient.shape[2:])
    limit = _CHUNK.get(pixels.device.type, _CHUNK["other"])
    size = max(1, limit // (geometry.groups * line_length(geometry, grid, pixels.shape[2]) ** 2))
    norms, masses = [], []
    for start in range(0, pixels.shape[0], size):
        x = wide(pixels[start : start + size]).unflatten(1, (geometry.groups, -1)).flatten(0, 1)
        g = wide(gradient[start : start + size]).unflatten(1, (geometry.groups, -1)).flatten(0, 1)
        windows = _window_products(x, geometry, grid)
        g = _line(g, grid, 0)[:, :, : grid.used]
        norm = (torch.bmm(g, windows) * g).sum(-1).sum(-1)
        # Where squares underflow, norms say nothing and the masses must: hence the small number on either side.
        of_windows, of_gradient = windows.diagonal(dim1=1, dim2=2).clamp(min=0) + TINY, g.square().sum(1) + TINY
        mass = (of_windows.sqrt() * of_gradient.sqrt()).sum(-1).square()
        norms.append(norm.unflatten(0, (-1, geometry.groups)).sum(1))
        masses.append(mass.unflatten(0, (-1, geometry.groups)).sum(1))
    return torch.cat(norms), torch.cat(masses)


def line_length(geometry: Geometry, grid: FlatGrid, leading: int) -> int:
    """The longest line of pixels of a phase: the side of the largest Gram matrix."""
    rows = -(-leading // geometry.stride[0])
    return max(_prefix(taps, grid) for taps in phase_combinations(geometry)) + rows * grid.strides[0]


def _prefix(taps: tuple[Taps, ...], grid: FlatGrid) -> int:
    """Zeros before the first pixel, so that no shift leaves the line."""
    return sum(max(0, -axis.first) * stride for axis, stride in zip(taps[1:], grid.strides[1:], strict=True))


def _line(values: Tensor, grid: FlatGrid, prefix: int) -> Tensor:
    """[n, channels, *sizes] -> [n, channels, line]: rows at their pitch, zeros between them."""
    count, channels, rows = values.shape[:3]
    line = values.new_zeros(count, channels, prefix + rows * grid.strides[0])
    places = line[:, :, prefix:].unflatten(2, (rows, *grid.pitches))
    places[(..., *(slice(size) for size in values.shape[2:]))].copy_(values)
    return line


def _window_products(pixels: Tensor, geometry: Geometry, grid: FlatGrid) -> Tensor:
    """[n, used, used]: the inner products of the windows of all pairs of outputs."""
    total: Tensor | None = None
    for taps in phase_combinations(geometry):
        products = _phase_products(pixels, geometry, grid, taps)
        total = products if total is None else total.add_(products)
    assert total is not None
    return total


def _phase_products(pixels: Tensor, geometry: Geometry, grid: FlatGrid, taps: tuple[Taps, ...]) -> Tensor:
    strides, prefix = grid.strides, _prefix(taps, grid)
    real = [
        slice(tap.residue, max(0, size + tap.last) * stride, stride)
        for tap, size, stride in zip(taps, grid.outputs, geometry.stride, strict=True)
    ]
    line = _line(pixels[(slice(None), slice(None), *real)], grid, prefix)
    products = _leading_taps(torch.bmm(line.transpose(1, 2), line), taps[0], grid, prefix)
    start = prefix + sum(axis.first * stride for axis, stride in zip(taps[1:], strides[1:], strict=True))
    products = products[:, start:, start:]
    for axis, stride in zip(taps[1:], strides[1:], strict=True):
        products = _box(products, axis.count, axis.step * stride)
    return products[:, : grid.used, : grid.used]


def _leading_taps(gram: Tensor, taps: Taps, grid: FlatGrid, prefix: int) -> Tensor:
    """Adds up the shifts of the leading axis: from pairs of pixel rows to pairs of output rows."""
    row, outputs = grid.strides[0], grid.outputs[0]
    rows = (gram.shape[1] - prefix) // row
    shifts = [taps.first + j * taps.step for j in range(taps.count)]
    cuts = [(max(0, -shift), min(outputs, rows - shift), shift) for shift in shifts]
    if len(cuts) == 1 and cuts[0] == (0, outputs, cuts[0][2]):
        return _rows(gram, cuts[0][2], outputs + cuts[0][2], row, prefix)
    full = next((cut for cut in cuts if cut[:2] == (0, outputs)), None)
    if full is None:
        side = prefix + outputs * row
        total = gram.new_zeros(len(gram), side, side)
    else:
        total = _rows(gram, full[2], outputs + full[2], row, prefix).clone()
    for cut in cuts:
        first, end, shift = cut
        if cut is not full and first < end:
            _rows(total, first, end, row, prefix).add_(_rows(gram, first + shift, end + shift, row, prefix))
    return total


def _rows(products: Tensor, first: int, end: int, row: int, prefix: int) -> Tensor:
    span = slice(first * row, prefix + end * row)
    return products[:, span, span]


def _box(products: Tensor, count: int, offset: int) -> Tensor:
    """The sum of `count` shifts along the diagonal, `offset` apart, by doubling."""
    side = products.shape[1] - (count - 1) * offset
    total: Tensor | None = None
    done, width, run = 0, 1, products
    while True:
        if count & width:
            piece = run[:, done * offset : done * offset + side, done * offset : done * offset + side]
            total = piece if total is None else total + piece
            done += width
        if done == count:
            return total  # type: ignore[return-value]
        shift = width * offset
        run = run[:, shift:, shift:] + run[:, :-shift, :-shift]
        width *= 2
