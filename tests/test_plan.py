"""A plan is one event fixed before training: its units, its epsilon, its calibration, its life as JSON."""

import json
import math
from typing import Any

import pytest

from hush import accounting
from hush.accounting import Allocated, Budget, Gaussian, PoissonSampled, Shuffled, compose
from hush.accounting.approximate_noise import SET_ASIDE
from hush.clipping.clips import AutomaticClip, FlatClip, PerLayerClip, QuantileClip
from hush.plan import Plan
from hush.sampling.lots import AllocatedLots, PoissonLots, ShuffledLots

LOTS = PoissonLots(examples=1000, lot_size=10)
CLIP = FlatClip(1.0)


def plan(**changes: object) -> Plan:
    return Plan(**({"lots": LOTS, "steps": 20, "clip": CLIP, "noise_multiplier": 1.5} | changes))  # type: ignore[arg-type]


def test_event_and_units() -> None:
    step = PoissonSampled(0.01, Gaussian(1.5))
    assert plan().units == ((step, 20),)
    assert plan().event == step * 20
    assert plan().event_after(7) == step * 7
    with_more = plan(reserve=5, preprocessing=Gaussian(7.0))
    assert with_more.units == ((step, 25),)
    assert with_more.event == step * 25 + Gaussian(7.0)
    assert with_more.event_after(0) == Gaussian(7.0) * 1
    with pytest.raises(ValueError, match="20 steps and 5 in reserve, got 26"):
        with_more.event_after(26)


def test_a_begun_epoch_counts_whole() -> None:
    allocated = plan(lots=AllocatedLots(examples=100, lot_size=10), steps=25)
    assert allocated.event == Allocated(10, Gaussian(1.5)) * 3
    assert allocated.event_after(1) == allocated.event_after(10) == Allocated(10, Gaussian(1.5)) * 1
    assert (
        plan(lots=ShuffledLots(examples=100, lot_size=10), steps=25).event_after(11) == Shuffled(10, Gaussian(1.5)) * 2
    )


def test_epsilon_is_the_accountants_answer() -> None:
    one = plan(preprocessing=Gaussian(9.0))
    for accountant in ("pld", "renyi", "moments"):
        expected = accounting.epsilon(one.event, delta=1e-5, accountant=accountant)  # type: ignore[arg-type]
        assert one.epsilon(delta=1e-5, accountant=accountant) == expected  # type: ignore[arg-type]


def for_budget(budget: Budget, **changes: Any) -> Plan:
    return Plan.for_budget(budget, **{"examples": 1000, "lot_size": 10, "steps": 150, "clip": CLIP} | changes)


@pytest.mark.parametrize("sampling", ["poisson", "allocated", "shuffled"])
def test_hazard_25_calibration_never_passes_the_budget(sampling: str) -> None:
    budget = Budget(epsilon=2.0, delta=1e-5)
    made = for_budget(budget, sampling=sampling, preprocessing=Gaussian(9.0), reserve=30, accountant="renyi")
    assert made.budget == budget and made.reserve == 30 and made.preprocessing == Gaussian(9.0)
    assert type(made.lots).__name__.lower() == f"{sampling}lots" and made.lots.lot_size == 10
    assert made.epsilon(delta=1e-5) == made.epsilon(delta=1e-5, accountant="renyi"), "a plan knows its accountant"
    assert 1.99 < made.epsilon(delta=1e-5).upper <= 2.0
    looser = for_budget(budget, sampling=sampling, accountant="renyi")
    assert looser.noise_multiplier < made.noise_multiplier, "what was spent and what is reserved must be paid for"
    with pytest.raises(ValueError, match="already spent"):
        for_budget(budget, sampling=sampling, preprocessing=Gaussian(0.5), accountant="renyi")


def test_calibration_with_the_default_accountant() -> None:
    made = for_budget(Budget(epsilon=1.0, delta=1e-5), steps=100)
    assert 0.99 < made.epsilon(delta=1e-5).upper <= 1.0


def test_epochs_and_steps_are_two_ways_to_say_one_thing() -> None:
    budget = Budget(epsilon=1.0, delta=1e-5)
    assert for_budget(budget, steps=None, epochs=1.5, accountant="renyi").steps == 150
    for given in ({"epochs": 1.0}, {"steps": None}):
        with pytest.raises(ValueError, match="give epochs or steps, one of the two"):
            for_budget(budget, **given)
    with pytest.raises(ValueError, match="epochs must be a number from 0 to 1e9, and not 0, got -1"):
        for_budget(budget, steps=None, epochs=-1)
    with pytest.raises(ValueError, match="sampling must be one of poisson, allocated, shuffled; got 'cyclic'"):
        for_budget(budget, sampling="cyclic")


def test_a_noise_schedule_is_a_shape_that_is_scaled_to_the_budget() -> None:
    budget = Budget(epsilon=2.0, delta=1e-5)
    made = for_budget(budget, steps=20, reserve=5, noise_schedule=lambda step: 3.0 + 0.3 * step, accountant="renyi")
    noise = made.noise_multiplier
    assert isinstance(noise, tuple) and len(noise) == 25
    assert [value / noise[0] for value in noise] == pytest.approx([1 + 0.1 * step for step in range(25)])
    assert 1.99 < made.epsilon(delta=1e-5).upper <= 2.0
    event = compose([(PoissonSampled(0.01, Gaussian(value)), 1) for value in noise])
    assert accounting.epsilon(event, delta=1e-5, accountant="renyi").upper <= 2.0
    steady = for_budget(budget, steps=20, noise_schedule=lambda step: 7.0, accountant="renyi")
    assert steady.noise_multiplier == for_budget(budget, steps=20, accountant="renyi").noise_multiplier
    for wrong in (lambda step: 0.0, lambda step: math.nan):
        with pytest.raises(ValueError, match="finite number > 0 for each charged step"):
            for_budget(budget, noise_schedule=wrong)
    with pytest.raises(ValueError, match="leave noise_multiplier out"):
        for_budget(budget, noise_schedule=lambda step: 1.0, noise_multiplier=1.0)


def test_a_given_noise_takes_as_many_steps_as_fit() -> None:
    budget, unit = Budget(epsilon=0.6, delta=1e-5), PoissonSampled(0.01, Gaussian(1.0))
    made = for_budget(budget, steps=5000, noise_multiplier=1.0, reserve=3)
    assert made.cut_short and accounting.epsilon(unit * (made.steps + 3), delta=1e-5).upper <= 0.6
    assert accounting.epsilon(unit * (made.steps + 4), delta=1e-5).upper > 0.6
    few = for_budget(budget, steps=5, noise_multiplier=1.0)
    assert few.steps == 5 and not few.cut_short
    with pytest.raises(ValueError, match="does not allow one step"):
        for_budget(Budget(epsilon=0.01, delta=1e-9), noise_multiplier=0.3)


def test_float_safe_noise_leaves_room_in_delta() -> None:
    budget = Budget(epsilon=2.0, delta=1e-5)
    made = for_budget(budget, steps=20, noise="float_safe", accountant="renyi")
    assert made.noise == "float_safe" and made.budget == budget
    assert made.epsilon(delta=1e-5 * (1 - 2 * SET_ASIDE)).upper <= 2.0
    with pytest.raises(ValueError, match="noise must be one of 'gaussian', 'float_safe'; got 'laplace'"):
        for_budget(budget, noise="laplace")


@pytest.mark.parametrize(("noise", "lower"), [(0.0, math.inf), (0.005, 0.0)])
def test_no_noise_is_not_private_and_says_so(noise: float, lower: float) -> None:
    bare = plan(noise_multiplier=noise)
    assert not bare.private and "NOT PRIVATE" in str(bare)
    assert bare.epsilon(delta=1e-5).upper == math.inf and bare.epsilon(delta=1e-5).lower == lower
    assert plan().private and "NOT PRIVATE" not in str(plan())
    mixed = plan(noise_multiplier=tuple([1.0] * 19 + [0.0]))
    assert not mixed.private and mixed.epsilon(delta=1e-5).upper == math.inf
    with pytest.raises(ValueError, match="NOT PRIVATE"):
        _ = plan(noise_multiplier=0.0).event


def test_schedules_are_written_out() -> None:
    ramp = plan(
        noise_multiplier=lambda step: 1.0 + (step >= 12), reserve=2, clip=FlatClip(lambda step: 1.0 / (1 + step))
    )
    assert ramp.units == ((PoissonSampled(0.01, Gaussian(1.0)), 12), (PoissonSampled(0.01, Gaussian(2.0)), 10))
    assert [ramp.noise_at(t) for t in (0, 11, 12, 21)] == [1.0, 1.0, 2.0, 2.0]
    assert ramp.clip.at(3) == FlatClip(0.25)
    assert plan(noise_multiplier=lambda step: 1.5) == plan()
    epochs = plan(lots=ShuffledLots(examples=100, lot_size=10), noise_multiplier=lambda step: 3.0 - 0.1 * step)
    assert epochs.event == Shuffled(10, Gaussian(3.0 - 0.1 * 9)) + Shuffled(10, Gaussian(3.0 - 0.1 * 19))
    with pytest.raises(ValueError, match="one value for each of 20 steps, got 3"):
        plan(noise_multiplier=(1.0, 2.0, 3.0))
    with pytest.raises(ValueError, match="clipping bound"):
        plan(clip=FlatClip(lambda step: 5.0 - step))


@pytest.mark.parametrize(
    "clip",
    [
        FlatClip(0.7),
        FlatClip(lambda step: 1.0 + step),
        PerLayerClip({"conv*": 2.0, "*": lambda step: 1.0 + step}),
        PerLayerClip(3.0),
        AutomaticClip(2.0, stability=0.1),
        QuantileClip(initial=1.0, quantile=0.4, count_noise=30.0),
    ],
)
def test_plans_as_json(clip: object) -> None:
    one = plan(clip=clip, noise_multiplier=lambda step: 1.0 + 0.1 * step, reserve=1, preprocessing=Gaussian(3.0) * 2)
    two = plan(clip=clip, lots=AllocatedLots(examples=100, lot_size=10), budget=Budget(epsilon=1.0, delta=1e-6))
    for made in (one, two):
        again = Plan.from_dict(json.loads(json.dumps(made.to_dict())))
        assert again == made and again.event == made.event and again.clip.at(5) == made.clip.at(5)
    with pytest.raises(ValueError, match=r"expected one of FlatClip.*got 'Soft'"):
        Plan.from_dict(one.to_dict() | {"clip": {"kind": "Soft"}})


def test_hazard_12_the_count_of_a_quantile_clip_is_part_of_the_joint_noise() -> None:
    joint = plan(clip=QuantileClip(initial=1.0, count_noise=20.0), noise_multiplier=1.5)
    assert joint.event == plan().event, "the plan's noise multiplier is the joint one, whatever the clip"
    with pytest.raises(ValueError, match="count_noise"):
        plan(clip=QuantileClip(initial=1.0, count_noise=1.0))


def test_what_makes_no_sense_is_refused() -> None:
    for changes, message in (
        ({"steps": 0}, "steps must be a whole number >= 1"),
        ({"steps": 2.0}, "steps must be a whole number"),
        ({"reserve": -1}, "reserve must be a whole number >= 0"),
        ({"noise_multiplier": -1.0}, "noise_multiplier must be a finite number"),
        ({"noise_multiplier": math.inf}, "noise_multiplier must be a finite number"),
    ):
        with pytest.raises(ValueError, match=message):
            plan(**changes)
    with pytest.raises(TypeError, match="lots must be PoissonLots"):
        plan(lots=0.01)
    with pytest.raises(TypeError, match="clip must be FlatClip"):
        plan(clip=1.0)


def test_hazard_18_planned_and_charged_steps_are_the_same_integer() -> None:
    for n in (93, 153, 1000, 2999, 9_999):
        lots = PoissonLots(examples=n, lot_size=1)
        steps = 3 * lots.steps_per_epoch
        assert sum(count for _, count in plan(lots=lots, steps=steps).units) == 3 * n
