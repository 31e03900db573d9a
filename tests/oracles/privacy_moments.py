"""Privacy moments and exact curves in high precision (mpmath) or by plain grids; written from the definitions only."""

import mpmath as mp
import numpy as np


def log_moment_sampled_gaussian(rate: float, noise: float, power: float, size: int = 1) -> mp.mpf:
    """ln E_{z ~ N(0, s^2)}[(sum_j Binomial(size, rate)_j N(j, s^2)(z) / N(0, s^2)(z))^power]."""
    with mp.workdps(32):
        q, s, p = mp.mpf(rate), mp.mpf(noise), mp.mpf(power)
        weights = [mp.binomial(size, j) * q**j * (1 - q) ** (size - j) for j in range(size + 1)]

        def integrand(z: mp.mpf) -> mp.mpf:
            ratio = mp.fsum(w * mp.exp(j * (2 * z - j) / (2 * s * s)) for j, w in enumerate(weights) if w)
            return mp.exp(p * mp.log(ratio) - z * z / (2 * s * s)) / (s * mp.sqrt(2 * mp.pi))

        peaks = [mp.mpf(0), size * p] if p > 0 else [size * p, mp.mpf(0)]
        edges = [peaks[0] - 12 * s]
        while edges[-1] < peaks[1] + 12 * s:
            edges.append(edges[-1] + min(4 * s, 6 * s * s))
        return mp.log(mp.quad(integrand, edges, method="gauss-legendre", maxdegree=5))


def log_moment_sampled_laplace(rate: float, noise: float, power: float) -> mp.mpf:
    """The same for Laplace noise of scale `noise` and sensitivity 1."""
    with mp.workdps(40):
        q, b, p = mp.mpf(rate), mp.mpf(noise), mp.mpf(power)

        def integrand(z: mp.mpf) -> mp.mpf:
            return mp.exp(-abs(z) / b) / (2 * b) * (1 - q + q * mp.exp((abs(z) - abs(z - 1)) / b)) ** p

        inside = [mp.mpf(k) / 8 for k in range(9)]
        return mp.log(mp.quad(integrand, [-200 * b, -20 * b, *inside, 1 + 20 * b, 1 + 200 * b]))


def log_moment_randomised_response(rate: float, epsilon: float, power: float) -> mp.mpf:
    """The same for randomised response: two outcomes."""
    with mp.workdps(60):
        q, p, likely = mp.mpf(rate), mp.mpf(power), 1 / (1 + mp.exp(-mp.mpf(epsilon)))
        up, down = likely / (1 - likely), (1 - likely) / likely
        return mp.log((1 - likely) * (1 - q + q * up) ** p + likely * (1 - q + q * down) ** p)


def log_moment_two_lots(noise: float, power: float) -> float:
    """Allocation to one of two lots: E over the plane of ((r(x) + r(y)) / 2)^power, by a plain two-dimensional sum."""
    z = np.arange(-abs(power) - 10 * noise - 1, abs(power) + 10 * noise + 1, noise / 12)
    weight = np.exp(-0.5 * (z / noise) ** 2) * (1 / 12) / np.sqrt(2 * np.pi)
    ratio = np.exp((2 * z - 1) / (2 * noise**2))
    mean = (ratio[:, None] + ratio[None, :]) / 2
    return float(np.log((weight[:, None] * weight[None, :] * mean**power).sum()))


def gaussian_delta(noise: float, epsilon: float, count: int = 1) -> mp.mpf:
    """The exact delta of `count` Gaussian mechanisms: they are one, with noise / sqrt(count)."""
    with mp.workdps(60):
        s, e = mp.mpf(noise) / mp.sqrt(count), mp.mpf(epsilon)
        return mp.ncdf(1 / (2 * s) - e * s) - mp.exp(e) * mp.ncdf(-1 / (2 * s) - e * s)


def gaussian_epsilon(noise: float, delta: float, count: int = 1) -> float:
    """The exact epsilon of `count` Gaussian mechanisms, by bisection."""
    low, high = 0.0, 1.0
    if gaussian_delta(noise, 0.0, count) <= delta:
        return 0.0
    while gaussian_delta(noise, high, count) > delta:
        low, high = high, 2 * high
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if gaussian_delta(noise, middle, count) > delta else (low, middle)
    return high


def sampled_gaussian_delta(rate: float, noise: float, epsilon: float) -> mp.mpf:
    """The exact delta of one Poisson-sampled Gaussian, the larger of both directions, from normal tails."""
    with mp.workdps(60):
        q, s, grown = mp.mpf(rate), mp.mpf(noise), mp.exp(mp.mpf(epsilon))
        with_record = mp.mpf(0)
        cut = s * s * mp.log((grown - 1 + q) / q) + mp.mpf(1) / 2  # mixture / plain exceeds e^eps beyond here
        with_record = (1 - q) * mp.ncdf(-cut / s) + q * mp.ncdf((1 - cut) / s) - grown * mp.ncdf(-cut / s)
        without_record = mp.mpf(0)
        if 1 / grown > 1 - q:  # plain / mixture exceeds e^eps before here
            cut = s * s * mp.log((1 / grown - 1 + q) / q) + mp.mpf(1) / 2
            without_record = mp.ncdf(cut / s) * (1 - grown * (1 - q)) - grown * q * mp.ncdf((cut - 1) / s)
        return max(with_record, without_record)


def sampled_group_delta(rate: float, noise: float, *, epsilon: float, size: int) -> float:
    """The delta of a group of `size` records under Poisson sampling, with against without, by a plain sum."""
    z = np.linspace(-10 * noise, size + 10 * noise, 400_001)
    densities = [np.exp(-0.5 * ((z - j) / noise) ** 2) / (noise * np.sqrt(2 * np.pi)) for j in range(size + 1)]
    mixture = sum(float(mp.binomial(size, j)) * rate**j * (1 - rate) ** (size - j) * d for j, d in enumerate(densities))
    return float(np.maximum(mixture - np.exp(epsilon) * densities[0], 0).sum() * (z[1] - z[0]))
