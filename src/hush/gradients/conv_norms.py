"""Per-example gradients of convolution kernels, and their norms without the gradients.

Exact ways for any number of axes and any geometry:

- `kernel_gradients` forms the gradients: it lays out the windows that each tap reads (a strided view, then one copy)
  and multiplies them with the output gradient; or it asks PyTorch for one kernel gradient with as many groups as
  there are examples.
- `ghost_norms` never forms the gradient. With g the output gradient, |G|^2 = sum over pairs of outputs p, q of
  <g_p, g_q> <window_p, window_q>, and the products of windows are the Gram matrix of the *pixels* (channels, not
  channels x taps, in the sum), added up along its diagonals over the taps. The taps of a box are added axis by axis
  and by doubling, so a 5 x 5 kernel costs eight additions instead of 24.

Examples are taken in chunks whose working set stays in the cache (CPU) or bounds the extra memory (GPU).
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from hush.gradients.conv_geometry import FlatGrid, Geometry, Taps, flat_grid, phase_combinations
from hush.gradients.site import wide

# Elements of one Gram matrix, and of the windows, that are alive at a time. Measured, see benchmarks/NOTES.md.
_CHUNK = {"cpu": (1 << 19, 1 << 20), "other": (1 << 26, 1 << 26)}
# Below this many channels the windows are laid out; from it on, a grouped convolution is faster on a CPU.
_FEW_CHANNELS = 8


def _chunk(device: torch.device, ghost: bool, per_example: int) -> int:
    """How many examples to take at a time, given the elements that the working set of one has."""
    limits = _CHUNK.get(device.type, _CHUNK["other"])
    return max(1, limits[0 if ghost else 1] // per_example)


def kernel_gradients(pixels: Tensor, gradient: Tensor, geometry: Geometry) -> Tensor:
    """[batch, groups, channels * taps, outputs]: the gradient of each example, fp32 or wider, maybe a transposed view.

    `pixels` is [batch, T, channels, *sizes], `gradient` [batch, T, outputs, *output sizes]; the T rows add up.
    """
    outputs = tuple(gradient.shape[3:])
    fits = geometry.axes <= 3 and geometry.outputs(pixels.shape[3:]) == outputs
    if pixels.device.type == "cpu" and pixels.shape[2] >= _FEW_CHANNELS and fits:
        return _grouped_gradients(pixels, gradient, geometry)
    return torch.cat(list(_window_gradients(pixels, gradient, geometry)))


def kernel_norms(pixels: Tensor, gradient: Tensor, geometry: Geometry) -> Tensor:
    """[batch]: the squared norms of `kernel_gradients`, of which only a chunk exists at a time."""
    return torch.cat([squared_norms(part) for part in _window_gradients(pixels, gradient, geometry)])


def _grouped_gradients(pixels: Tensor, gradient: Tensor, geometry: Geometry) -> Tensor:
    batch, _, outputs = gradient.shape[:3]
    groups = batch * geometry.groups
    kernels = kernel_gradient(
        wide(pixels).transpose(0, 1).flatten(1, 2),
        wide(gradient).transpose(0, 1).flatten(1, 2),
        replace(geometry, weight_shape=(batch * outputs, *geometry.weight_shape[1:]), groups=groups),
    )
    return kernels.view(batch, geometry.groups, outputs // geometry.groups, -1).transpose(2, 3)


def kernel_gradient(pixels: Tensor, gradient: Tensor, geometry: Geometry) -> Tensor:
    """The ordinary kernel gradient of [rows, channels, *sizes] and [rows, outputs, *output sizes], summed over rows."""
    padding = list(geometry.padding)
    if geometry.outputs(pixels.shape[2:]) != tuple(gradient.shape[2:]):
        # A transposed convolution whose output padding exceeds its stride: some pixels are read by no tap.
        pixels, padding = geometry.padded(pixels, gradient.shape[2:]), [0] * geometry.axes
    kernel = pixels.new_empty(1).expand(geometry.weight_shape)  # only its shape is read
    total: Tensor = torch.ops.aten.convolution_backward(
        gradient,
        pixels,
        kernel,
        None,
        list(geometry.stride),
        padding,
        list(geometry.dilation),
        False,
        [0] * geometry.axes,
        geometry.groups,
        [False, True, False],
    )[1]
    return total


def _window_gradients(pixels: Tensor, gradient: Tensor, geometry: Geometry) -> Iterator[Tensor]:
    batch, rows, channels = pixels.shape[:3]
    outputs = tuple(gradient.shape[3:])
    groups, taps = geometry.groups, math.prod(geometry.kernel)
    positions = rows * math.prod(outputs)
    size = _chunk(pixels.device, False, channels * taps * positions)
    for start in range(0, batch, size):
        windows = _windows(geometry.padded(wide(pixels[start : start + size]), outputs), geometry, outputs)
        windows = windows.reshape(-1, channels // groups * taps, positions)
        part = wide(gradient[start : start + size]).unflatten(2, (groups, -1)).movedim(1, 3).flatten(3)
        yield torch.bmm(windows, part.flatten(0, 1).transpose(1, 2)).unflatten(0, (-1, groups))


def squared_norms(values: Tensor) -> Tensor:
    """[batch, ..] -> [batch], one dimension after another: errors grow with the sum of the sizes, not the product."""
    squares = torch.linalg.vector_norm(values, dim=-1).square()
    while squares.dim() > 1:
        squares = squares.sum(-1)
    return squares


def _windows(padded: Tensor, geometry: Geometry, outputs: tuple[int, ...]) -> Tensor:
    """A view [batch, groups, channels, *kernel, rows, *outputs] of padded pixels [batch, rows, channels, *sizes]."""
    batch, rows, channels = padded.shape[:3]
    steps = padded.stride()
    within = channels // geometry.groups
    shape = (batch, geometry.groups, within, *geometry.kernel, rows, *outputs)
    taps = [dilation * step for dilation, step in zip(geometry.dilation, steps[3:], strict=True)]
    moves = [stride * step for stride, step in zip(geometry.stride, steps[3:], strict=True)]
    return padded.as_strided(
        shape, (steps[0], within * steps[2], steps[2], *taps, steps[1], *moves), padded.storage_offset()
    )


def ghost_norms(pixels: Tensor, gradient: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """[batch] squared norms, and [batch] (sum over outputs of |window| |gradient|)^2, to which rounding is relative.

    `pixels` is [batch, channels, *sizes], `gradient` [batch, outputs, *output sizes].
    """
    grid = flat_grid(geometry, pixels.shape[2:], gradient.shape[2:])
    size = _chunk(pixels.device, True, geometry.groups * line_length(geometry, grid, pixels.shape[2]) ** 2)
    norms, masses = [], []
    for start in range(0, pixels.shape[0], size):
        x = wide(pixels[start : start + size]).unflatten(1, (geometry.groups, -1)).flatten(0, 1)
        g = wide(gradient[start : start + size]).unflatten(1, (geometry.groups, -1)).flatten(0, 1)
        windows = _window_products(x, geometry, grid)
        widths = [w for p, o in zip(reversed(grid.pitches), reversed(grid.outputs), strict=False) for w in (0, p - o)]
        g = F.pad(g, widths).flatten(2)[:, :, : grid.used]
        norm = (torch.bmm(g, windows) * g).sum(-1).sum(-1)
        lengths = windows.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt()
        mass = (lengths * g.square().sum(1).sqrt()).sum(-1).square()
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
    phase = pixels[(slice(None), slice(None), *real)]
    short = [pitch - size for pitch, size in zip(grid.pitches, phase.shape[3:], strict=True)]
    widths = [width for missing in reversed(short) for width in (0, missing)]
    line = F.pad(F.pad(phase, widths).flatten(2), (prefix, 0))
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
        total = gram.new_zeros(gram.shape[0], side, side)
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
    if count == 1:
        return products
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
