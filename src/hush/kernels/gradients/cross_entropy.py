"""Cross entropy over many classes, half precision logits: one pass for the losses, one for the gradient of the logits.

A row's loss is log(sum of exp(logits)) - logits[class]; the gradient of a row of weight w is w * (softmax - one-hot).
Numbers that are not finite stay visible: a row that holds one has no finite loss and no finite gradient.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hush.kernels.gradients.rows import ANY_LAYOUT

_COLUMNS = 2048
_SUMMED = 4096
"""Columns that a program reads at a time, for gradients and for sums."""
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _bounds(row, stride, columns, VECTORS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where a row starts, and how many of its numbers are read: whole groups of eight where all of them are memory."""
    if VECTORS:
        return tl.multiple_of(row * stride, 8), tl.cdiv(columns, 8) * 8
    else:
        return row * stride, columns


@triton.jit
def _log_sums(  # type: ignore[no-untyped-def]
    logits, sums, stride, columns, BN: tl.constexpr, VECTORS: tl.constexpr
):
    """The logarithm of the sum of the exponentials of one row."""
    row = tl.program_id(0).to(tl.int64)
    start, stop = _bounds(row, stride, columns, VECTORS)
    # Groups of eight numbers, each group with its own largest one: threads do not wait for each other.
    c = tl.arange(0, BN // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    top = tl.full([BN // 8], -1.0e38, tl.float32)  # finite, so that logits of minus infinity add exp(-inf) = 0
    total = tl.zeros([BN // 8], tl.float32)
    for left in range(0, columns, BN):
        x = tl.load(logits + start + left + c, mask=left + c < stop, other=0.0).to(tl.float32) * _LOG2_E
        x = tl.where(left + c < columns, x, float("-inf"))
        higher = tl.maximum(top, tl.max(x, axis=1))
        total = total * tl.exp2(top - higher) + tl.sum(tl.exp2(x - higher[:, None]), axis=1)
        top = higher
    highest = tl.max(top, axis=0)
    total = tl.sum(total * tl.exp2(top - highest), axis=0)
    tl.store(sums + row, (highest + tl.log2(total)) / _LOG2_E)


@triton.jit
def _logit_gradients(  # type: ignore[no-untyped-def]
    logits, sums, classes, weights, out, stride, columns, padded, BN: tl.constexpr, VECTORS: tl.constexpr
):
    """A part of one row of the gradient; the columns of padding are zeros."""
    row = tl.program_id(1).to(tl.int64)
    start, stop = _bounds(row, stride, columns, VECTORS)
    c = tl.program_id(0) * BN + tl.arange(0, BN)
    x = tl.load(logits + start + c, mask=c < stop, other=0.0).to(tl.float32)
    share = tl.exp2((x - tl.load(sums + row)) * _LOG2_E)
    share = tl.where(c == tl.load(classes + row), share - 1.0, share)
    value = tl.where(c < columns, share * tl.load(weights + row), 0.0)
    tl.store(out + row * padded + c, value.to(out.dtype.element_ty), mask=c < padded)


def wide_enough(columns: int) -> int:
    """Columns with padding: all rows start on 32 bytes."""
    return -(-columns // 16) * 16


# As operators of PyTorch, so that a step that calls them can be traced and compiled.
@torch.library.custom_op("hush::log_sums", mutates_args=(), tags=ANY_LAYOUT)
def log_sums(logits: Tensor) -> Tensor:
    """[rows] in fp32: log(sum of exp) of [rows, classes] half precision logits."""
    logits = _along(logits)
    rows, columns = logits.shape
    sums = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _log_sums[(rows,)](logits, sums, logits.stride(0), columns, BN=_SUMMED, VECTORS=_vectors(logits), num_warps=4)
    return sums


@log_sums.register_fake
def _(logits: Tensor) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.float32)


@torch.library.custom_op("hush::logit_gradients", mutates_args=(), tags=ANY_LAYOUT)
def logit_gradients(logits: Tensor, sums: Tensor, classes: Tensor, weights: Tensor) -> Tensor:
    """[rows, `wide_enough`(classes)] in half precision: weight * (softmax - one-hot), then zeros."""
    logits = _along(logits)
    rows, columns = logits.shape
    padded = wide_enough(columns)
    out = torch.empty(rows, padded, dtype=logits.dtype, device=logits.device)
    _logit_gradients[(triton.cdiv(padded, _COLUMNS), rows)](
        logits, sums.contiguous(), classes.contiguous(), weights.float().contiguous(), out, logits.stride(0), columns,
        padded, BN=_COLUMNS, VECTORS=_vectors(logits), num_warps=4,
    )  # fmt: skip
    return out


@logit_gradients.register_fake
def _(logits: Tensor, sums: Tensor, classes: Tensor, weights: Tensor) -> Tensor:
    return logits.new_empty(logits.shape[0], wide_enough(logits.shape[1]))


def _along(logits: Tensor) -> Tensor:
    """Numbers of a row side by side; room between rows is fine."""
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _vectors(logits: Tensor) -> bool:
    """Whether all rows start on 16 bytes, and the room between them is memory behind the last one too."""
    rows, stride = logits.shape[0], logits.stride(0)
    room = logits.untyped_storage().nbytes() // logits.element_size() - logits.storage_offset()
    return stride % 8 == 0 and logits.data_ptr() % 16 == 0 and rows * stride <= room
