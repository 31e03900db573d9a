"""Naive and strong composition: the baselines of the paper's Figure 2, each named for what it is.

`epsilon` and `delta` are valid bounds. `paper_epsilon` is the curve the paper prints (9.34, 24.22); it amplifies eps0
to q eps0, which is a theorem for eps0 <= 1 only, while eps0 is about 1.46 there. It is kept for comparison and marked
invalid.
"""

import math

import scipy

from hush.accounting.bounds import Bounds
from hush.accounting.events import Event, Gaussian, PoissonSampled, parts_of
from hush.accounting.failures import answers_delta, answers_epsilon
from hush.accounting.reductions import coarse, pure_epsilon, pure_total, refuse, require_delta

PAPER_SHARE = 0.48  # T q d0 = 0.48 delta: the split of delta that gives both of the paper's printed digits


@answers_epsilon
def epsilon(event: Event, *, delta: float) -> Bounds:
    """Strong composition with valid steps (or naive composition where that is smaller); the lower bound is 0.

    Each Gaussian is (eps0, d0)-private, amplified to (ln(1 + q (e^eps0 - 1)), q d0); then
    eps = sqrt(2 ln(1/d'') sum eps_i^2) + sum eps_i^2 with sum q d0 + d'' = delta, the split of delta optimised. This is
    Dwork, Rothblum, Vadhan 2010 in the paper's form; sum eps_i^2 is at least the sum eps_i tanh(eps_i / 2) of Kairouz,
    Oh, Viswanath 2015, Theorem 3.5, so the form is valid for every eps_i.
    """
    return Bounds(0.0, _least_over_split(event, delta))


@answers_epsilon
def naive_epsilon(event: Event, *, delta: float) -> Bounds:
    """Basic composition: the epsilons and the deltas add up."""
    return Bounds(0.0, _steps_epsilon(event, delta, delta, strong=False))


@answers_delta
def delta(event: Event, *, epsilon: float) -> Bounds:
    """The smallest delta (to 1e-6, rounded up) at which strong composition gives this epsilon; 1 if none does."""

    def within(log_delta: float) -> bool:
        return _least_over_split(event, math.exp(log_delta)) <= epsilon

    low, high = math.log(1e-300), math.log1p(-1e-12)
    if within(low):
        return Bounds(0.0, 1e-300 if epsilon < pure_total(event) else 0.0)
    if not within(high):
        return Bounds(0.0, 1.0)
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (low, middle) if within(middle) else (middle, high)
    return Bounds(0.0, math.exp(high))


def paper_epsilon(event: Event, *, delta: float) -> Bounds:
    """NOT a valid bound: strong composition as the paper computes it, for T lots of one Poisson-sampled Gaussian.

    eps0 = sqrt(2 ln(1.25/d0)) / sigma, amplified to (q eps0, q d0), in all q eps0 sqrt(2 T ln(1/d'')) + T (q eps0)^2.
    """
    require_delta(delta)
    match parts_of(event):
        case ((PoissonSampled(rate, Gaussian(noise)), steps),) if rate > 0:
            pass
        case () | ((PoissonSampled(_, Gaussian()), _),):
            return Bounds(0.0, 0.0)
        case _:
            raise ValueError("the paper's strong composition covers repetitions of one Poisson-sampled Gaussian only")
    step_delta = PAPER_SHARE * delta / (steps * rate)
    step_epsilon = rate * math.sqrt(2 * math.log(1.25 / min(step_delta, 1.0))) / noise
    rest = (1 - PAPER_SHARE) * delta
    return Bounds(0.0, step_epsilon * math.sqrt(2 * steps * math.log(1 / rest)) + steps * step_epsilon**2)


def gaussian_delta(noise: float, epsilon: float) -> float:
    """The exact delta of one Gaussian mechanism at epsilon (Balle and Wang 2018, Theorem 8)."""
    below, above = 0.5 / noise - epsilon * noise, -0.5 / noise - epsilon * noise
    log_first, log_second = scipy.special.log_ndtr(below), epsilon + scipy.special.log_ndtr(above)
    return float(math.exp(log_first) * -math.expm1(min(log_second - log_first, 0.0)))


def _least_over_split(event: Event, delta: float) -> float:
    """The best share of delta for the steps themselves; any share gives a valid bound."""
    naive = _steps_epsilon(event, delta, delta, strong=False)
    if not math.isfinite(naive) or naive == 0:
        return naive

    def at(logit: float) -> float:
        share = 1 / (1 + math.exp(-logit))
        return _steps_epsilon(event, share * delta, (1 - share) * delta, strong=True)

    return min(
        naive,
        float(scipy.optimize.minimize_scalar(at, bounds=(-12, 12), method="bounded", options={"xatol": 1e-4}).fun),
    )


def _steps_epsilon(event: Event, steps_delta: float, rest: float, *, strong: bool) -> float:
    """Compose all steps, their deltas together steps_delta; strong composition spends `rest` besides."""
    simple = [(coarse(part), count) for part, count in parts_of(event)]
    noisy = sum(count for part, count in simple if not math.isfinite(pure_epsilon(part)) and _rate(part) > 0)
    each = [(_amplified(part, steps_delta / noisy if noisy else 0.0), count) for part, count in simple]
    total = math.fsum(count * cost for cost, count in each) * (1 + 1e-12)  # rounded up, as `pure_total` is
    if not strong or not 0 < total < math.inf:
        return total
    norm = total * math.sqrt(math.fsum(count * (cost / total) ** 2 for cost, count in each))  # squares may underflow
    return min(total, norm * (math.sqrt(2 * math.log(1 / rest)) + norm))


def _amplified(part: Event, step_delta: float) -> float:
    """Epsilon of one step at an amplified delta of step_delta."""
    known = pure_epsilon(part)
    if math.isfinite(known):
        return known
    rate = _rate(part)
    if rate == 0:
        return 0.0
    mechanism = part.event if isinstance(part, PoissonSampled) else part
    if not isinstance(mechanism, Gaussian):
        raise refuse(part)
    each = _gaussian_epsilon(mechanism.noise_multiplier, min(step_delta / rate, 1.0))
    return math.log1p(rate * math.expm1(each)) if each < 700 else each


def _rate(part: Event) -> float:
    return part.rate if isinstance(part, PoissonSampled) else 1.0


def _gaussian_epsilon(noise: float, delta: float) -> float:
    """The textbook sqrt(2 ln(1.25/delta)) / sigma where the exact curve confirms it, otherwise the exact epsilon.

    The textbook's theorem asks for epsilon < 1; beyond, it holds or fails case by case, so it is checked.
    """
    textbook = math.sqrt(2 * math.log(1.25 / delta)) / noise
    if gaussian_delta(noise, textbook) <= delta:
        return textbook
    low, high = textbook, 2 * textbook + 1
    while gaussian_delta(noise, high) > delta:
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if gaussian_delta(noise, middle) > delta else (low, middle)
    return high
