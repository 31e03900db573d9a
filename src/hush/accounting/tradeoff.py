"""What a guarantee means for a test: of those that wrongly accuse seldom, how often can one be right?"""

import math

from scipy.optimize import minimize_scalar

from hush.accounting.accountants import Accountant, delta
from hush.accounting.composition import Event


def true_positive_rate(event: Event, *, false_positive_rate: float, accountant: Accountant = "pld") -> float:
    """No test of "was this record in?" with this false positive rate is right more often than this, rounded up.

    At every epsilon a test's rates obey TPR <= e^epsilon FPR + delta and 1 - FPR <= e^epsilon (1 - TPR) + delta
    (Wasserman and Zhou 2010), so the smallest of both over the epsilons that were tried is a bound; the search only chooses them.

    >>> from hush.accounting.events import Gaussian
    >>> 0.2595 <= true_positive_rate(Gaussian(1.0), false_positive_rate=0.05) < 0.2596
    True
    """
    if not 0 < false_positive_rate < 1:
        raise ValueError(f"false_positive_rate must lie in (0, 1), got {false_positive_rate!r}")

    def bound(epsilon: float) -> float:
        cost = delta(event, epsilon=epsilon, accountant=accountant).upper
        straight = math.exp(epsilon) * false_positive_rate + cost
        turned = 1 - math.exp(-epsilon) * max(1 - false_positive_rate - cost, 0.0)
        return min(straight, turned, 1.0)

    # Beyond ln(1 / FPR) the first bound is above 1; the second is best near ln(1 / (1 - FPR)) or beyond.
    most = max(-math.log(false_positive_rate), -math.log1p(-false_positive_rate), 1.0)
    found = minimize_scalar(bound, bounds=(0.0, most), method="bounded", options={"xatol": 1e-4, "maxiter": 40})
    return min(1.0, min(bound(0.0), float(found.fun)) * (1 + 1e-12))
