"""Composition is an algebra, and accountants see only its value: order, grouping and splitting do not matter."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hush.accounting import (
    NOTHING,
    Allocated,
    Composed,
    DiscreteLaplace,
    Event,
    Gaussian,
    Laplace,
    PoissonSampled,
    PureDP,
    Shuffled,
    compose,
    from_dict,
    moments,
    parts_of,
    renyi,
    to_dict,
)

noises = st.sampled_from([0.8, 1.5, 4.0, 20.0])
mechanisms = st.one_of(noises.map(Gaussian), noises.map(Laplace), st.sampled_from([0.01, 0.3]).map(PureDP))
events = st.one_of(
    mechanisms,
    st.builds(PoissonSampled, st.sampled_from([0.0, 1e-4, 0.1, 1.0]), mechanisms),
    st.builds(Shuffled, st.sampled_from([1, 10]), mechanisms),
    st.builds(Allocated, st.sampled_from([1, 8]), noises.map(Gaussian)),
)
counts = st.integers(0, 5000)


@given(events, events, events, counts, counts)
def test_composition_is_commutative_associative_and_splits(a: Event, b: Event, c: Event, m: int, n: int) -> None:
    assert a + b == b + a
    assert (a + b) + c == a + (b + c)
    assert a * (m + n) == a * m + a * n
    assert (a + b) * n == a * n + b * n
    assert (a * m) * n == a * (m * n)
    assert a * n + NOTHING == a * n
    assert hash(a + b) == hash(b + a)


@settings(max_examples=25, deadline=None)
@given(events, events, st.integers(1, 50), st.integers(1, 50))
@pytest.mark.parametrize("accountant", [renyi, moments], ids=lambda m: m.__name__)
def test_accountants_follow_the_algebra(accountant, a: Event, b: Event, m: int, n: int) -> None:  # type: ignore[no-untyped-def]
    whole = accountant.epsilon(a * (m + n) + b, delta=1e-6).upper
    split = accountant.epsilon(b + a * n + a * m, delta=1e-6).upper
    assert whole == split
    assert accountant.epsilon(a * m + NOTHING, delta=1e-6) == accountant.epsilon(a * m, delta=1e-6)
    part = accountant.epsilon(a * m, delta=1e-6).upper
    assert part <= whole * (1 + 1e-7) + 1e-12


@settings(max_examples=25, deadline=None)
@given(events, events, st.integers(2, 40), st.sampled_from([1.1, 2.0, 8.5, 33.0]))
def test_divergences_add_up_with_their_counts(a: Event, b: Event, n: int, order: float) -> None:
    alone = n * renyi.divergence(a, order) + renyi.divergence(b, order)
    assert math.isclose(renyi.divergence(a * n + b, order), alone, rel_tol=1e-9, abs_tol=1e-300)


G = Gaussian(4.0)


@pytest.mark.parametrize("count", [-1, -99, 2.5, 2.0, np.float64(3), True, np.True_, "3", None, math.nan])
def test_hazard_39_nothing_composed_is_a_refund(count: object) -> None:
    """Wherever an event is made: 100 uses less 99 were once charged as one."""
    for build in (
        lambda: compose([(G, 100), (G, count)]),  # type: ignore[list-item]
        lambda: Composed(((G, count),)),  # type: ignore[arg-type]
        lambda: G * count,  # type: ignore[operator]
        lambda: from_dict({"kind": "Composed", "parts": [[to_dict(G), 100], [to_dict(G), count]]}),
        lambda: Composed(((G * 2, 1),)),
        lambda: compose([("Gaussian", 1)]),  # type: ignore[list-item]
        lambda: Allocated(count, G) if count is not True else Allocated(0, G),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match=r"whole number|single events|expected an event"):
            build()


def test_numpys_numbers_are_pythons() -> None:
    run = PoissonSampled(np.float64(0.25), Gaussian(np.float32(4.0))) * np.int64(7)
    assert run == PoissonSampled(0.25, Gaussian(4.0)) * 7
    assert from_dict(json.loads(json.dumps(to_dict(run)))) == run
    assert Allocated(np.int32(5), G) == Allocated(5, G)
    for wrong in (True, "4", None, 4j, [4.0], 1e-101, 1e101, math.inf):
        with pytest.raises(ValueError, match="noise_multiplier"):
            Gaussian(wrong)  # type: ignore[arg-type]


def test_counts_and_fields_have_ranges() -> None:
    assert parts_of(G * 10**15) == ((G, 10**15),)
    with pytest.raises(ValueError, match=r"at most 10\^15"):
        G * 10**15 + G
    for wrong in ({"kind": "Gaussian"}, {"kind": "Gaussian", "noise_multiplier": 1.0, "count": 2}):
        with pytest.raises(ValueError, match="Gaussian does not hold"):
            from_dict(wrong)
    with pytest.raises(ValueError, match="at most"):
        DiscreteLaplace(1.0, 10**7)
