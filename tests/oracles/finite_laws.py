"""Privacy losses by counting outcomes, mixtures of Gaussians by a plain sum over the line: from definitions only."""

from itertools import combinations

import mpmath as mp
import numpy as np


def randomised_response(options, epsilon):
    """Both laws, answer by answer: the record answers 0, the null record answers 1."""
    with mp.workdps(50):
        kept = mp.e ** mp.mpf(epsilon)
        total = kept + options - 1
        return [(kept if i == 0 else mp.mpf(1)) / total for i in range(options)], [
            (kept if i == 1 else mp.mpf(1)) / total for i in range(options)
        ]


def whole_noise(weight, sensitivity, reach):
    """Both laws of a whole number with noise of this weight, on [-reach, reach + sensitivity]."""
    with mp.workdps(50):
        total = mp.fsum(weight(mp.mpf(z)) for z in range(-3 * reach, 3 * reach + 1))
        places = range(-reach, reach + sensitivity + 1)
        return [weight(mp.mpf(z - sensitivity)) / total for z in places], [weight(mp.mpf(z)) / total for z in places]


def composed(*laws):
    """The laws of several mechanisms together: every combination of outcomes."""
    p, q = [mp.mpf(1)], [mp.mpf(1)]
    for with_record, without in laws:
        p, q = [a * b for a in p for b in with_record], [a * b for a in q for b in without]
    return p, q


def delta(laws, epsilon):
    """sup over events of P - e^epsilon Q, in both directions."""
    with mp.workdps(50):
        grown = mp.e ** mp.mpf(epsilon)
        one = mp.fsum(max(a - grown * b, mp.mpf(0)) for a, b in zip(*laws, strict=True))
        other = mp.fsum(max(b - grown * a, mp.mpf(0)) for a, b in zip(*laws, strict=True))
        return max(one, other)


def with_failure(laws, probability):
    """The laws where with this probability everything is told: an outcome of its own for each."""
    p, q = laws
    rest = 1 - mp.mpf(probability)
    return [*(rest * a for a in p), mp.mpf(probability), mp.mpf(0)], [
        *(rest * b for b in q),
        mp.mpf(0),
        mp.mpf(probability),
    ]


def lots_delta(lots, contributions, noise, epsilon):
    """Delta of one noisy sum over a random lot: (probability, rows) of each lot; row 0 is the record, or null."""
    x = np.linspace(-12 * noise - 6, 12 * noise + 6, 200_001)

    def law(first):
        total = np.zeros_like(x)
        for chance, rows in lots:
            mean = sum(first if row == 0 else contributions[row - 1] for row in rows)
            total += chance * np.exp(-0.5 * ((x - mean) / noise) ** 2)
        return total / (noise * np.sqrt(2 * np.pi))

    p, q, width = law(1.0), law(0.0), x[1] - x[0]
    return max(
        float(np.maximum(p - np.exp(epsilon) * q, 0).sum() * width),
        float(np.maximum(q - np.exp(epsilon) * p, 0).sum() * width),
    )


def fixed_lots(examples, lot_size):
    """Every lot of this size, equally likely."""
    lots = list(combinations(range(examples), lot_size))
    return [(1 / len(lots), lot) for lot in lots]


def truncated_lots(examples, rate, largest):
    """Poisson lots; of one that is too large, `largest` rows at random."""
    chances = {}
    for size in range(examples + 1):
        for drawn in combinations(range(examples), size):
            chance = rate**size * (1 - rate) ** (examples - size)
            kept = list(combinations(drawn, min(size, largest)))
            for lot in kept:
                chances[lot] = chances.get(lot, 0.0) + chance / len(kept)
    return [(chance, lot) for lot, chance in chances.items()]
