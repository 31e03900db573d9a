"""Hockey-stick divergences by quadrature, closed forms and counting; nothing here knows about grids or FFTs."""

from math import comb

import mpmath as mp

mp.mp.dps = 40


def _cdf(x):
    return mp.erfc(-x / mp.sqrt(2)) / 2


def _density(x, mean, noise):
    return mp.exp(-(((x - mean) / noise) ** 2) / 2) / (noise * mp.sqrt(2 * mp.pi))


def gaussian_delta(noise, steps, epsilon):
    """Balle and Wang 2018, for `steps` Gaussian mechanisms."""
    mean = mp.sqrt(steps) / mp.mpf(noise)
    epsilon = mp.mpf(epsilon)
    return _cdf(mean / 2 - epsilon / mean) - mp.e**epsilon * _cdf(-mean / 2 - epsilon / mean)


def gaussian_epsilon(noise, steps, delta):
    """The epsilon of the analytic Gaussian, by bisection."""
    low, high = mp.mpf(0), mp.mpf(1)
    if gaussian_delta(noise, steps, 0) <= delta:
        return low
    while gaussian_delta(noise, steps, high) > delta:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if gaussian_delta(noise, steps, middle) > delta else (low, middle)
    return high


class SampledGaussian:
    """The Poisson-sampled Gaussian: with the record against without (`remove`), or the other way round."""

    def __init__(self, rate, noise, *, remove):
        self.rate, self.noise, self.remove = mp.mpf(rate), mp.mpf(noise), remove

    def loss(self, x):
        ratio = 1 - self.rate + self.rate * mp.e ** ((2 * x - 1) / (2 * self.noise**2))
        return mp.log(ratio) if self.remove else -mp.log(ratio)

    def density(self, x):
        if not self.remove:
            return _density(x, 0, self.noise)
        return (1 - self.rate) * _density(x, 0, self.noise) + self.rate * _density(x, 1, self.noise)

    def delta(self, epsilon):
        """One step: the set of outputs whose loss exceeds epsilon is a half line."""
        edge = (mp.e ** (epsilon if self.remove else -epsilon) - 1 + self.rate) / self.rate
        if edge <= 0:
            return 1 - mp.e**epsilon if self.remove else mp.mpf(0)
        x = self.noise**2 * mp.log(edge) + mp.mpf(1) / 2
        if self.remove:
            without, with_record = _cdf(-x / self.noise), _cdf((1 - x) / self.noise)
            return (1 - self.rate) * without + self.rate * with_record - mp.e**epsilon * without
        without, with_record = _cdf(x / self.noise), _cdf((x - 1) / self.noise)
        return without - mp.e**epsilon * ((1 - self.rate) * without + self.rate * with_record)

    def delta_of_two(self, epsilon):
        """Two steps: one integral over the first output, the second in closed form."""
        epsilon = mp.mpf(epsilon)
        span = [self.noise * k for k in range(-14, 15)]
        points = sorted(set(span) | {1 + s for s in span})
        with mp.workdps(25):
            return mp.quad(lambda x: self.density(x) * self.delta(epsilon - self.loss(x)), points)


def group_delta(size, rate, noise, epsilon):
    """One step of `size` records under Poisson sampling, both directions: quadrature of (P - e^epsilon Q)+."""
    chances = [comb(size, j) * mp.mpf(rate) ** j * (1 - mp.mpf(rate)) ** (size - j) for j in range(size + 1)]

    def ratio(x):
        return sum(c * mp.e ** (j * (2 * x - j) / (2 * mp.mpf(noise) ** 2)) for j, c in enumerate(chances))

    def tail(x, sign):
        without = _cdf(-sign * x / noise)
        return without, sum(c * _cdf(-sign * (x - j) / noise) for j, c in enumerate(chances))

    def edge(level):
        low, high = mp.mpf(-200), mp.mpf(200)
        for _ in range(120):
            middle = (low + high) / 2
            low, high = (middle, high) if ratio(middle) < level else (low, middle)
        return low

    without, with_group = tail(edge(mp.e**epsilon), 1)
    remove = with_group - mp.e**epsilon * without
    without, with_group = tail(edge(mp.e**-epsilon), -1)
    return max(remove, without - mp.e**epsilon * with_group)


def response_delta(epsilon, steps, at):
    """`steps` randomised responses: the loss is epsilon * (2 k - steps) with k binomial."""
    epsilon, at = mp.mpf(epsilon), mp.mpf(at)
    keep = mp.e**epsilon / (1 + mp.e**epsilon)
    total = mp.mpf(0)
    for k in range(steps + 1):
        loss = epsilon * (2 * k - steps)
        if loss > at:
            total += comb(steps, k) * keep**k * (1 - keep) ** (steps - k) * (1 - mp.e ** (at - loss))
    return total


def two_lots_delta(noise, epsilon):
    """One epoch of random allocation to two lots, both directions: R is the mean of two lognormal ratios."""
    mean = 1 / mp.mpf(noise)

    def call(strike):  # E[(X - strike)+], X lognormal with mean 1
        if strike <= 0:
            return 1 - strike
        at = mp.log(strike)
        return _cdf(mean / 2 - at / mean) - strike * _cdf(-mean / 2 - at / mean)

    def expected(level, of):
        with mp.workdps(25):
            points = [mp.mpf(k) for k in range(-14, 15)]
            return mp.quad(lambda z: _density(z, 0, 1) * of(2 * level - mp.e ** (mean * z - mean**2 / 2)) / 2, points)

    level = mp.e ** mp.mpf(epsilon)
    remove = expected(level, call)
    add = level * expected(1 / level, lambda strike: call(strike) - (1 - strike))
    return max(remove, add)
