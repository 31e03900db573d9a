"""Events are values: they compose in normal form, refuse what no accountant knows, and survive JSON."""

import json

import pytest

from hush.accounting import (
    NOTHING,
    Allocated,
    Composed,
    Event,
    Gaussian,
    Grouped,
    Laplace,
    PoissonSampled,
    PureDP,
    Shuffled,
    compose,
    from_dict,
    grouped,
    parts_of,
    to_dict,
)

STEP = PoissonSampled(0.01, Gaussian(4.0))
EVERY_KIND = [
    Gaussian(4.0),
    Laplace(2.0),
    PureDP(0.5),
    STEP,
    Allocated(100, Gaussian(1.0)),
    Shuffled(100, Gaussian(1.0)),
    Grouped(3, STEP),
    NOTHING,
    STEP * 10 + Gaussian(7.0) + Allocated(10, Laplace(1.0)) * 2,
]


def test_counts_multiply_and_equal_events_are_counted_together() -> None:
    run = (STEP * 3 + Gaussian(7.0)) * 2 + STEP
    assert dict(parts_of(run)) == {STEP: 7, Gaussian(7.0): 2}


@pytest.mark.parametrize("event", EVERY_KIND, ids=repr)
def test_json_brings_back_the_same_event(event: Event) -> None:
    assert (
        from_dict(json.loads(json.dumps(to_dict(event)))) == compose([(event, 1)]) or from_dict(to_dict(event)) == event
    )


def test_from_dict_refuses_an_unknown_name() -> None:
    with pytest.raises(ValueError, match="Quantum"):
        from_dict({"kind": "Quantum", "noise_multiplier": 1.0})


@pytest.mark.parametrize("count", [2.0, -1, True, "3", None])
def test_hazard_18_a_count_that_is_not_a_whole_number_is_refused(count: object) -> None:
    with pytest.raises(ValueError, match="whole number"):
        STEP * count  # type: ignore[operator]


@pytest.mark.parametrize(
    "outer", [lambda e: PoissonSampled(0.1, e), lambda e: Allocated(5, e), lambda e: Shuffled(5, e)]
)
@pytest.mark.parametrize("inner", [STEP, Allocated(5, Gaussian(1.0)), Gaussian(1.0) * 2, Grouped(2, Gaussian(1.0))])
def test_nesting_that_no_theorem_covers_is_refused_by_name(outer, inner: Event) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=type(inner).__name__):
        outer(inner)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_noise_must_be_positive_and_finite(value: float) -> None:
    for kind in (Gaussian, Laplace):
        with pytest.raises(ValueError, match="noise_multiplier must be a positive number"):
            kind(value)


@pytest.mark.parametrize("rate", [-1e-9, 1.0000001, float("nan")])
def test_rate_must_lie_in_the_unit_interval(rate: float) -> None:
    with pytest.raises(ValueError, match="rate must lie in"):
        PoissonSampled(rate, Gaussian(1.0))


def test_every_event_names_its_adjacency() -> None:
    assert {event.adjacency for event in EVERY_KIND} == {"zero-out"}


def test_grouping_goes_mechanism_by_mechanism_and_one_record_is_no_group() -> None:
    run = STEP * 3 + Gaussian(7.0)
    assert dict(parts_of(grouped(run, 2))) == {Grouped(2, STEP): 3, Grouped(2, Gaussian(7.0)): 1}
    assert grouped(run, 1) == run
    with pytest.raises(ValueError, match="Grouped"):
        Grouped(2, Grouped(2, STEP))


def test_nothing_is_empty() -> None:
    assert STEP * 0 == NOTHING == Composed()
