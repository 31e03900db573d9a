"""Mechanisms with countably many outcomes: their likelihood ratios, outcome by outcome.

P is the law with the record, Q without. Each law here is its own mirror image: a reflection makes P of Q.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hush.accounting.events import DiscreteGaussian, DiscreteLaplace, PureDP, RandomisedResponse

Array = NDArray[np.float64]
Finite = PureDP | RandomisedResponse | DiscreteLaplace | DiscreteGaussian


@dataclass(frozen=True, eq=False)
class Outcomes:
    """Outcomes with rising privacy loss ln(dP/dQ), and ln Q of each."""

    losses: Array
    log_q: Array
    lattice: float = 0.0  # if positive: losses are the first one plus multiples of this


@lru_cache(maxsize=256)
def outcomes(mechanism: Finite) -> Outcomes:
    """All outcomes but those of probability below 1e-300."""
    match mechanism:
        case PureDP(epsilon):
            # Randomised response dominates every epsilon-differentially private mechanism.
            return outcomes(RandomisedResponse(2, epsilon))
        case RandomisedResponse(options, epsilon):
            rest = math.log(options - 1) - epsilon  # of all other answers together, with the true one as 1
            true = -float(np.logaddexp(0.0, rest))
            if options == 2:
                return Outcomes(np.array([-epsilon, epsilon]), np.array([true, true - epsilon]), 2 * epsilon)
            neither = true - epsilon + math.log(options - 2)
            return Outcomes(np.array([-epsilon, 0.0, epsilon]), np.array([true, neither, true - epsilon]), epsilon)
        case DiscreteLaplace(scale, sensitivity):
            between = np.arange(1, sensitivity, dtype=np.float64)
            end = sensitivity / scale
            one_side = -float(np.log1p(np.exp(-1 / scale)))  # ln P(z <= 0)
            own = one_side + math.log(-math.expm1(-1 / scale))  # ln P(z = 0)
            losses = np.concatenate([[-end], (2 * between - sensitivity) / scale, [end]])
            return Outcomes(losses, np.concatenate([[one_side], own - between / scale, [one_side - end]]), 2 / scale)
        case DiscreteGaussian(scale, sensitivity):
            reach = math.ceil(38 * scale) + 1
            z = np.arange(-reach, reach + sensitivity + 1, dtype=np.float64)
            weights = -0.5 * (z / scale) ** 2
            log_q = weights - math.log(math.fsum(np.exp(weights)))
            return Outcomes(sensitivity * (2 * z - sensitivity) / (2 * scale * scale), log_q)
