"""Gradients of linear layers with several rows an example: weighted sums, on the matrix units.

For example b the gradient is G_b = sum over its rows t of gradient[b, t] inputs[b, t]^T, with half precision factors
whose products are exact in fp32, and sums in fp32. A program goes through the examples of a tile and adds up factor_b *
G_b; it reads ahead across examples, and all programs are at the same example at about the same time, so that what they
read is in the cache. Tiles that would not fill the GPU are cut into pieces of a few examples, which a second kernel
adds up in fp64, always in the same order. `row_products` has the norms, and adds up the rows of an entry as here.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

ANY_LAYOUT = (torch.Tag.flexible_layout,)
"""What is said of operators that take tensors as they lie: Inductor would make a copy for each of them otherwise."""
LONGEST = 128
"""Examples that are added up one after another in one chain, at most; larger batches are not served."""
NARROWEST = 128
"""Columns of a matrix, at least: narrower ones leave tiles half empty."""
ROWS = 64
"""Rows of an example that are read at once."""
_STRIP = 8
"""Rows of a tile that one program adds up from pieces."""


@triton.jit
def _row_sums(  # type: ignore[no-untyped-def]
    inputs, gradients, factors, sums, aside, length, width, outputs, examples, whole, pieces, piece,
    BJ: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The first `whole` programs add up all examples of a tile; the others leave a piece of the examples aside."""
    program = tl.program_id(0)
    part = tl.maximum(program - whole, 0)
    tile = tl.where(program < whole, program, whole + part // pieces)
    example = tl.where(program < whole, 0, part % pieces * piece)
    stop = tl.where(program < whole, examples, tl.minimum(example + piece, examples))
    across = tl.cdiv(width, BC)
    left = (tile % across) * BC
    top = (tile // across) * BJ
    row = 0
    values = tl.zeros([BJ, BC], tl.float32)
    total = tl.zeros([BJ, BC], tl.float32)
    for _ in tl.range(0, (stop - example) * tl.cdiv(length, BP), num_stages=STAGES):
        x = inputs.load([example, row, left]).reshape(BP, BC)
        g = gradients.load([example, row, top]).reshape(BP, BJ)
        values = tl.dot(tl.trans(g), x, values)
        ends = row + BP >= length
        if ends:
            factor = tl.load(factors + example)
            total += tl.where(factor != 0.0, values, 0.0) * factor  # what does not count may hold infinities
            values = tl.zeros([BJ, BC], tl.float32)
        # Where the next rows lie, without a branch: they are asked for long before this example is done.
        row = tl.where(ends, 0, row + BP)
        example = tl.where(ends, example + 1, example)
    j = tl.arange(0, BJ)
    c = tl.arange(0, BC)
    if program < whole:
        place = (top + j)[:, None].to(tl.int64) * width + (left + c)[None, :]
        tl.store(sums + place, total, mask=(top + j < outputs)[:, None] & (left + c < width)[None, :])
    else:
        tl.store(aside + part.to(tl.int64) * (BJ * BC) + j[:, None] * BC + c[None, :], total)


@triton.jit
def _add_pieces(  # type: ignore[no-untyped-def]
    aside, sums, width, outputs, whole, pieces, BJ: tl.constexpr, BC: tl.constexpr, STRIP: tl.constexpr
):
    """Some rows of a tile whose examples were added up in pieces."""
    tile = whole + tl.program_id(0)
    across = tl.cdiv(width, BC)
    strip = tl.program_id(1) * STRIP + tl.arange(0, STRIP)
    c = tl.arange(0, BC)
    total = tl.zeros([STRIP, BC], tl.float64)
    for piece in range(pieces):
        start = (tl.program_id(0) * pieces + piece).to(tl.int64) * (BJ * BC)
        total += tl.load(aside + start + strip[:, None] * BC + c[None, :])
    j = (tile // across) * BJ + strip
    column = (tile % across) * BC + c
    place = sums + j[:, None].to(tl.int64) * width + column[None, :]
    tl.store(place, total.to(tl.float32), mask=(j < outputs)[:, None] & (column < width)[None, :])


def aligned(tensor: Tensor) -> Tensor:
    """Contiguous, rows padded with zeros so that all of them start on 32 bytes, as the hardware's block copies want."""
    over = -tensor.shape[-1] % 16
    return (torch.nn.functional.pad(tensor, (0, over)) if over else tensor).contiguous()


def readable(tensor: Tensor) -> Tensor:
    """The tensor itself where block copies can read it as it lies (Inductor may leave room between rows), or a copy."""
    along, *others = tensor.stride()[::-1]
    fits = along == 1 and all(stride * tensor.element_size() % 16 == 0 for stride in others)
    return tensor if fits and tensor.data_ptr() % 16 == 0 else tensor.clone(memory_format=torch.contiguous_format)


def serves(inputs: Tensor, gradients: Tensor) -> bool:
    """Whether the kernels take [batch, T, i] and [batch, T, j]: wide matrices, few examples, rows on 16 bytes."""
    return min(inputs.shape[2], gradients.shape[2]) >= NARROWEST and inputs.shape[0] <= LONGEST


def weighted_sum(inputs: Tensor, gradients: Tensor, factors: Tensor) -> Tensor:
    """[j, i]: the sum of factor_b * G_b. An example with factor zero adds exactly zero, whatever it holds."""
    return _sum_of_rows(inputs, gradients, factors.float().contiguous())


# As operators of PyTorch, so that a step that calls them can be traced and compiled.
@torch.library.custom_op("hush::row_sums", mutates_args=(), tags=ANY_LAYOUT)
def _sum_of_rows(inputs: Tensor, gradients: Tensor, factors: Tensor) -> Tensor:
    inputs, gradients = readable(inputs), readable(gradients)
    batch, length, width = inputs.shape
    outputs = gradients.shape[2]
    down, across, options = _SUM_TILES
    tiles = tiles_of(outputs, width, down, across)
    whole, piece = cut(tiles, batch, length, programs_of(inputs))
    pieces = -(-batch // piece)
    sums = torch.empty(outputs, width, dtype=torch.float32, device=inputs.device)
    aside = torch.empty((tiles - whole) * pieces, down, across, dtype=torch.float32, device=inputs.device)
    _row_sums[(whole + len(aside),)](
        *blocks(inputs, gradients, down, across), factors, sums, aside, length, width, outputs,
        batch, whole, pieces, piece, BJ=down, BC=across, BP=ROWS, **options,
    )  # fmt: skip
    if len(aside):
        _add_pieces[(tiles - whole, down // _STRIP)](
            aside, sums, width, outputs, whole, pieces, BJ=down, BC=across, STRIP=_STRIP
        )
    return sums


@_sum_of_rows.register_fake
def _(inputs: Tensor, gradients: Tensor, factors: Tensor) -> Tensor:
    return inputs.new_empty(gradients.shape[2], inputs.shape[2], dtype=torch.float32)


_SUM_TILES = (128, 128, {"num_warps": 8, "STAGES": 4})


def cut(tiles: int, examples: int, length: int, programs: int) -> tuple[int, int]:
    """How many tiles are added up whole, and the examples of a piece of the others.

    Whole tiles come in rounds of as many as run at once. The rest is cut where that is faster: to write and read a
    piece takes as long as about 1024 rows.
    """

    def rounds(piece: int) -> float:
        times = -(-rest * -(-examples // piece) // programs)
        return times * (examples if piece == examples else piece + 1024 / length)

    rest = tiles % programs
    piece = min(range(examples, 0, -1), key=rounds)
    return (tiles, examples) if piece == examples else (tiles - rest, piece)


def blocks(inputs: Tensor, gradients: Tensor, down: int, across: int) -> tuple[TensorDescriptor, TensorDescriptor]:
    return (
        TensorDescriptor.from_tensor(inputs, [1, ROWS, across]),
        TensorDescriptor.from_tensor(gradients, [1, ROWS, down]),
    )


def tiles_of(outputs: int, width: int, down: int, across: int) -> int:
    return -(-outputs // down) * -(-width // across)


def programs_of(tensor: Tensor) -> int:
    """As many as run at once."""
    if tensor.device.type != "cuda":
        return 7  # through the interpreter: some, so that tiles are shared
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count
