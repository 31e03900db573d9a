"""Weighted sums of stored gradients, examples without weight left unread."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _weighted(values, factors, out, examples, block, columns, BN: tl.constexpr):  # type: ignore[no-untyped-def]
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    first = tl.program_id(1) * block
    inside = n < columns
    total = tl.zeros([BN], tl.float32)
    for at in range(block):
        example = tl.minimum(first + at, examples - 1).to(tl.int64)
        factor = tl.load(factors + example, mask=first + at < examples, other=0.0)
        limit = tl.where(factor != 0.0, columns, 0)
        total += factor * tl.load(values + example * columns + n, mask=inside & (n < limit), other=0.0)
    tl.store(out + tl.program_id(1).to(tl.int64) * columns + n, total, mask=inside)


def weighted_rows(values: Tensor, factors: Tensor, block: int) -> Tensor:
    """[blocks, n]: for each block of examples the sum of factor_b * values_b of [batch, n] in fp32."""
    return _stored_sums(values, factors.float().contiguous(), block)


@torch.library.custom_op("hush::stored_sums", mutates_args=())
def _stored_sums(values: Tensor, factors: Tensor, block: int) -> Tensor:
    batch, columns = values.shape
    sums = values.new_empty(-(-batch // block), columns)
    _weighted[(triton.cdiv(columns, 512), len(sums))](values, factors, sums, batch, block, columns, BN=512, num_warps=4)
    return sums


@_stored_sums.register_fake
def _(values: Tensor, factors: Tensor, block: int) -> Tensor:
    return values.new_empty(-(-values.shape[0] // block), values.shape[1])
