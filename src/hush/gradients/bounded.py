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
    """

    tensors: Mapping[str, Tensor]
    groups: tuple[Group, ...]

    @property
    def sensitivity(self) -> float:
        """How far one example can move all tensors together."""
        return math.sqrt(math.fsum(group.bound**2 for group in self.groups))
