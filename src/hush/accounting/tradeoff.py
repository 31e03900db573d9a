"""What a guarantee means for a test: of those that wrongly accuse seldom, how often can one be right?"""

import math
from collections.abc import Callable

import scipy

from hush.accounting.accountants import Accountant, delta
from hush.accounting.composition import Event


def true_positive_rate(event: Event, *, false_positive_rate: float, accountant: Accountant = "pld") -> float:
    """No test of "was this record in?" with this false positive rate is right more often than this, rounded up.

    At every epsilon a test's rates obey TPR <= e^epsilon FPR + delta and 1 - FPR <= e^epsilon (1 - TPR) + delta
    (Wasserman and Zhou 2010), so the smallest of both over the epsilons that were tried is a
    bound; the search only chooses them.

    >>> from hush.accounting.events import Gaussian
    >>> 0.2595 <= true_positive_rate(Gaussian(1.0), false_positive_rate=0.05) < 0.2596
    True
    """
    if not 0 < false_positive_rate < 1:
        raise ValueError(f"false_positive_rate must lie in (0, 1), got {false_positive_rate!r}")

    def cost(epsilon: float) -> float:
        return delta(event, epsilon=epsilon, accountant=accountant).upper

    def straight(epsilon: float) -> float:
        return math.exp(epsilon) * false_positive_rate + cost(epsilon)

    def turned(epsilon: float) -> float:
        return 1 - math.exp(-epsilon) * max(1 - false_positive_rate - cost(epsilon), 0.0)

    def least(of: Callable[[float], float], most: float) -> float:
        found = scipy.optimize.minimize_scalar(
            of, bounds=(0.0, most), method="bounded", options={"xatol": 1e-3, "maxiter": 20}
        )
        return min(1.0, of(0.0), float(found.fun)) * (1 + 1e-12)

    bound = least(straight, -math.log(false_positive_rate))  # beyond, it is above 1
    if (
        bound + false_positive_rate <= 1
    ):  # where the trade-off curve is steeper than 45 degrees, the first is the smaller
        return min(bound, 1.0)
    return min(bound, least(turned, 40.0), 1.0)
