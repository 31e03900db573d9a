"""The plan of a run: calibrated to its budget, or as many steps as the budget allows for a given noise."""

from dataclasses import dataclass, replace

from hush.accounting import NOTHING, Accountant, Budget, Event, calibrate, compose
from hush.accounting.approximate_noise import SET_ASIDE
from hush.plan import TOO_SMALL, Plan
from hush.sampling.lots import AllocatedLots, Lots, PoissonLots, ShuffledLots
from hush.training.options import Conduct, Job, Sampling


class PrivacyWarning(UserWarning):
    """Something that the guarantee allows and that a person should know."""


def make_plan(job: Job, conduct: Conduct, examples: int) -> Plan:
    """The plan with the least noise for the budget; with a given noise, the plan with the most steps (up to `epochs`).

    The second is the paper's "while within limit": one step more would exceed the budget, and is not taken.
    """
    lots = make_lots(conduct.sampling, examples, job.lot_size)
    steps = planned_steps(job, lots)
    spent = job.upfront.event if job.upfront is not None else NOTHING
    budget = conduct.budget
    if conduct.noise == "discrete":  # room for what inexact integers add to delta
        budget = Budget(epsilon=budget.epsilon, delta=budget.delta * (1 - 2 * SET_ASIDE))
    if conduct.noise_multiplier is None:
        plan = Plan.for_budget(
            budget,
            lots=lots,
            steps=steps,
            clip=job.clip,
            spent=spent,
            reserve=conduct.reserve,
            accountant=conduct.accountant,
        )
        return replace(plan, budget=conduct.budget)
    limit = _Limit(lots, conduct.noise_multiplier, budget, spent, conduct.accountant)
    steps = min(steps, limit.steps(at_most=steps + conduct.reserve) - conduct.reserve)
    if steps < 1:
        raise ValueError(
            f"the budget, epsilon {conduct.budget.epsilon:g} at delta {conduct.budget.delta:g}, does not allow one "
            f"step at noise multiplier {conduct.noise_multiplier:g} with {conduct.reserve} in reserve: add noise, or "
            "leave noise_multiplier out to have it found"
        )
    return Plan(
        lots=lots,
        steps=steps,
        clip=job.clip,
        noise_multiplier=conduct.noise_multiplier,
        reserve=conduct.reserve,
        spent=spent,
        budget=conduct.budget,
    )


def make_lots(sampling: Sampling, examples: int, lot_size: int) -> Lots:
    """Lots drawn the way that was asked for; `fit` draws them itself, so that what was accounted is what is run."""
    match sampling:
        case "poisson":
            return PoissonLots(examples, lot_size)
        case "allocated":
            return AllocatedLots(examples, lot_size)
        case "shuffled":
            return ShuffledLots(examples, lot_size)
    raise ValueError(f"sampling must be poisson, allocated or shuffled, got {sampling!r}")


def planned_steps(job: Job, lots: Lots) -> int:
    """Lots in all the epochs, or as many as the job says."""
    if job.steps is not None:
        return job.steps
    if not job.epochs > 0:
        raise ValueError(f"epochs must be a positive number, got {job.epochs!r}")
    return max(1, round(job.epochs * lots.steps_per_epoch))


def check_delta(delta: float, examples: int) -> str | None:
    """The warning where delta is so large that a mechanism publishing one whole record would satisfy it."""
    if delta * examples < 1:
        return None
    return (
        f"delta {delta:g} is not below 1 / N = {1 / examples:.2g}: a mechanism that publishes a random record "
        "as it is would be allowed by such a delta; choose one well below 1 / N"
    )


@dataclass(frozen=True)
class _Limit:
    lots: Lots
    noise: float
    budget: Budget
    spent: Event
    accountant: Accountant

    def steps(self, *, at_most: int) -> int:
        """The most steps, in whole units, that the budget allows at this noise."""
        if not self.noise >= TOO_SMALL:
            raise ValueError(f"noise_multiplier must be at least {TOO_SMALL}, got {self.noise!r}: less protects nobody")
        unit = self.lots.steps_per_unit
        found = calibrate.steps(
            lambda units: compose(self.lots.units(units * unit, self.noise)),
            self.budget,
            spent=self.spent,
            accountant=self.accountant,
            at_most=-(-at_most // unit),
        )
        return found * unit
