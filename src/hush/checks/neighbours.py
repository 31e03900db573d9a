"""Inputs for checks: drawn like a batch, with some rows replaced, also by rows that no record looks like."""

from collections.abc import Iterator

import torch
from torch import Tensor

from hush.gradients.engine import Inputs, has_rows


def drawn(inputs: Inputs, many: int, generator: torch.Generator, *, high: bool = False) -> Inputs:
    """So many rows with the shapes, dtypes and ranges of these, column by column; `high` from the upper quarter only.

    Drawn anew, so that what a refusal says tells nothing of the data.
    """

    def draw(leaf: Tensor) -> Tensor:
        if not has_rows(leaf) or not leaf.numel():
            return leaf
        shape = (many, *leaf.shape[1:])
        if leaf.dtype == torch.bool:
            return torch.randint(2, shape, generator=generator).bool().to(leaf.device)
        low, top = _range(leaf)
        share = torch.rand(shape, generator=generator, dtype=torch.float64)
        share = (0.75 + 0.25 * share if high else share).to(leaf.device)
        if leaf.is_floating_point():
            return (low + (top - low) * share).to(leaf.dtype)
        return (low + ((top - low + 1) * share).floor()).clamp(max=top).to(leaf.dtype)

    return inputs.map(draw)


def replaced(inputs: Inputs, other: Inputs, rows: Tensor) -> Inputs:
    """The inputs with these rows (a mask) of `other`."""
    rest = iter(other.tensors())

    def join(leaf: Tensor) -> Tensor:
        _, value = next(rest)
        if not has_rows(leaf):
            return leaf
        choose = rows.to(leaf.device).view(-1, *[1] * (leaf.ndim - 1))
        return torch.where(choose, value, leaf)

    return inputs.map(join)


EXTREMES = ("zero", "far", "far below", "largest", "nan", "infinite")
NOT_FINITE = EXTREMES[-2:]


def extremes(inputs: Inputs) -> Iterator[tuple[str, Inputs]]:
    """The same inputs with every row as no record looks: zeros, 1,000 times the range, what is not a number, ...

    Whole numbers stay in the range of their column: they may be places in a table. So do, on a GPU, floating columns
    that hold nothing but whole numbers, since a place outside of a table ends the process there.
    """
    for kind in EXTREMES:

        def strange(leaf: Tensor, kind: str = kind) -> Tensor:
            if not has_rows(leaf) or not leaf.numel() or leaf.dtype == torch.bool:
                return leaf
            low, top = _range(leaf)
            if (
                leaf.is_complex()
                or not leaf.is_floating_point()
                or (leaf.is_cuda and bool((leaf == leaf.round()).all()))
            ):
                return (low if kind in ("zero", "far below") else top).expand(leaf.shape).to(leaf.dtype)
            value = {
                "zero": torch.zeros_like(top),
                "far": top + 1000 * (top - low + 1),
                "far below": low - 1000 * (top - low + 1),
                "largest": torch.full_like(top, torch.finfo(leaf.dtype).max),
                "nan": torch.full_like(top, torch.nan),
                "infinite": torch.full_like(top, torch.inf),
            }[kind]
            return value.expand(leaf.shape).to(leaf.dtype)

        yield kind, inputs.map(strange)


def _range(leaf: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the largest value of each column, as float64; what is not finite is left out.

    Two rows and fewer say little about a column: then those of all columns together.
    """
    values = torch.nan_to_num(leaf.detach().double(), 0.0, 1.0, -1.0)
    low, top = values.amin(0), values.amax(0)
    return (low, top) if len(values) > 2 else (low.amin().expand(low.shape), top.amax().expand(top.shape))
