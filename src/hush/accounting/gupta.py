"""The paper's route to tuning (appendix D): Gupta et al. 2010, Theorem 10.2, with its conditions and its price.

M is epsilon-private with delta = 0; a count q of sensitivity 1 is at least Q with probability p or more. Then for every
delta > 0 and every eps' strictly between 0 and 1/2 there is a mechanism that is (epsilon + 8 eps')-private and, but for
probability delta, reaches Q - (4 / eps') ln(1 / (eps' delta p)), by (1 / (eps' delta p))^2 ln(1 / (eps' delta p)) runs
of M. Where the count is over validation records that M never sees, max(epsilon, 8 eps') holds in place of the sum.

DP-SGD has a delta, so it is not such an M; and nobody can run it so often. It is here to be compared, not to be used.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Gupta:
    """What the theorem gives for K settings of which at least one is good: p = 1 / K."""

    epsilon: float
    """For the validation records; the training records have the epsilon of one run."""
    runs: float
    lost: float
    """At most so many records fewer than the target are right, but for the failure probability."""


def gupta(settings: int, *, eps_prime: float, failure: float, run_epsilon: float = 0.0) -> Gupta:
    """Theorem 10.2 for so many settings; `run_epsilon` only where validation and training records are the same.

    The paper's example has eps' = 1/2, which the open interval leaves out: the numbers are its limit.

    >>> found = gupta(50, eps_prime=0.49999, failure=0.05)
    >>> f"{found.runs:.1e}", round(found.epsilon, 3)
    ('3.0e+07', 4.0)
    """
    if not (isinstance(settings, int) and settings >= 1):
        raise ValueError(f"settings must be a whole number >= 1, got {settings!r}")
    if not 0 < eps_prime < 0.5:
        raise ValueError(f"eps' must lie strictly between 0 and 1/2 (the theorem's condition), got {eps_prime!r}")
    if not 0 < failure < 1:
        raise ValueError(f"the failure probability must lie in (0, 1), got {failure!r}")
    if not (run_epsilon >= 0 and math.isfinite(run_epsilon)):
        raise ValueError(f"the theorem needs a mechanism with a finite epsilon and delta = 0, got {run_epsilon!r}")
    odds = settings / (eps_prime * failure)
    return Gupta(run_epsilon + 8 * eps_prime, odds**2 * math.log(odds), 4 / eps_prime * math.log(odds))
