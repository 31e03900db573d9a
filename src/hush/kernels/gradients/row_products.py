"""Gradients of linear layers with several rows an example: squared norms, and products that are kept.

As in `rows`: half precision factors, exact products, sums in fp32. A gradient that is formed again for the sum leaves
its norm alone; one that is kept is rounded to the dtype of its factors, and the norm is that of the rounded numbers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from hush.kernels.gradients import rows
from hush.kernels.gradients.rows import ANY_LAYOUT, ROWS, readable
from hush.kernels.gradients.stored import PIECES

_TILES = (128, 256, {"num_warps": 8, "STAGES": 4})


@triton.jit
def _keep(  # type: ignore[no-untyped-def]
    kept, left, right, example, row, column, BJ: tl.constexpr, BH: tl.constexpr
):
    kept.store([example, row, column], left.reshape(1, BJ, BH))
    kept.store([example, row, column + BH], right.reshape(1, BJ, BH))


@triton.jit
def _row_squares(  # type: ignore[no-untyped-def]
    inputs, gradients, kept0, kept1, kept2, kept3, kept4, kept5, lines,
    squares, length, units, across, down, more_across, more_down, more_examples,
    BJ: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, STAGES: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """The sums of the squares of tiles of one example's product; a program takes every so-many-th tile of the batch."""
    unit = tl.program_id(0)
    column = unit % across
    line = unit // across % down
    example = unit // (across * down)
    mine = tl.cdiv(units - unit, tl.num_programs(0))
    row = 0
    values = tl.zeros([BJ, BC], tl.float32)
    for _ in tl.range(0, mine * tl.cdiv(length, BP), num_stages=STAGES):
        x = inputs.load([example, row, column * BC]).reshape(BP, BC)
        g = gradients.load([example, row, line * BJ]).reshape(BP, BJ)
        values = tl.dot(tl.trans(g), x, values)
        ends = row + BP >= length
        if ends:
            if KEEP:
                rounded = values.to(g.dtype)
                values = rounded.to(tl.float32)
                # By halves: a whole tile beside the rows that are read ahead is more than the shared memory holds.
                left, right = tl.split(tl.permute(tl.reshape(rounded, (BJ, 2, BC // 2)), (0, 2, 1)))
                piece, start, top = line // lines, column * BC, line % lines * BJ
                if piece == 0:
                    _keep(kept0, left, right, example, top, start, BJ, BC // 2)
                elif piece == 1:
                    _keep(kept1, left, right, example, top, start, BJ, BC // 2)
                elif piece == 2:
                    _keep(kept2, left, right, example, top, start, BJ, BC // 2)
                elif piece == 3:
                    _keep(kept3, left, right, example, top, start, BJ, BC // 2)
                elif piece == 4:
                    _keep(kept4, left, right, example, top, start, BJ, BC // 2)
                else:
                    _keep(kept5, left, right, example, top, start, BJ, BC // 2)
            tl.store(squares + unit, tl.sum(tl.sum(values * values, axis=1), axis=0))
            values = tl.zeros([BJ, BC], tl.float32)
        # Where the next rows lie, without a branch and without divisions: they are asked for long before.
        next_column = column + more_across
        over = (next_column >= across).to(tl.int32)
        next_line = line + more_down + over
        beyond = (next_line >= down).to(tl.int32)
        row = tl.where(ends, 0, row + BP)
        unit = tl.where(ends, unit + tl.num_programs(0), unit)
        column = tl.where(ends, next_column - over * across, column)
        line = tl.where(ends, next_line - beyond * down, line)
        example = tl.where(ends, example + more_examples + beyond, example)


def squared_norms(inputs: Tensor, gradients: Tensor) -> Tensor:
    """[batch]: |G_b|^2 of inputs [batch, T, i] and gradients [batch, T, j], `aligned` both."""
    return _squares_of_tiles(inputs, gradients).sum(1)


def kept_products(inputs: Tensor, gradients: Tensor, pieces: int) -> tuple[list[Tensor], Tensor]:
    """The G_b, rounded to the dtype of their factors, as pieces [batch, some of j, i]; the squared norms of these.

    There are at most so many pieces.
    """
    *kept, squares = _kept_tiles(inputs, gradients, pieces)
    return kept, squares.sum(1)


def keeps_busy(inputs: Tensor, gradients: Tensor) -> bool:
    """Whether the tiles of all examples come in rounds that are nearly full: a last one takes as long as all others."""
    tiles = len(inputs) * _tiles(inputs, gradients)
    programs = rows.programs_of(inputs)
    return tiles >= 0.7 * programs * -(-tiles // programs)


def longest_chain(outputs: int, width: int) -> int:
    """The longest chain of additions behind the norm of a product that is kept: a tile's, then those of all tiles."""
    high, wide, _ = _TILES
    return high + wide + rows.tiles_of(outputs, width, high, wide)


@torch.library.custom_op("hush::row_squares", mutates_args=(), tags=ANY_LAYOUT)
def _squares_of_tiles(inputs: Tensor, gradients: Tensor) -> Tensor:
    squares = _new_squares(inputs, gradients)
    _run(inputs, gradients, squares, [])
    return squares


@_squares_of_tiles.register_fake
def _(inputs: Tensor, gradients: Tensor) -> Tensor:
    return _new_squares(inputs, gradients)


@torch.library.custom_op("hush::kept_tiles", mutates_args=(), tags=ANY_LAYOUT)
def _kept_tiles(inputs: Tensor, gradients: Tensor, pieces: int) -> list[Tensor]:
    kept, squares = _new_kept(inputs, gradients, pieces), _new_squares(inputs, gradients)
    _run(inputs, gradients, squares, kept)
    return [*kept, squares]


@_kept_tiles.register_fake
def _(inputs: Tensor, gradients: Tensor, pieces: int) -> list[Tensor]:
    return [*_new_kept(inputs, gradients, pieces), _new_squares(inputs, gradients)]


def _tiles(inputs: Tensor, gradients: Tensor) -> int:
    """Of one example."""
    return rows.tiles_of(gradients.shape[2], inputs.shape[2], *_TILES[:2])


def _new_squares(inputs: Tensor, gradients: Tensor) -> Tensor:
    return inputs.new_empty(len(inputs), _tiles(inputs, gradients), dtype=torch.float32)


def _new_kept(inputs: Tensor, gradients: Tensor, pieces: int) -> list[Tensor]:
    return [inputs.new_empty(len(inputs), some, inputs.shape[2]) for some in shares(gradients.shape[2], pieces)]


def shares(outputs: int, pieces: int) -> list[int]:
    """How many rows of a matrix go to each piece: whole tiles, about as many to each, in at most so many pieces."""
    high = _TILES[0]
    each = high * -(-outputs // (high * min(pieces, PIECES)))
    return [min(each, outputs - start) for start in range(0, outputs, each)]


def _run(inputs: Tensor, gradients: Tensor, squares: Tensor, kept: list[Tensor]) -> None:
    inputs, gradients = readable(inputs), readable(gradients)
    high, wide, options = _TILES
    down, across = -(-gradients.shape[2] // high), -(-inputs.shape[2] // wide)
    programs = min(rows.programs_of(inputs), squares.numel())
    steps = programs % across, programs // across % down, programs // (across * down)
    places = [TensorDescriptor.from_tensor(piece, [1, high, wide // 2]) for piece in kept or [inputs]]
    places += places[:1] * (PIECES - len(places))
    _row_squares[(programs,)](
        *rows.blocks(inputs, gradients, high, wide), *places, kept[0].shape[1] // high if len(kept) > 1 else down,
        squares, inputs.shape[1], squares.numel(), across, down, *steps,
        BJ=high, BC=wide, BP=ROWS, KEEP=bool(kept), **options,
    )  # fmt: skip
