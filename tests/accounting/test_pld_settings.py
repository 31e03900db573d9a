"""The whole range of settings: narrow, ordered, monotone, never above Renyi, no exception, little memory."""

import math
import resource

import numpy as np
import pytest

from hush import accounting
from hush.accounting import pld, renyi
from hush.accounting.events import Gaussian, PoissonSampled

CHUNKS = 10


def settings(count, seed):
    """Rates, noises, steps and deltas, each evenly spread over its logarithmic range, in random company."""
    rng = np.random.default_rng(seed)
    even = (rng.permuted(np.tile(np.arange(count), (4, 1)), axis=1) + rng.random((4, count))) / count
    rates = 10 ** (-8 * even[0])
    noises = 10 ** (math.log10(0.3) + even[1] * (3 - math.log10(0.3)))
    steps = np.maximum(1, np.rint(10 ** (7 * even[2]))).astype(int)
    deltas = 10 ** (-18 + even[3] * (18 + math.log10(0.5)))
    return [(float(r), float(n), int(s), float(d)) for r, n, s, d in zip(rates, noises, steps, deltas, strict=True)]


def ask(rate, noise, steps, delta):
    return pld.epsilon(PoissonSampled(rate, Gaussian(noise)) * steps, delta=delta)


def is_narrow(bounds):
    return bounds.upper - bounds.lower <= max(1e-3 * bounds.upper, 1e-4)


def check(chosen):
    wide = []
    for setting in chosen:
        bounds = ask(*setting)
        assert 0 <= bounds.lower <= bounds.upper < math.inf, setting
        if not is_narrow(bounds):
            wide.append((setting, bounds))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2 * 2**20  # kilobytes
    return wide


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_hazard_24_every_setting_has_a_narrow_interval(chunk):
    wide = check(settings(500, 2)[chunk::CHUNKS])
    assert [found for found in wide if found[0][3] >= 1e-12] == []
    assert len(wide) <= 2


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 110))
def test_many_more_settings(seed):
    wide = check(settings(300, seed))
    assert [found for found in wide if found[0][3] >= 1e-12] == []
    assert len(wide) <= 6


def test_monotone_in_every_argument_up_to_the_width():
    for rate, noise, steps, delta in settings(8, 3):
        steps = min(steps, 100_000)
        here = ask(rate, noise, steps, delta)
        for more in (
            (min(1.0, rate * 1.3), noise, steps, delta),
            (rate, noise / 1.3, steps, delta),
            (rate, noise, 2 * steps, delta),
            (rate, noise, steps, delta / 2),
        ):
            assert here.lower <= ask(*more).upper, (rate, noise, steps, delta, more)


def test_the_printed_upper_is_never_above_renyi():
    for rate, noise, steps, delta in settings(16, 4):
        event = PoissonSampled(rate, Gaussian(noise)) * steps
        printed = accounting.epsilon(event, delta=delta)
        assert printed.upper <= renyi.epsilon(event, delta=delta).upper
        # Taking the smaller of two valid bounds leaves the certified interval as it was, up to round-off.
        certified = pld.epsilon(event, delta=delta)
        assert printed.upper <= certified.upper
        assert printed.upper >= certified.lower * (1 - 1e-9) - 1e-12
