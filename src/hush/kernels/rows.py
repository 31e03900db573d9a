"""Gradients of linear layers with several rows an example: squared norms and weighted sums, on the matrix units.

For example b the gradient is G_b = sum over its rows t of gradient[b, t] inputs[b, t]^T, with half precision factors
whose products are exact in fp32, and sums in fp32. Both kernels cut the work into units, a tile of one example's G_b
each, and give every program a run of consecutive units that it works through without a pause: all programs end at about
the same time, whatever the shape. Norms go from example to example; sums go through the examples of a tile, so that a
program adds up factor_b * G_b and writes a tile once. Where a tile's examples are shared by several programs, all but
the first leave their part aside, and a second kernel adds it in fp64, always in the same order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

LONGEST = 128
"""Examples that are added up one after another in one chain, at most; larger batches are not served."""
_ROWS = 64
"""Rows of an example that are read at once."""
_STRIP = 32
"""Rows of a tile that one program of the second kernel adds."""


@triton.jit
def _owner(unit, units, programs):  # type: ignore[no-untyped-def]
    """The program whose run, from units * p // programs on, holds this unit."""
    return ((unit + 1).to(tl.int64) * programs - 1) // units


@triton.jit
def _row_squares(  # type: ignore[no-untyped-def]
    inputs, gradients, squares, length, width, outputs, units,
    BJ: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0)
    unit = (program * units // programs).to(tl.int32)
    stop = ((program + 1) * units // programs).to(tl.int32)
    across = tl.cdiv(width, BC)
    tiles = across * tl.cdiv(outputs, BJ)
    steps = tl.cdiv(length, BP)
    example = unit // tiles
    left = (unit % tiles % across) * BC
    top = (unit % tiles // across) * BJ
    row = 0
    values = tl.zeros([BJ, BC], tl.float32)
    for _ in tl.range(0, (stop - unit) * steps, num_stages=STAGES):
        x = inputs.load([example, row, left]).reshape(BP, BC)
        g = gradients.load([example, row, top]).reshape(BP, BJ)
        values = tl.dot(tl.trans(g), x, values)
        ends = row + BP >= length
        if ends:
            tl.store(squares + unit, tl.sum(tl.sum(values * values, axis=1), axis=0))
            values = tl.zeros([BJ, BC], tl.float32)
        row = tl.where(ends, 0, row + BP)
        unit = tl.where(ends, unit + 1, unit)
        left = tl.where(ends, left + BC, left)
        top = tl.where(left >= width, top + BJ, top)
        left = tl.where(left >= width, 0, left)
        example = tl.where(top >= outputs, example + 1, example)
        top = tl.where(top >= outputs, 0, top)


@triton.jit
def _row_products(  # type: ignore[no-untyped-def]
    inputs, gradients, out, squares, length, width, outputs,
    BJ: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A tile of one example's product, kept, and the sum of its squares."""
    example = tl.program_id(1)
    across = tl.cdiv(width, BC)
    left = (tl.program_id(0) % across) * BC
    top = (tl.program_id(0) // across) * BJ
    values = tl.zeros([BJ, BC], tl.float32)
    for row in tl.range(0, length, BP, num_stages=STAGES):
        x = inputs.load([example, row, left]).reshape(BP, BC)
        g = gradients.load([example, row, top]).reshape(BP, BJ)
        values = tl.dot(tl.trans(g), x, values)
    tl.store(squares + example * tl.num_programs(0) + tl.program_id(0), tl.sum(tl.sum(values * values, axis=1), axis=0))
    j = top + tl.arange(0, BJ)
    c = left + tl.arange(0, BC)
    place = (example.to(tl.int64) * outputs + j[:, None]) * width + c[None, :]
    tl.store(out + place, values, mask=(j < outputs)[:, None] & (c < width)[None, :])


@triton.jit
def _row_sums(  # type: ignore[no-untyped-def]
    inputs, gradients, factors, sums, aside, length, width, outputs, examples, units,
    BJ: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0)
    start = (program * units // programs).to(tl.int32)
    stop = ((program + 1) * units // programs).to(tl.int32)
    across = tl.cdiv(width, BC)
    steps = tl.cdiv(length, BP)
    count = stop - start
    example = start % examples
    left = (start // examples % across) * BC
    top = (start // examples // across) * BJ
    begin = tl.where(example == 0, -1, (examples - example) * steps)  # before this, tiles are not ours alone
    stop = count * steps
    row = 0
    values = tl.zeros([BJ, BC], tl.float32)
    total = tl.zeros([BJ, BC], tl.float32)
    for at in tl.range(0, stop, num_stages=STAGES):
        x = inputs.load([example, row, left]).reshape(BP, BC)
        g = gradients.load([example, row, top]).reshape(BP, BJ)
        values = tl.dot(tl.trans(g), x, values)
        ends = row + BP >= length
        last = ends & ((example == examples - 1) | (at == stop - 1))
        if ends:
            factor = tl.load(factors + example)
            total += tl.where(factor != 0.0, values, 0.0) * factor  # what does not count may hold infinities
            values = tl.zeros([BJ, BC], tl.float32)
            if last:
                j = tl.arange(0, BJ)
                c = tl.arange(0, BC)
                if at >= begin:
                    place = (top + j)[:, None].to(tl.int64) * width + (left + c)[None, :]
                    tl.store(sums + place, total, mask=(top + j < outputs)[:, None] & (left + c < width)[None, :])
                else:
                    tl.store(aside + program * (BJ * BC) + j[:, None] * BC + c[None, :], total)
                total = tl.zeros([BJ, BC], tl.float32)
        # Where the next rows lie, without a branch: they are asked for long before this tile is done.
        row = tl.where(ends, 0, row + BP)
        example = tl.where(ends, tl.where(last, 0, example + 1), example)
        left = tl.where(last, left + BC, left)
        top = tl.where(left >= width, top + BJ, top)
        left = tl.where(left >= width, 0, left)


@triton.jit
def _add_aside(  # type: ignore[no-untyped-def]
    sums, aside, width, outputs, examples, units, programs, BJ: tl.constexpr, BC: tl.constexpr, STRIP: tl.constexpr
):
    """Each program adds all that was left aside for one tile, if its namesake was the first to leave some there."""
    program = tl.program_id(0).to(tl.int64) + 1
    tile = ((program * units // programs) // examples).to(tl.int32)
    first = _owner(tile * examples, units, programs)
    if first == program - 1:
        last = _owner((tile + 1) * examples - 1, units, programs)
        across = tl.cdiv(width, BC)
        strip = tl.program_id(1) * STRIP + tl.arange(0, STRIP)
        c = tl.arange(0, BC)
        j = (tile // across) * BJ + strip
        column = (tile % across) * BC + c
        place = sums + j[:, None].to(tl.int64) * width + column[None, :]
        inside = (j < outputs)[:, None] & (column < width)[None, :]
        total = tl.load(place, mask=inside, other=0.0).to(tl.float64)
        for part in range(program, last + 1):
            total += tl.load(aside + part * (BJ * BC) + strip[:, None] * BC + c[None, :])
        tl.store(place, total.to(tl.float32), mask=inside)


def aligned(tensor: Tensor) -> Tensor:
    """Contiguous, rows padded with zeros so that all of them start on 32 bytes, as the hardware's block copies want."""
    over = -tensor.shape[-1] % 16
    return (torch.nn.functional.pad(tensor, (0, over)) if over else tensor).contiguous()


def serves(inputs: Tensor, gradients: Tensor) -> bool:
    """Whether the kernels take [batch, T, i] and [batch, T, j]: wide matrices, few examples, rows on 16 bytes."""
    return min(inputs.shape[2], gradients.shape[2]) >= 128 and inputs.shape[0] <= LONGEST


def squared_norms(inputs: Tensor, gradients: Tensor) -> Tensor:
    """[batch]: |G_b|^2 of inputs [batch, T, i] and gradients [batch, T, j], `aligned` both."""
    return _squares_of_tiles(inputs, gradients).sum(1)


def products(inputs: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """[batch, j, i] the G_b themselves, and [batch] their squared norms; both tensors `aligned`."""
    kept, squares = _products_of_rows(inputs, gradients)
    return kept, squares.sum(1)


def weighted_sum(inputs: Tensor, gradients: Tensor, factors: Tensor) -> Tensor:
    """[j, i]: the sum of factor_b * G_b. An example with factor zero adds exactly zero, whatever it holds."""
    return _sum_of_rows(inputs, gradients, factors.float().contiguous())


# As operators of PyTorch, so that a step that calls them can be traced and compiled.
@torch.library.custom_op("hush::row_squares", mutates_args=())
def _squares_of_tiles(inputs: Tensor, gradients: Tensor) -> Tensor:
    inputs, gradients = inputs.contiguous(), gradients.contiguous()
    batch, length, width = inputs.shape
    down, across, options = _NORM_TILES
    tiles = _tiles(gradients.shape[2], width, down, across)
    squares = torch.empty(batch, tiles, dtype=torch.float32, device=inputs.device)
    _row_squares[(min(_programs(inputs), batch * tiles),)](
        *_blocks(inputs, gradients, down, across), squares, length, width, gradients.shape[2], batch * tiles,
        BJ=down, BC=across, BP=_ROWS, **options,
    )  # fmt: skip
    return squares


@_squares_of_tiles.register_fake
def _(inputs: Tensor, gradients: Tensor) -> Tensor:
    tiles = _tiles(gradients.shape[2], inputs.shape[2], *_NORM_TILES[:2])
    return inputs.new_empty(inputs.shape[0], tiles, dtype=torch.float32)


@torch.library.custom_op("hush::row_products", mutates_args=())
def _products_of_rows(inputs: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    inputs, gradients = inputs.contiguous(), gradients.contiguous()
    batch, length, width = inputs.shape
    outputs = gradients.shape[2]
    down, across, options = _KEPT_TILES
    tiles = _tiles(outputs, width, down, across)
    kept = torch.empty(batch, outputs, width, dtype=torch.float32, device=inputs.device)
    squares = torch.empty(batch, tiles, dtype=torch.float32, device=inputs.device)
    _row_products[(tiles, batch)](
        *_blocks(inputs, gradients, down, across), kept, squares, length, width, outputs,
        BJ=down, BC=across, BP=_ROWS, **options,
    )  # fmt: skip
    return kept, squares


@_products_of_rows.register_fake
def _(inputs: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    batch, _, width = inputs.shape
    outputs = gradients.shape[2]
    tiles = _tiles(outputs, width, *_KEPT_TILES[:2])
    kind = torch.float32
    return inputs.new_empty(batch, outputs, width, dtype=kind), inputs.new_empty(batch, tiles, dtype=kind)


@torch.library.custom_op("hush::row_sums", mutates_args=())
def _sum_of_rows(inputs: Tensor, gradients: Tensor, factors: Tensor) -> Tensor:
    inputs, gradients = inputs.contiguous(), gradients.contiguous()
    batch, length, width = inputs.shape
    outputs = gradients.shape[2]
    down, across, options = _SUM_TILES
    units = batch * _tiles(outputs, width, down, across)
    programs = min(_programs(inputs), units)
    sums = torch.empty(outputs, width, dtype=torch.float32, device=inputs.device)
    aside = torch.empty(programs, down, across, dtype=torch.float32, device=inputs.device)
    _row_sums[(programs,)](
        *_blocks(inputs, gradients, down, across), factors, sums, aside, length, width, outputs, batch, units,
        BJ=down, BC=across, BP=_ROWS, **options,
    )  # fmt: skip
    if programs > 1:
        _add_aside[(programs - 1, down // _STRIP)](
            sums, aside, width, outputs, batch, units, programs, BJ=down, BC=across, STRIP=_STRIP
        )
    return sums


@_sum_of_rows.register_fake
def _(inputs: Tensor, gradients: Tensor, factors: Tensor) -> Tensor:
    return inputs.new_empty(gradients.shape[2], inputs.shape[2], dtype=torch.float32)


_NORM_TILES = (128, 128, {"num_warps": 8, "STAGES": 3})
_KEPT_TILES = (128, 128, {"num_warps": 8, "STAGES": 3})
_SUM_TILES = (128, 128, {"num_warps": 8, "STAGES": 3})


def _blocks(inputs: Tensor, gradients: Tensor, down: int, across: int) -> tuple[TensorDescriptor, TensorDescriptor]:
    return (
        TensorDescriptor.from_tensor(inputs, [1, _ROWS, across]),
        TensorDescriptor.from_tensor(gradients, [1, _ROWS, down]),
    )


def _tiles(outputs: int, width: int, down: int, across: int) -> int:
    return -(-outputs // down) * -(-width // across)


def _programs(tensor: Tensor) -> int:
    """As many as run at once."""
    if tensor.device.type != "cuda":
        return 7  # through the interpreter: some, so that tiles are shared
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count
