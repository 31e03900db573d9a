"""Norms of per-example gradients, rounded up: at least the norm of what is added to the sum."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hush.clipping.rounding import gamma, product_unit, unit
from hush.gradients.sums.per_example import Contribution


def upper_squared_norms(parts: list[tuple[Contribution, tuple[int, ...]]]) -> Tensor:
    """[batch]: at least the squared norm of what these contributions, to tensors of these shapes, add together."""
    norms: list[Tensor] = []
    of_pairs: list[Tensor] = []
    of_sums: list[Tensor] = []
    floors: list[Tensor] = []
    relative = 0.0
    hardware: dict[bool, float] = {}
    pieces = [(piece, shape) for contribution, shape in parts for piece in contribution.separate]
    more = len(pieces) + 8
    for piece, shape in pieces:
        norms.append(piece.squared_norms())
        dtype, terms = norms[-1].dtype, piece.terms
        convolves = piece.convolves
        if convolves not in hardware:
            hardware[convolves] = product_unit(norms[-1].device, convolves)
        products = 0.0 if dtype == torch.float64 else hardware[convolves]
        # Matrix units cut off where others round: twice the unit of a sum.
        cut = 2 if products else 1
        of_norm = gamma(cut * (piece.chain(shape) + more), dtype)
        of_sum = 1.05 * (gamma(cut * (terms + 3), dtype) + products + piece.rounded)
        if terms == 1:
            relative = max(relative, of_norm + 2 * of_sum)
            continue
        mass = piece.squared_mass()
        if piece.pairs:
            of_spread = 1.05 * cut * unit(dtype) / (1 - of_norm)
            of_pairs.append(piece.spread(shape, more) * of_spread + mass * (2.1 * products))
        else:
            relative = max(relative, of_norm)
            of_sum *= 2  # the gradient whose norm was taken was summed up another time
        of_sums.append(mass * of_sum**2)
        floor = piece.floor()
        floors += [] if floor is None else [floor]
    total = add(norms)
    total = total * (1 + relative + 16 * unit(total.dtype))
    if of_pairs:
        total = total + add(of_pairs)
    if of_sums:
        total = (total.sqrt() + add(of_sums).sqrt()).square() * (1 + 16 * unit(total.dtype))
    return torch.maximum(total, add(floors)) if floors else total


def add(tensors: Sequence[Tensor]) -> Tensor:
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total
