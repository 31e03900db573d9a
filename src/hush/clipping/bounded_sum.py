"""BoundedSum: a sum over examples together with what one example can move it by."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Group:
    """Tensors clipped together, and how far one example can move their joint L2 norm, slack of rounding included."""

    names: tuple[str, ...]
    bound: float


@dataclass(frozen=True)
class BoundedSum:
    """A sum of clipped contributions, and the bound that travels with it; noise reads its scale from here.

    Guarantee: replacing one example by nothing moves the tensors of each group by at most that group's bound in L2
    norm, in the arithmetic in which they were computed.

    Two sums over different examples add up (in fp64, so that no rounding worth counting is added) and keep the larger
    bound, since an example is in one of them only.

    >>> import torch
    >>> one = BoundedSum({"w": torch.tensor([0.6, 0.8])}, (Group(("w",), 1.0),))
    >>> total = one + one
    >>> [round(x, 6) for x in total.tensors["w"].tolist()], total.sensitivity
    ([1.2, 1.6], 1.0)
    """

    tensors: Mapping[str, Tensor]
    groups: tuple[Group, ...]
    count: "BoundedSum | None" = None
    """Of an adaptive bound: one number, the examples below the bound less those above it, halved."""

    @property
    def sensitivity(self) -> float:
        """How far one example can move all tensors together."""
        return math.sqrt(math.fsum(group.bound**2 for group in self.groups))

    def __add__(self, other: "BoundedSum") -> "BoundedSum":
        mine, theirs = [group.names for group in self.groups], [group.names for group in other.groups]
        if mine != theirs or (self.count is None) != (other.count is None):
            raise ValueError(f"expected two sums of the same groups of tensors, got {mine} and {theirs}")
        tensors = {name: tensor.double() + other.tensors[name].double() for name, tensor in self.tensors.items()}
        groups = tuple(
            Group(one.names, max(one.bound, two.bound)) for one, two in zip(self.groups, other.groups, strict=True)
        )
        count = None if self.count is None or other.count is None else self.count + other.count
        return BoundedSum(tensors, groups, count)
