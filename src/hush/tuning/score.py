"""A score from private records: a count with noise, and what it costs."""

from hush.accounting.events import Gaussian
from hush.randomness.rounded_gaussian import rounded_gaussian
from hush.randomness.streams import Key


def private_count(count: int, *, noise_multiplier: float, key: Key | None = None) -> int:
    """A count of records (right answers, say) with Gaussian noise, rounded to a whole number: a score for a Trial.

    Guarantee: the event `Gaussian(noise_multiplier)`, for a count that one record moves by at most 1; give it to the
    trial as `score_event`. The noise is drawn exactly. `key` is for tests.

    >>> abs(private_count(9_000, noise_multiplier=10.0) - 9_000) < 150
    True
    """
    if isinstance(count, bool) or not isinstance(count, int):
        raise ValueError("expected a count, a whole number: one record moves it by at most 1")
    event = Gaussian(noise_multiplier)  # refuses what is no noise
    claim = (Key.from_os() if key is None else key).claim("private count")
    (noise,) = rounded_gaussian(claim.subkey(), claim.step, sigma=event.noise_multiplier, first=0, count=1)
    return count + int(noise)
