"""Theorem 1 of Abadi et al. 2016, with the constants its proof gives and every condition that the proof needs.

"There are constants c1 and c2 so that for any epsilon < c1 q^2 T the algorithm is (epsilon, delta)-private for any
delta > 0 if sigma >= c2 q sqrt(T ln(1/delta)) / epsilon." The proof takes alpha(lambda) <= T q^2 lambda^2 / sigma^2 and
asks for T q^2 lambda^2 / sigma^2 <= lambda epsilon / 2 and exp(-lambda epsilon / 2) <= delta: with the smallest such
(real) lambda the first is c2 = 2, and lambda <= sigma^2 ln(1/(q sigma)) is epsilon <= 2 ln(1/(q sigma)) q^2 T, where
q < 1/(16 sigma) makes the factor at least C1.

Nothing is charged by it: it says how noise, steps and epsilon go together. `unmet` names what is assumed and does not
hold; where it is empty the statement still rests on a moment bound that is an estimate (`moments.asymptotic`).
"""

import math

from hush.accounting.accountants import epsilon as epsilon_of
from hush.accounting.events import Gaussian, PoissonSampled

C1, C2 = 2 * math.log(16), 2.0


def noise(*, rate: float, steps: int, epsilon: float, delta: float, c2: float = C2) -> float:
    """The noise multiplier that the theorem asks for.

    >>> round(noise(rate=0.01, steps=10_000, epsilon=1.0, delta=1e-5), 2)
    6.79
    """
    return c2 * rate * math.sqrt(steps * math.log(1 / delta)) / epsilon


def measured_c2(*, rate: float, noise: float, steps: int, delta: float) -> float:
    """sigma epsilon / (q sqrt(T ln(1/delta))) with the epsilon that the default accountant finds.

    >>> round(measured_c2(rate=0.01, noise=4.0, steps=10_000, delta=1e-5), 2)
    1.12
    """
    spent = epsilon_of(PoissonSampled(rate, Gaussian(noise)) * steps, delta=delta).upper
    return noise * spent / (rate * math.sqrt(steps * math.log(1 / delta)))


def unmet(*, rate: float, noise: float, steps: int, epsilon: float, delta: float) -> list[str]:
    """The proof's inequalities and assumptions that fail, in words; lambda is the smallest that delta allows.

    >>> unmet(rate=0.01, noise=6.79, steps=10_000, epsilon=1.0, delta=1e-5)
    ['q < 1/(16 sigma) is assumed: 0.01 against 0.009205']
    """
    order = 2 * math.log(1 / delta) / epsilon
    found = []
    if order < 1:
        found.append(f"lambda >= 1 is assumed: {order:.4g}, because delta is {delta:g}")
    if steps * (rate * order / noise) ** 2 > order * epsilon / 2 * (1 + 1e-9):
        found.append(f"T q^2 lambda^2 / sigma^2 <= lambda epsilon / 2 fails at lambda = {order:.4g}")
    if noise < 1:
        found.append(f"sigma >= 1 is assumed: {noise:.4g}")
    if rate >= 1 / (16 * noise):
        found.append(f"q < 1/(16 sigma) is assumed: {rate:.4g} against {1 / (16 * noise):.4g}")
    if rate * noise >= 1 or order > noise**2 * math.log(1 / (rate * noise)):
        found.append(f"lambda <= sigma^2 ln(1/(q sigma)) fails at lambda = {order:.4g}")
    return found
