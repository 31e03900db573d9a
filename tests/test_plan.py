"""A plan is one event fixed before training: its units, its epsilon, its calibration, its life as JSON."""

import json
import math

import pytest

from hush import accounting
from hush.accounting import Allocated, Budget, Gaussian, PoissonSampled, Shuffled
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


@pytest.mark.parametrize(
    "lots", [LOTS, AllocatedLots(examples=1000, lot_size=10), ShuffledLots(examples=1000, lot_size=10)]
)
def test_hazard_25_calibration_never_passes_the_budget(lots: object) -> None:
    budget = Budget(epsilon=2.0, delta=1e-5)
    made = Plan.for_budget(
        budget,
        lots=lots,
        steps=150,
        clip=CLIP,
        spent=Gaussian(9.0),
        reserve=30,
        accountant="renyi",  # type: ignore[arg-type]
    )
    assert made.budget == budget and made.reserve == 30 and made.spent == Gaussian(9.0)
    upper = made.epsilon(delta=1e-5, accountant="renyi").upper
    assert 1.99 < upper <= 2.0
    looser = Plan.for_budget(budget, lots=lots, steps=150, clip=CLIP, accountant="renyi")  # type: ignore[arg-type]
    assert looser.noise_multiplier < made.noise_multiplier, "what was spent and what is reserved must be paid for"
    with pytest.raises(ValueError, match="already spent"):
        Plan.for_budget(budget, lots=lots, steps=1, clip=CLIP, spent=Gaussian(0.5), accountant="renyi")  # type: ignore[arg-type]


def test_calibration_with_the_default_accountant() -> None:
    made = Plan.for_budget(Budget(epsilon=1.0, delta=1e-5), lots=LOTS, steps=100, clip=CLIP)
    assert 0.99 < made.epsilon(delta=1e-5).upper <= 1.0


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
