"""What it costs to run a mechanism a random number of times and to release the best result only.

A trial has output law Q. K trials are run, K drawn from a law with generating function f, and the best by a total order
is released. With q the share of Q below an output, the released law has density f'(q) with respect to Q (Papernot and
Steinke 2022, Lemma 7; ties are ordered by a coin that no data decides). Write t = 1 - q and h(t) = f'(1 - t), which
falls in t. On the neighbouring data the same output has a share t' above it, and the trial's profile bounds it:

    t' <= e^a t + delta(a)   for every a, negative ones included.

Hence h(t) / h(t') <= e^rho(t), and with g the density of the neighbour's trial against Q, the selection's profile is

    delta_selected(epsilon) <= integral of h(t) [1 - e^(epsilon - rho(t)) g(t)]+ dt.

Cut h into layers, h = sum of w_i 1[t <= t_i]: layer i costs at most w_i min(t_i, delta(epsilon - max rho up to t_i)).
One layer for everything, E[K] delta(epsilon - max rho), is the form of Koskela, Redberg and Wang 2024; every layer
is at most its share of that, so the sum is never larger.

A trial that fails is an outcome of the trial and counts. Nothing but the released trial may be shown, K included.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import cached_property

import numpy as np
import scipy
from numpy.typing import NDArray

Array = NDArray[np.float64]
RULES = ("geometric", "logarithmic", "negative-binomial", "poisson", "binomial")
_LAYERS = 600
_ROUND_UP = 1 + 1e-9  # for a few hundred additions and exponentials, each off by some 1e-15


@dataclass(frozen=True)
class Trials:
    """The law of the number of trials K, by its mean.

    `geometric` stops at random after each trial (Liu and Talwar 2019); `logarithmic` is 0 and `geometric` 1 on the
    scale of `shape` that `negative-binomial` leaves free (from -0.5; Papernot and Steinke 2022, all cut at K >= 1);
    `poisson` and `binomial` (at most `shape` trials) may draw K = 0, when nothing is run and nothing released.

    >>> Trials("geometric", mean=50).stopping
    0.02
    """

    rule: str
    mean: float
    shape: float = 1.0

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ValueError(f"the rule must be one of {', '.join(RULES)}, got {self.rule!r}")
        if not (self.mean > 0 and math.isfinite(self.mean) and self.mean <= 1e9):
            raise ValueError(f"the mean number of trials must be a number in (0, 1e9], got {self.mean!r}")
        if self.truncated and self.mean < 1.001:
            raise ValueError(f"{self.rule} trials have a mean above 1, got {self.mean!r}; one trial needs no rule")
        if not -0.5 <= self.shape <= (100 if self.rule == "negative-binomial" else 1e9):
            raise ValueError(f"the shape must lie in [-0.5, 100] for negative-binomial trials, got {self.shape!r}")
        if self.rule == "binomial" and not (self.shape == int(self.shape) and self.shape > self.mean):
            raise ValueError(
                f"binomial trials need a whole shape (the most trials) above their mean, got {self.shape!r}"
            )

    @property
    def truncated(self) -> bool:
        """Whether K >= 1 always: the negative binomial family."""
        return self.rule in RULES[:3]

    @property
    def eta(self) -> float:
        """The shape of the negative binomial."""
        return {"geometric": 1.0, "logarithmic": 0.0}.get(self.rule, self.shape)

    @cached_property
    def stopping(self) -> float:
        """Gamma of the negative binomial family; of geometric trials the chance to stop after each one."""
        if self.eta == 1:
            return 1 / self.mean
        gap = scipy.optimize.brentq(
            lambda log_gamma: self._log_slope(math.exp(log_gamma)) - math.log(self.mean), -80, -1e-9
        )
        return math.exp(gap)

    def _log_slope(self, gamma: float) -> float:
        """ln E[K] = ln f'(1) at this gamma."""
        log = -math.log(gamma)
        power = self.eta * log
        size = abs(power)
        # ln(power / (e^power - 1)), for any power
        scale = math.log(size) - math.log1p(-math.exp(-size)) - max(power, 0.0) if size > 1e-9 else -power / 2
        return math.log1p(-gamma) - math.log(log) + scale + (1 + self.eta) * log

    def log_weight(self, t: Array) -> Array:
        """ln h(t) = ln f'(1 - t)."""
        return self._log_mean - self.log_fall(t)

    @property
    def _log_mean(self) -> float:
        return self._log_slope(self.stopping) if self.truncated else math.log(self.mean)

    def log_fall(self, t: Array) -> Array:
        """ln h(0) / h(t) = ln f'(1) / f'(1 - t), for t in [0, 1]."""
        if self.truncated:
            gamma = self.stopping
            return (1 + self.eta) * np.log1p((1 - gamma) / gamma * t)
        if self.rule == "poisson":
            return self.mean * t
        return -(self.shape - 1) * np.log1p(-self.mean / self.shape * t)

    def draw(self, uniform: int, bits: int) -> int:
        """The K at which the law's distribution function passes uniform / 2^bits, computed to 60 digits."""
        with localcontext() as context:
            context.prec = 80
            level = (Decimal(uniform) + Decimal("0.5")) / Decimal(2) ** bits
            count, chance, ratio = self._first()
            total = chance
            while total < level:
                factor = ratio(count)
                if factor <= 0:
                    break
                chance *= factor
                count += 1
                total += chance
                if chance < Decimal(10) ** -75 and count > 2 * self.mean:
                    break
            return count

    def _first(self) -> tuple[int, Decimal, Callable[[int], Decimal]]:
        """The smallest K, its probability, and P(K + 1) / P(K) as a function of K."""
        if self.rule == "poisson":
            mean = Decimal(self.mean)
            return 0, (-mean).exp(), lambda k: mean / (k + 1)
        if self.rule == "binomial":
            most, share = int(self.shape), Decimal(self.mean) / Decimal(self.shape)
            return 0, (1 - share) ** most, lambda k: share / (1 - share) * (most - k) / (k + 1)
        gamma, eta = Decimal(self.stopping), Decimal(self.eta)
        rest = 1 - gamma
        first = rest / -gamma.ln() if eta == 0 else eta * rest / ((-eta * gamma.ln()).exp() - 1)
        return 1, first, lambda k: rest * (k + eta) / (k + 1)


@dataclass(frozen=True)
class Profile:
    """Upper bounds on delta of one trial at losses >= 0, in both directions of adjacency."""

    losses: Array
    deltas: Array

    def __post_init__(self) -> None:
        falling = np.minimum.accumulate(np.minimum(self.deltas, 1.0))  # delta falls, so an earlier bound still holds
        object.__setattr__(self, "deltas", falling)

    def at(self, losses: Array) -> Array:
        """The bound between the knots, where chords in e^loss lie above a convex curve; beyond them; and below 0.

        The profile at -a follows from the other direction: 1 - e^-a + e^-a delta(a).
        """
        distance = np.abs(losses)
        right = np.clip(np.searchsorted(self.losses, distance, side="right"), 1, len(self.losses) - 1)
        low, high = self.losses[right - 1], self.losses[right]
        share = np.clip(np.expm1(np.minimum(distance - low, high - low)) / np.expm1(high - low), 0.0, 1.0)
        call = (1 - share) * self.deltas[right - 1] + share * self.deltas[right]
        put = -np.expm1(-distance) + np.exp(-np.minimum(distance, 700.0)) * call
        return np.minimum(np.where(losses >= 0, call, put), 1.0)


def selected(trial: Profile, trials: Trials) -> Callable[[Array], Array]:
    """The profile of the selection: upper bounds on delta at epsilons >= 0, in both directions."""
    ends = np.concatenate([[0.0], np.geomspace(1e-4 / max(trials.mean, 1.0), 1.0, _LAYERS)])
    fall = trials.log_fall(ends)
    heights = np.exp(trials._log_mean - fall)
    weights = -np.diff(heights)
    weights[-1] = heights[-2]
    gaps = np.maximum.accumulate(_gaps(trial, trials, ends, fall))

    def profile(epsilons: Array) -> Array:
        losses = np.asarray(epsilons, dtype=np.float64)[:, None] - gaps
        layers = np.minimum(ends[1:], trial.at(losses.ravel()).reshape(losses.shape))
        return np.minimum((layers @ weights) * _ROUND_UP, 1.0)

    return profile


def _gaps(trial: Profile, trials: Trials, ends: Array, fall: Array) -> Array:
    """Upper bounds on rho in each cell of t.

    For one a, ln h(t) - ln h(e^a t + delta(a)) has no turn inside a cell (a quotient of two linear functions, or
    linear), so the larger of its two ends bounds the cell; where the line passes 1, t' = 1 takes its place.
    """
    losses = np.concatenate([-trial.losses[:0:-1], trial.losses])
    slopes, offsets = np.exp(np.minimum(losses, 700.0)), trial.at(losses)
    best = float(trials.log_fall(np.ones(1))[0]) - fall[:-1]  # t' = 1
    for slope, offset in zip(slopes, offsets, strict=True):
        above = slope * ends + offset
        inside = above[1:] < 1
        moved = trials.log_fall(np.minimum(above, 1.0)) - fall
        best = np.where(inside, np.minimum(best, np.maximum(moved[:-1], moved[1:])), best)
    return np.maximum(best, 0.0) * _ROUND_UP + 1e-12


def pure_epsilon(trial: float, trials: Trials) -> float:
    """Epsilon of the selection where a trial is epsilon-private with delta = 0 (Papernot and Steinke, Corollary 3)."""
    if trials.truncated:
        return (2 + trials.eta) * trial
    gap = math.tanh(trial / 2)  # the most by which two shares differ
    if trials.rule == "poisson":
        return trial + trials.mean * gap
    return trial + (trials.shape - 1) * min(trial, -math.log1p(-trials.mean / trials.shape))


def renyi_divergence(
    divergence: Callable[[float], float], log_delta: Callable[[float], float], trials: Trials, order: float
) -> float:
    """The Renyi divergence of the selection at one order, from that of a trial (Papernot and Steinke 2022).

    Theorem 2 for the negative binomial family, Theorem 6 for Poisson, which needs ln(delta) of a trial at one epsilon;
    infinite for binomial trials, of which no Renyi theorem is known here.
    """
    share = trials._log_mean / (order - 1)
    if trials.truncated:
        return divergence(order) + (1 + trials.eta) * _second_order(divergence, trials.stopping) + share
    if trials.rule == "poisson":
        epsilon = math.log1p(1 / (order - 1)) * (1 - 1e-12)
        return divergence(order) + trials.mean * math.exp(min(log_delta(epsilon), 0.0)) + max(share, 0.0)
    return math.inf


def _second_order(divergence: Callable[[float], float], stopping: float) -> float:
    """The least (1 - 1/s) D(s) + ln(1/gamma) / s over orders s > 1; any s gives a bound."""

    def at(log_beta: float) -> float:
        order = 1 + math.exp(log_beta)
        return (1 - 1 / order) * divergence(order) - math.log(stopping) / order

    rungs = np.linspace(-12.0, 20.0, 33)
    values = [at(rung) for rung in rungs]
    best = int(np.argmin(values))
    low, high = rungs[max(best - 1, 0)], rungs[min(best + 1, len(rungs) - 1)]
    refined = scipy.optimize.minimize_scalar(at, bounds=(low, high), method="bounded", options={"xatol": 1e-4})
    return min(values[best], float(refined.fun))
