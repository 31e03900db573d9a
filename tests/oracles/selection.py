"""Selection among a random number of trials, worked out exactly on mechanisms with a few outputs."""

import math

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

Array = NDArray[np.float64]


def number_law(rule: str, mean: float, shape: float = 1.0) -> Array:
    """P(K = 0), P(K = 1), ... by scipy's laws, up to where nothing is left."""
    if rule == "poisson":
        law = stats.poisson(mean)
        return _until_nothing(law.pmf, law.sf)
    if rule == "binomial":
        law = stats.binom(int(shape), mean / shape)
        return np.asarray(law.pmf(np.arange(int(shape) + 1)))
    if rule == "geometric":
        law = stats.geom(1 / mean)
        return _until_nothing(law.pmf, law.sf)
    if rule == "logarithmic":
        share = optimize.brentq(lambda p: -p / (math.log1p(-p) * (1 - p)) - mean, 1e-9, 1 - 1e-12)
        law = stats.logser(share)
        return _until_nothing(law.pmf, law.sf)
    assert rule == "negative-binomial" and shape > 0

    def cut_mean(gamma: float) -> float:  # of a negative binomial that is not 0
        return shape * (1 - gamma) / gamma / (1 - gamma**shape)

    gamma = optimize.brentq(lambda gamma: cut_mean(gamma) - mean, 1e-9, 1 - 1e-9)
    law = stats.nbinom(shape, gamma)
    chances = _until_nothing(law.pmf, law.sf)
    chances[0] = 0.0
    return chances / (1 - law.pmf(0))


def released(output: Array, law: Array) -> Array:
    """The law of the best of K draws, outputs given from worst to best; what is left of 1 is "nothing was run"."""
    up_to = np.concatenate([[0.0], np.cumsum(output)])
    up_to[-1] = 1.0
    powers = np.arange(len(law), dtype=np.float64)
    return np.diff([float(np.sum(law * share**powers)) for share in up_to])


def leak(one: Array, other: Array, epsilon: float) -> float:
    """The exact delta at this epsilon, the larger of both directions."""
    scale = math.exp(epsilon)
    return max(float(np.maximum(one - scale * other, 0).sum()), float(np.maximum(other - scale * one, 0).sum()))


def divergence(one: Array, other: Array, order: float) -> float:
    """The exact Renyi divergence at this order, the larger of both directions."""
    both = [math.log(float(np.sum(p**order * q ** (1 - order)))) / (order - 1) for p, q in ((one, other), (other, one))]
    return max(both)


def drawn(output: Array, rule: str, mean: float, times: int, rng: np.random.Generator) -> Array:
    """How often each output is released when the selection is really run; what is left of `times` released nothing."""
    number = {"geometric": lambda: rng.geometric(1 / mean), "poisson": lambda: rng.poisson(mean)}[rule]
    counts = np.zeros(len(output))
    for _ in range(times):
        trials = rng.choice(len(output), size=number(), p=output)
        if len(trials):
            counts[trials.max()] += 1
    return counts


def _until_nothing(pmf, sf) -> Array:  # type: ignore[no-untyped-def]
    last = 1
    while sf(last) > 1e-17 and last < 200_000:
        last *= 2
    return np.asarray(pmf(np.arange(last + 1)))
