"""What rounding can add, so that bounds are true of the numbers that are computed and not only of real numbers.

u is the unit roundoff of the sums (2^-24 in fp32); gamma(k) = k u / (1 - k u) bounds the relative error of a sum of k
terms of one sign in any order (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2).

One example. G_i is a sum of `terms` products, one for each row. The *mass* m is the sum of their norms; where there is
one product, it is |G_i|. A sum of these products, in whatever order, errs by at most e m with e = gamma(terms + 3) +
unit, where unit is not 0 if the hardware rounds the factors of products (tf32). So what the weighted sum adds for an
example is at most factor (|G_i| + e m) long. The norm comes in one of three ways:
- of what is stored, and summed later (terms = 1): s' is right up to gamma(k), k the longest chain of sums behind it;
- of a gradient P that is formed for its norm only: the same for |P|, and |G_i| <= |P| + e m;
- from inner products of pairs of rows: |s' - |G_i|^2| <= gamma(k) m^2, since rounding knows nothing of what cancels.
U, the root of s' and its error, and e m (2 e m for P) on top, bounds the norm of what is really added; over several
tensors norms and masses are added up as squares (Minkowski). The factor C / max(U, C) keeps it below C: a lot of one
example has norm <= C, whatever the dtype of the model. The mass of independent rows is sqrt(terms) times the norm, so
pairs serve only where gamma(k) terms is small.

One batch. On neighbouring data a batch has the same shapes, and all other batches are the same bit for bit; but the
sum over the rows of this one may round differently at every addition. An addition errs by at most u times the norm of
its result. Where each example is one row (terms = 1), a partial sum of k examples is at most k C long, and in the worst
tree, one after another, the norms of all partial sums of a batch add up to less than batch (batch + 2) C / 2 on either
side: slack = u batch (batch + 2). Where an example is several rows, R = batch * terms in all, no order is assumed: a
kernel may add strided rows, so that a partial sum holds a part of every example. `floor` keeps the mass of what an
example adds below rho C, and its sum is at most C; so no part of its rows is longer than (rho + 1) C / 2, since the
rest is nearly as long. R additions of at most batch (rho + 1) C / 2 on either side: slack = u R batch (rho + 1).
If blocks of b examples are summed, only the block of the changed one rounds differently and batch becomes b; a few
blocks (8) are then added up one after the other, 9 u batch for both sides, many in fp64 and rounded once, 2 u batch.
Examples of so many rows that a block would hold but one are added up each by itself, as if terms = 1.

One constant. The deviation of the noise is a multiple of the bound. If the slack in it followed the batches that were
drawn, the noise would tell who was in the lot, and amplification by sampling would be lost for that lot. So every bound
holds RUN_SLACK, whatever the batch needs: empty, short, long, on any device. Blocks are chosen so that ordinary batches
need less. A batch that would need more is summed in pieces (`pieces_needed`), which are added in fp64: it takes longer.

Across the batches of a lot sums are added in fp64: K batches of N examples add less than N K 2^-53, and ACROSS_BATCHES
is kept for that, enough for N K < 9e11.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

RUN_SLACK = 0.01
"""How much further than by its clipping bound rounding may let an example move a sum: in every bound of every run."""
ACROSS_BATCHES = 1e-4
"""The part of it that is kept for adding up the batches of a lot."""


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


def slack(additions: float, dtype: torch.dtype) -> float:
    """How much further one example can move the sum over a batch through rounding, relative to C."""
    return 1.01 * unit(dtype) * additions


def pieces_needed(additions: Callable[[int], float], examples: int, dtype: torch.dtype) -> int:
    """In how many pieces so many examples are summed, so that rounding stays below what every bound has room for.

    `additions` says how far one example moves the sum of so many, in units of u C.

    >>> [pieces_needed(lambda n: n * n, examples, torch.float32) for examples in (0, 400, 500, 4000)]
    [1, 1, 2, 16]
    """
    pieces = 1
    while slack(additions(-(-examples // pieces)), dtype) > RUN_SLACK - ACROSS_BATCHES:
        if pieces >= examples:
            raise ValueError(
                "one example alone rounds more than the noise has room for: its gradient is a sum of too many parts "
                "(a parameter that is used thousands of times); use it less often, or compute in float64"
            )
        pieces *= 2
    return pieces
