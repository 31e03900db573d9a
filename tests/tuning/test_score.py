"""A private count: its noise has the law that is charged."""

import numpy as np
import pytest
from scipy import stats

from hush.randomness.streams import Key
from hush.tuning import private_count


@pytest.mark.parametrize("noise", [0.7, 12.0])
def test_the_noise_is_a_rounded_gaussian_and_never_the_same_twice(noise: float) -> None:
    key = Key.from_seed(5)
    drawn = np.array([private_count(100, noise_multiplier=noise, key=key) - 100 for _ in range(1500)])
    edges = np.quantile(np.unique(drawn), [0.0, 0.3, 0.45, 0.55, 0.7, 1.0])[1:-1].round() + 0.5
    counts = np.histogram(drawn, bins=[-np.inf, *np.unique(edges), np.inf])[0]
    expected = np.diff(stats.norm.cdf([-np.inf, *np.unique(edges) / noise, np.inf])) * len(drawn)
    assert stats.chisquare(counts, expected).pvalue > 1e-4
    assert len({private_count(0, noise_multiplier=1e6) for _ in range(20)}) == 20


def test_what_is_no_count_is_refused() -> None:
    for count in (0.93, True, None):
        with pytest.raises(ValueError, match="whole number"):
            private_count(count, noise_multiplier=1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="noise_multiplier"):
        private_count(1, noise_multiplier=0.0)
