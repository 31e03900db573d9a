"""Private selection: never below what is exact on small mechanisms, near it somewhere, and the published numbers."""

import itertools
import math
import time

import numpy as np
import pytest
from oracles import selection as oracle
from scipy import stats

from hush import accounting
from hush.accounting import (
    Either,
    Gaussian,
    Laplace,
    PoissonSampled,
    PureDP,
    Selected,
    Split,
    Trials,
    from_dict,
    grouped,
    pld,
    renyi,
    selection,
    to_dict,
)
from hush.accounting.gupta import gupta
from hush.accounting.selection import Profile, selected

RULES = [("geometric", 1.0), ("logarithmic", 1.0), ("negative-binomial", 2.5), ("poisson", 1.0), ("binomial", 40.0)]
TRAINING = PoissonSampled(0.01, Gaussian(4.0)) * 10_000  # the paper's example
DELTA = 1e-5


def test_the_formula_for_the_best_of_k_is_what_happens_when_it_is_run() -> None:
    output = np.array([0.5, 0.3, 0.15, 0.05])
    for rule in ("geometric", "poisson"):
        counts = oracle.drawn(output, rule, 3.0, 20_000, np.random.default_rng(1))
        expected = 20_000 * oracle.released(output, oracle.number_law(rule, 3.0))
        nothing = 20_000 - expected.sum()
        assert stats.chisquare([*counts, 20_000 - counts.sum() + 1e-9], [*expected, nothing + 1e-9]).pvalue > 1e-3


@pytest.mark.parametrize(("rule", "shape"), RULES)
@pytest.mark.parametrize("mean", [1.5, 12.0])
def test_trials_are_drawn_by_their_law(rule: str, shape: float, mean: float) -> None:
    trials, law = Trials(rule, mean, shape), oracle.number_law(rule, mean, shape)
    below = np.concatenate([[0.0], np.cumsum(law)])
    for k in range(min(len(law), 60)):
        if law[k] > 1e-6:  # the whole interval of uniform numbers that belongs to k, from end to end
            for share in (1e-6, 0.5, 1 - 1e-6):
                assert trials.draw(int((below[k] + share * law[k]) * 2**60), 60) == k
    assert trials.draw(0, 200) == (1 if trials.truncated else 0)
    assert trials.draw(2**200 - 1, 200) > mean  # ends, far out


@pytest.mark.parametrize(("rule", "shape"), RULES)
@pytest.mark.parametrize("mean", [1.5, 12.0])
def test_the_weight_is_the_derivative_of_the_generating_function(rule: str, shape: float, mean: float) -> None:
    law = oracle.number_law(rule, mean, shape)
    for t in (0.0, 1e-3, 0.3, 0.99):
        k = np.arange(1, len(law))
        expected = float(np.sum(k * law[1:] * (1 - t) ** (k - 1)))
        assert math.exp(Trials(rule, mean, shape).log_weight(np.array([t]))[0]) == pytest.approx(expected, rel=1e-6)


def small_mechanisms(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A pair of laws on a few outputs, from worst to best: noise added to a number, or a rare best output."""
    if rng.random() < 0.5:
        at, spread = np.arange(30.0), rng.choice([2.0, 4.0])
        one, other = (np.exp(-((at - centre) ** 2) / (2 * spread**2)) for centre in (14.0, 15.0))
        order = rng.permutation(30) if rng.random() < 0.5 else np.arange(30)[:: rng.choice([-1, 1])]
        return one[order] / one.sum(), other[order] / other.sum()
    epsilon, rare = rng.choice([0.1, 0.5, 1.0]), 10 ** rng.uniform(-4, -0.6)
    tip = rare * 10 ** rng.uniform(-3, -0.1)
    one = np.array([1 - rare, rare - tip, tip])
    other = one * np.exp([0.0, *rng.choice([-epsilon, epsilon], 2)])
    other[0] = 1 - other[1:].sum()
    return one, other


@pytest.mark.parametrize(("rule", "shape"), RULES)
def test_the_bound_is_above_the_exact_leak_and_within_a_factor_of_two_somewhere(rule: str, shape: float) -> None:
    rng, closest = np.random.default_rng(7), 0.0
    for mean in (1.5, 8.0, 30.0):
        law = oracle.number_law(rule, mean, shape)
        for _ in range(12):
            one, other = small_mechanisms(rng)
            top = float(np.abs(np.log(one / other)).max()) * (1 + 1e-9)
            losses = np.linspace(0, top, 120)
            trial = Profile(losses, np.array([oracle.leak(one, other, loss) for loss in losses]))
            bound = selected(trial, Trials(rule, mean, shape))
            winners = oracle.released(one, law), oracle.released(other, law)
            for epsilon in (0.0, 0.1 * top, 0.6 * top, top, 1.5 * top, 2.5 * top):
                exact, said = oracle.leak(*winners, epsilon), float(bound(np.array([epsilon]))[0])
                assert exact <= said + 1e-12 * math.exp(epsilon)
                if mean > 1.5 and epsilon >= 0.6 * top and said > 1e-6:
                    closest = max(closest, exact / said)
    assert closest > 0.5


@pytest.mark.parametrize(("rule", "shape"), RULES)
def test_few_layers_make_the_bound_wider_and_never_wrong(
    rule: str, shape: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cells are rounded to the private side, which a bound of many narrow cells would not show."""
    rng, law = np.random.default_rng(3), oracle.number_law(rule, 8.0, shape)
    for _ in range(10):
        one, other = small_mechanisms(rng)
        top = float(np.abs(np.log(one / other)).max()) * (1 + 1e-9)
        losses = np.linspace(0, top, 60)
        trial = Profile(losses, np.array([oracle.leak(one, other, loss) for loss in losses]))
        winners = oracle.released(one, law), oracle.released(other, law)
        fine = selected(trial, Trials(rule, 8.0, shape))
        monkeypatch.setattr(selection, "_LAYERS", 4)
        few = selected(trial, Trials(rule, 8.0, shape))
        monkeypatch.undo()
        for epsilon in np.linspace(0.0, 2.5 * top, 6):
            exact, said = oracle.leak(*winners, epsilon), float(few(np.array([epsilon]))[0])
            assert exact <= said + 1e-12 * math.exp(epsilon)
            assert said >= float(fine(np.array([epsilon]))[0]) * (1 - 1e-9)


@pytest.mark.parametrize(("rule", "shape"), RULES)
def test_every_cell_is_bounded_by_its_worst_point(rule: str, shape: float) -> None:
    """rho(t) = ln h(t) / h(t'), t' the most that a curve of losses allows above an output with t above it."""
    losses = np.linspace(0.0, 1.5, 40)
    trial = Profile(losses, np.array([accounting.delta(Gaussian(2.0), epsilon=float(a)).upper for a in losses]))
    trials, ends = Trials(rule, 8.0, shape), np.array([0.0, 0.01, 0.2, 0.5, 1.0])
    gaps = selection._gaps(trial, trials, ends, trials.log_fall(ends))
    both = np.concatenate([-losses, losses])
    for cell, (low, high) in enumerate(itertools.pairwise(ends)):
        t = np.linspace(low, high, 50)
        most = np.min(np.exp(both)[:, None] * t + trial.at(both)[:, None], axis=0)
        rho = trials.log_fall(np.minimum(most, 1.0)) - trials.log_fall(t)
        assert rho.max() <= gaps[cell]


def test_renyi_is_the_published_formula() -> None:
    """Papernot and Steinke 2022, Theorem 2, with the best second order sought on a grid."""
    seconds = np.geomspace(1.001, 1e4, 200_000)
    for rule, mean, eta in (("geometric", 50.0, 1.0), ("logarithmic", 50.0, 0.0)):
        gamma = Trials(rule, mean).stopping
        second = np.min((1 - 1 / seconds) * seconds / 32 + math.log(1 / gamma) / seconds)
        for order in (1.5, 5.0, 20.0):
            expected = order / 32 + (1 + eta) * second + math.log(mean) / (order - 1)
            assert renyi.divergence(Selected(Gaussian(4.0), rule, mean), order) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("rule", "shape"), RULES)
def test_events_of_randomised_response_by_every_accountant(rule: str, shape: float) -> None:
    """Mechanisms that are 0.7-private: randomised response, best answer either one; and rare best answers."""
    law, closest = oracle.number_law(rule, 6.0, shape), 0.0
    event = Selected(PureDP(0.7), rule, 6.0, shape)
    yes = 1 / (1 + math.exp(-0.7))
    pairs = [(np.array([1 - p, p]), np.array([p, 1 - p])) for p in (yes, 1 - yes)]
    for top in np.geomspace(1e-3, 0.4, 12):
        pairs.append((np.array([1 - top, top]), np.array([1 - top * math.exp(-0.7), top * math.exp(-0.7)])))
    for epsilon in (0.0, 0.3, 0.7, 1.0, 1.6):
        exact = max(oracle.leak(*(oracle.released(side, law) for side in pair), epsilon) for pair in pairs)
        said = accounting.delta(event, epsilon=epsilon).upper
        assert exact <= said <= renyi.delta(event, epsilon=epsilon).upper + 1e-15
        closest = max(closest, exact / said if said else 0.0)
    assert closest > 0.1  # the test above is the one that comes near
    for order in (1.5, 4.0, 30.0):
        exact = max(oracle.divergence(*(oracle.released(side, law) for side in pair), order) for pair in pairs)
        if rule in ("poisson", "binomial"):
            continue  # "nothing was run" is an output of its own there; see the next test
        assert exact <= renyi.divergence(event, order)


def test_renyi_of_poisson_trials_with_their_empty_outcome() -> None:
    law = oracle.number_law("poisson", 6.0)
    yes = 1 / (1 + math.exp(-0.7))
    for p in (yes, 1 - yes):
        one, other = (oracle.released(side, law) for side in (np.array([1 - p, p]), np.array([p, 1 - p])))
        one, other = np.append(one, law[0]), np.append(other, law[0])
        for order in (1.5, 4.0, 30.0):
            assert oracle.divergence(one, other, order) <= renyi.divergence(
                Selected(PureDP(0.7), "poisson", 6.0), order
            )


@pytest.mark.parametrize("shape", [0.0, 0.5, 1.0, 2.0, 5.0])
def test_pure_privacy_costs_two_plus_the_shape(shape: float) -> None:
    """Papernot and Steinke 2022, Corollary 3; the same numbers as the tests of Google's dp_accounting."""
    event = Selected(Laplace(2.0), "negative-binomial", 1000.0, shape)
    assert renyi.divergence(event, 1e10) == pytest.approx(0.5 * (2 + shape), abs=1e-6)
    assert accounting.epsilon(event, delta=1e-10).upper <= 0.5 * (2 + shape) * (1 + 1e-9)


def test_random_stopping_costs_three_epsilon() -> None:
    """Liu and Talwar 2019: 3 epsilon, whatever the mean."""
    assert renyi.divergence(Selected(PureDP(0.5), "geometric", 1e6), 1e9) == pytest.approx(1.5, abs=1e-6)


@pytest.mark.parametrize("mean", [50.0, 6700.0])
@pytest.mark.parametrize("rule", ["geometric", "logarithmic", "poisson"])
def test_never_above_the_published_bounds(rule: str, mean: float) -> None:
    """Renyi (Papernot and Steinke 2022), and one layer of the trial's profile (Koskela, Redberg, Wang 2024)."""
    event = Selected(TRAINING, rule, mean)
    epsilon = accounting.epsilon(event, delta=DELTA).upper
    assert epsilon <= renyi.epsilon(event, delta=DELTA).upper
    if rule == "poisson":
        return  # one layer is of no use here: the gap grows with the mean
    # One point (a, delta(a)) of the trial's profile bounds rho by (1 + eta) ln(e^a + delta(a) / gamma).
    gamma, eta = Trials(rule, mean).stopping, Trials(rule, mean).eta
    points = [(a, accounting.delta(TRAINING, epsilon=a).upper) for a in np.linspace(0.4, 1.0, 4)]
    gap = (1 + eta) * min(math.log(math.exp(a) + delta / gamma) for a, delta in points)
    assert epsilon <= gap + accounting.epsilon(TRAINING, delta=DELTA / mean).upper + 1e-3


def test_what_is_charged_in_the_end() -> None:
    """More trials cost more, a selection more than one trial, and far less than all of its trials."""
    costs = [
        accounting.epsilon(Selected(TRAINING, "geometric", mean), delta=DELTA).upper for mean in (5.0, 50.0, 500.0)
    ]
    alone = accounting.epsilon(TRAINING, delta=DELTA).upper
    assert alone < costs[0] < costs[1] < costs[2] < accounting.epsilon(TRAINING * 50, delta=DELTA).lower
    assert pld.epsilon(Selected(TRAINING, "geometric", 50.0), delta=DELTA).upper == pytest.approx(1.838, abs=0.002)


def test_a_selection_composes_with_what_else_is_done() -> None:
    chosen = Selected(PureDP(0.3), "geometric", 10.0)
    both = accounting.epsilon(chosen + Gaussian(3.0), delta=DELTA).upper
    alone = [accounting.epsilon(event, delta=DELTA / 2).upper for event in (chosen, Gaussian(3.0))]
    assert max(accounting.epsilon(event, delta=DELTA).upper for event in (chosen, Gaussian(3.0))) < both < sum(alone)
    twice = accounting.epsilon(chosen * 2, delta=DELTA).upper
    assert accounting.epsilon(chosen, delta=DELTA).upper < twice <= 2 * 0.9 + 1e-9


def test_one_of_several_mechanisms_costs_what_the_dearest_costs() -> None:
    for epsilon in (0.0, 0.5, 1.5):
        dearest = max(accounting.delta(event, epsilon=epsilon).upper for event in (Gaussian(2.0), Laplace(1.0)))
        said = accounting.delta(Either(Gaussian(2.0), Laplace(1.0)), epsilon=epsilon).upper
        assert dearest * (1 - 1e-9) <= said <= dearest * 1.02 + 1e-12
    for order in (1.5, 20.0):
        dearest = max(renyi.divergence(event, order) for event in (Gaussian(2.0), Laplace(1.0)))
        assert renyi.divergence(Either(Gaussian(2.0), Laplace(1.0)), order) == pytest.approx(dearest)


def test_tuning_on_a_part_of_the_data_exactly() -> None:
    """A record answers one of two randomised responses, by chance; or one of them, or none (a subset)."""
    yes, no = 1 / (1 + math.exp(-1.0)), 1 / (1 + math.exp(-0.4))

    def joint(first: float, second: float) -> np.ndarray:
        return np.outer([1 - first, first], [1 - second, second]).ravel()

    without = joint(1 - yes, 1 - no)
    split = 0.3 * joint(yes, 1 - no) + 0.7 * joint(1 - yes, no)
    subset = 0.3 * np.array([1 - yes, yes]) + 0.7 * np.array([yes, 1 - yes])
    for epsilon in (0.0, 0.2, 0.5):
        said = accounting.delta(Split(0.3, PureDP(1.0), PureDP(0.4)), epsilon=epsilon).upper
        assert oracle.leak(split, without, epsilon) <= said
        assert said == pytest.approx(
            0.3 * accounting.delta(PureDP(1.0), epsilon=epsilon).upper
            + 0.7 * accounting.delta(PureDP(0.4), epsilon=epsilon).upper,
            rel=0.03,
        )
        exact = oracle.leak(subset, np.array([yes, 1 - yes]), epsilon)
        chosen = Selected(PureDP(1.0), "geometric", 1.01)  # next to a single trial
        assert exact <= accounting.delta(PoissonSampled(0.3, chosen), epsilon=epsilon).upper
    for order in (1.5, 10.0):
        assert oracle.divergence(split, without, order) <= renyi.divergence(Split(0.3, PureDP(1.0), PureDP(0.4)), order)


def test_a_group_sees_a_selection_among_dearer_trials() -> None:
    event = grouped(Selected(Gaussian(4.0) * 2, "geometric", 10.0) * 3, 2)
    assert event == Selected(grouped(Gaussian(4.0) * 2, 2), "geometric", 10.0) * 3
    split = grouped(Split(0.5, PureDP(0.1), PureDP(0.2)) * 1, 2)  # two records may lie on both sides
    assert accounting.epsilon(split, delta=1e-9).upper == pytest.approx(0.6)


def test_events_are_kept_as_plain_values() -> None:
    event = Selected(Either(TRAINING, Gaussian(3.0)), "binomial", 5.0, 20.0) + Split(0.1, PureDP(0.5), Laplace(3.0))
    assert from_dict(to_dict(event)) == event


def test_what_cannot_be_answered_is_refused() -> None:
    for accountant in ("moments", "strong"):
        with pytest.raises(ValueError, match="Selected"):
            accounting.epsilon(Selected(TRAINING, "geometric", 50.0), delta=DELTA, accountant=accountant)
    assert renyi.epsilon(Selected(TRAINING, "binomial", 5.0, 20.0), delta=DELTA).upper == math.inf
    for rule, mean, shape in (
        ("fixed", 5.0, 1.0),
        ("geometric", 1.0, 1.0),
        ("geometric", math.nan, 1.0),
        ("poisson", 0.0, 1.0),
        ("binomial", 5.0, 5.0),
        ("binomial", 5.0, 7.5),
        ("negative-binomial", 5.0, -1.0),
    ):
        with pytest.raises(ValueError):
            Selected(TRAINING, rule, mean, shape)


def test_an_answer_takes_seconds_and_the_next_rule_less() -> None:
    event = PoissonSampled(0.004, Gaussian(0.9)) * 5_000
    began = time.process_time()
    for rule in ("geometric", "logarithmic", "poisson"):
        accounting.epsilon(Selected(event, rule, 100.0), delta=1e-6)
    assert time.process_time() - began < 20  # a loaded machine; 3 s alone


def test_the_papers_route_and_its_number_of_runs() -> None:
    """Appendix D: 50 and 6,700 settings, 1 % of 10,000 records lost; eps' = 1/2 itself is outside the theorem."""
    near = 0.5 - 1e-9
    assert [f"{gupta(k, eps_prime=near, failure=0.05).runs:.1e}" for k in (50, 6700)] == ["3.0e+07", "9.0e+11"]
    assert gupta(6700, eps_prime=near, failure=0.05).lost == pytest.approx(100, abs=0.1)
    assert gupta(6700, eps_prime=near, failure=0.05).epsilon == pytest.approx(4.0)
    assert gupta(6800, eps_prime=near, failure=0.05).lost > 100
    assert gupta(50, eps_prime=0.1, failure=0.05, run_epsilon=1.0).epsilon == pytest.approx(1.8)
    for settings, eps_prime, failure, run in (
        (50, 0.5, 0.05, 0),
        (0, 0.1, 0.1, 0),
        (5, 0.1, 1.0, 0),
        (5, 0.1, 0.1, math.inf),
    ):
        with pytest.raises(ValueError):
            gupta(settings, eps_prime=eps_prime, failure=failure, run_epsilon=run)
