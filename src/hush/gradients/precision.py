"""What rounding can add, so that bounds are true of the numbers that are computed and not only of real numbers.

u is the unit roundoff of the sums (2^-24 in fp32); gamma(k) = k u / (1 - k u) bounds the relative error of a sum of k
terms of one sign in any order (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2).

One example. Its squared norm s is computed as s' from sums whose longest chain is k: |s' - s| <= gamma(k) m^2, with m
the *mass*, the sum of the norms of the products that add up to G_i (m = |G_i| where that is one product, or where G_i
is stored). What the weighted sum adds for it differs from factor * G_i by at most (gamma(terms + 3) + unit) factor m,
where unit is not 0 if the hardware rounds the factors of products (tf32). So U^2 = s' + (gamma(k) + 2.1 (gamma(terms
+ 3) + unit)) m^2 bounds the squared norm of what is really added, and the factor C / max(U, C) keeps that below C: a
lot of one example has norm <= C, whatever the dtype of the model.

One batch. On neighbouring data a batch has the same shapes, and all other batches are the same bit for bit; but the
sum over the rows of this one may round differently at every addition after the changed example. An addition errs by
at most u times the norm of its result. There are R = batch * terms rows. In whatever tree neighbours are added, a
partial sum of b whole examples is at most b C, and a part of the rows of an example at most RHO C (the factor also
keeps factor * m below RHO C). In the worst tree, one row after another, the norms of all partial sums add up to R
(batch / 2 + RHO) C on either side: slack = u R (batch + 2 RHO), with RHO = 1 where terms = 1. For 256 examples of one
row: 0.4 percent. Where examples are summed in blocks of b, only the block of the changed example rounds differently,
and the sum over the blocks, taken in fp64, is rounded once: batch becomes b, and 4 u batch is added. Blocks are chosen
so that the slack stays near 3 percent however large the batch.

Across the batches of a lot sums are added in fp64 (`BoundedSum.__add__`): 10,000 batches add less than 1e-6.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hush.gradients.site import Contribution

ACCUMULATION = 1e-6


@cache
def unit(dtype: torch.dtype) -> float:
    """The unit roundoff of sums in this dtype."""
    return torch.finfo(dtype).eps / 2


def gamma(terms: int, dtype: torch.dtype) -> float:
    error = terms * unit(dtype)
    if error >= 0.5:
        raise ValueError(
            f"{terms} terms cannot be added up in {dtype} with a useful bound: use smaller physical batches"
        )
    return error / (1 - error)


def product_unit(device: torch.device, convolution: bool) -> float:
    """How much the hardware may round the two factors of an fp32 product, relative to it."""
    backends: Any = torch.backends
    if device.type == "cuda":
        used = [backends.cuda.matmul] + [backends.cudnn.conv] * convolution
    else:
        used = [backends.mkldnn.matmul] + [backends.mkldnn.conv] * convolution
    chosen = {backend.fp32_precision for backend in used}
    if "none" in chosen:
        chosen.add(backends.fp32_precision)
    return max({"none": 0.0, "ieee": 0.0, "tf32": 2.0**-10, "bf16": 2.0**-7}[one] for one in chosen)


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


def slack(additions: float, dtype: torch.dtype) -> float:
    """How much further one example can move the sum over a batch through rounding, relative to C."""
    return 1.01 * unit(dtype) * additions + ACCUMULATION
