"""What the certificate rests on, piece by piece: grids above and below the curve, and the errors of the composition."""

import math
from itertools import product

import mpmath as mp
import numpy as np
import pytest
from scipy.special import erfcx, ndtr

from hush.accounting.events import Gaussian, Laplace, PureDP
from hush.accounting.pld import curves, query
from hush.accounting.pld import exact as single
from hush.accounting.pld.allocated import allocated
from hush.accounting.pld.compose import Window, compose
from hush.accounting.pld.discretise import Grid, optimistic, pessimistic
from hush.accounting.pld.group import group
from hush.accounting.pld.jumps import split

BASES = {
    "gaussian": curves.of_mechanism(Gaussian(0.8)),
    "laplace": curves.of_mechanism(Laplace(1.3)),
    "response": curves.of_mechanism(PureDP(1.1)),
    "sampled": curves.sampled(curves.of_mechanism(Gaussian(0.6)), 0.05),
    "rarely sampled": curves.sampled(curves.of_mechanism(Gaussian(0.4)), 1e-6),
    "sampled laplace": curves.sampled(curves.of_mechanism(Laplace(0.5)), 0.2),
    "sampled response": curves.sampled(curves.of_mechanism(PureDP(2.0)), 0.01),
    "group": group(4, 0.1, 1.5),
    "allocated": allocated(Gaussian(1.5), 4, delta=1e-8),
}


def curve_of(grid: Grid, epsilons):
    gaps = np.minimum(np.subtract.outer(epsilons, grid.losses), 0.0)
    return -np.expm1(gaps) @ grid.masses + grid.infinite


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("step", [0.3, 0.037, 0.0021])
@pytest.mark.parametrize("name", BASES)
def test_grids_lie_above_and_below_the_curve_everywhere(name, step, backwards):
    curve = BASES[name].reversed() if backwards else BASES[name]
    first, last = -math.ceil(3 / step), math.ceil(5 / step)
    above, below = pessimistic(curve, first, last, step), optimistic(curve, first, last, step)
    # Between the knots as well, where a chord or a kink could cross; and beyond the last one, where mass is cut off.
    epsilons = np.unique(
        np.concatenate([np.linspace(-2.9, 6.5, 801), np.geomspace(1e-8, 1, 60), -np.geomspace(1e-8, 1, 60)])
    )
    call, error = curve.call(np.maximum(epsilons, 0.0))
    put, put_error = curve.put(np.minimum(epsilons, 0.0))
    exact = np.where(epsilons >= 0, call, put - np.expm1(np.minimum(epsilons, 0.0)))
    slack = np.where(epsilons >= 0, error, put_error) + 1e-14 * np.maximum(-epsilons, 1e-4 * call)
    assert np.all(curve_of(above, epsilons) >= exact - slack)
    assert np.all(curve_of(below, epsilons) <= exact + slack)
    assert np.all(above.masses >= 0)
    assert np.all(below.masses >= 0)


def test_grids_close_in_as_the_square_of_the_step():
    curve, epsilons = BASES["sampled"], np.linspace(0.05, 2.0, 50)
    exact = curve.call(epsilons)[0]
    widths = []
    for step in (0.02, 0.01, 0.005):
        above, below = (make(curve, -30, math.ceil(15 / step), step) for make in (pessimistic, optimistic))
        widths.append(np.max((curve_of(above, epsilons) - curve_of(below, epsilons)) / exact))
    assert widths[1] < widths[0] / 2.5
    assert widths[2] < widths[1] / 2.5


@pytest.mark.parametrize(("count", "tilt"), list(product((2, 7, 40), (0.0, 1.5, 6.0))))
def test_composition_holds_the_exact_sum(count, tilt):
    rng = np.random.default_rng(count)
    masses = rng.random(60) ** 8
    masses /= masses.sum()
    grid = Grid(0.05, -0.013, -30, masses, 1e-7)
    exact = np.array([1.0], dtype=np.longdouble)
    for _ in range(count):
        exact = np.convolve(exact, masses.astype(np.longdouble))
    losses = count * (-0.013) + 0.05 * (np.arange(len(exact)) - 30 * count)
    centre = float(np.average(losses, weights=(exact * np.exp(tilt * losses)).astype(float)))
    spread = 1.5 * math.sqrt(count)
    size = 1 << math.ceil(math.log2(2.4 * spread / 0.05))
    tail = compose([(grid, count)], Window(tilt, centre - 1.2 * spread, size, 4 / spread, 4 / spread))
    for epsilon in np.linspace(max(0.0, centre - spread / 3), centre + spread / 2, 9):
        delta = float(np.sum(exact * np.maximum(0.0, -np.expm1(np.minimum(epsilon - losses, 0.0)))))
        low, high, _ = tail.delta(float(epsilon))
        assert low <= delta * (1 + 1e-13)
        assert delta + count * 1e-7 * 0.99 <= high
        assert high >= low


@pytest.mark.parametrize("counts", [(1,), (6,), (3, 2)])
def test_conditioning_on_a_jump_holds_the_exact_sum(counts):
    rng = np.random.default_rng(sum(counts))
    step, grids, terms = 0.02, [], {0.0: 1.0}
    for count in counts:
        near = rng.random(9)
        far = np.array([0.31, 0.77, 1.9]) + rng.random(3) / 10
        masses = np.concatenate([near / near.sum() * (1 - 4e-3), [2e-3, 1.5e-3, 0.4e-3]])
        grid = Grid(step, -0.013, -4, masses[:9], 1e-4, far, masses[9:])
        grids.append((grid, count))
        losses = np.concatenate([grid.losses, far])
        for _ in range(count):
            after: dict[float, float] = {}
            for total, mass in terms.items():
                for loss, share in zip(losses, masses, strict=True):
                    at = round(total + loss, 12)
                    after[at] = after.get(at, 0.0) + mass * share
            terms = after
    sums, chances = np.array(list(terms)), np.array(list(terms.values()))
    infinite = 1 - (1 - 1e-4) ** sum(counts)
    body, beside = Window(3.0, -1.28, 128, 30.0, 30.0), Window(0.0, -1.28, 128, 30.0, 30.0)
    found = split(grids, body, beside)
    for epsilon in (0.05, 0.2, 0.5, 1.5):
        exact = float(chances @ -np.expm1(np.minimum(epsilon - sums, 0.0)))
        low, high, _ = found.delta(epsilon)
        assert low <= exact * (1 + 1e-12)
        assert exact + infinite * 0.999 <= high * (1 + 1e-12)
        # What is left out is two jumps or more.
        assert high - low <= 1.1 * (sum(counts) * 4e-3) ** 2 + 1.1e-4 * sum(counts) + 1e-9


def test_two_jumps_are_charged():
    # Both of two mechanisms jump by 1, half the time: nothing but two jumps reaches beyond 1.
    grid = Grid(0.01, 0.0, -1, np.array([0.0, 0.5, 0.0]), 0.0, np.array([1.0]), np.array([0.5]))
    window = Window(0.0, -2.56, 512, 10.0, 10.0)
    found = split([(grid, 2)], window, window)
    assert found.delta(1.5)[1] >= 0.25 * -math.expm1(1.5 - 2.0)
    assert found.delta(0.5)[0] <= 0.5 * -math.expm1(0.5 - 1.0) + 0.25 * -math.expm1(0.5 - 2.0)
    assert found.delta(0.5)[0] >= 0.5 * -math.expm1(0.5 - 1.0) - 1e-3


def test_special_functions_are_as_accurate_as_the_certificate_assumes():
    # curves.py allows them 8 units of round-off, numpy's exponentials and logarithms a part of 16.
    rng = np.random.default_rng(1)
    points = np.concatenate([rng.random(150) * 40, 10 ** rng.uniform(-12, 2, 150)])
    with mp.workdps(40):
        for at in points:
            x = mp.mpf(float(at))
            exact = {
                erfcx: mp.exp(x * x) * mp.erfc(x),
                ndtr: (1 + mp.erf(x / mp.sqrt(2))) / 2,
                np.expm1: mp.expm1(x),
                np.log1p: mp.log1p(x),
            }
            for function, value in exact.items():
                assert abs(mp.mpf(float(function(at))) / value - 1) <= 8 * curves.UNIT, (function, at)


@pytest.mark.parametrize(("size", "rate", "noise"), [(4, 0.1, 1.5), (30, 0.01, 0.6), (200, 0.002, 3.0)])
def test_the_root_of_a_group_is_charged_with_its_residual(monkeypatch, size, rate, noise):
    epsilons = np.array([0.001, 0.1, 1.0, 4.0])
    exact, fine = group(size, rate, noise).call(epsilons)
    monkeypatch.setattr("hush.accounting.pld.group._NEWTON_STEPS", 1)
    rough, error = group(size, rate, noise).call(epsilons)
    assert np.any(np.abs(rough - exact) > 10 * fine)  # one step is not enough, and the bound says so
    assert np.all(np.abs(rough - exact) <= error + fine)


def test_a_window_that_is_too_short_is_paid_for():
    masses = np.full(40, 1 / 40)
    grid = Grid(0.1, 0.0, -10, masses, 0.0)
    exact = np.array([1.0])
    for _ in range(30):
        exact = np.convolve(exact, masses)
    losses = 0.1 * (np.arange(len(exact)) - 300)
    delta = float(np.sum(exact * np.maximum(0.0, -np.expm1(np.minimum(25.0 - losses, 0.0)))))
    short = compose([(grid, 30)], Window(0.0, 20.0, 128, 0.3, 0.3))
    low, high, _ = short.delta(25.0)
    assert low <= delta <= high
    assert short.outside > 1e-3


def test_both_directions_are_asked():
    part = query.Part(BASES["sampled"], 30)
    one = query.epsilon([part], 1e-5)
    other = query.epsilon([part.reversed()], 1e-5)
    assert one.lower <= other.upper
    assert other.lower <= one.upper
    forward = query._epsilon([part], 1e-5)
    backward = query._epsilon([part.reversed()], 1e-5)
    assert max(forward.lower, backward.lower) > 1.02 * min(forward.upper, backward.upper)


@pytest.mark.parametrize("name", ["sampled", "group", "allocated"])
def test_both_directions_are_asked_of_a_single_use(name):
    part = query.Part(BASES[name], 1)
    for epsilon in (0.05, 0.5):
        one, other = single.delta(part, epsilon), single.delta(part.reversed(), epsilon)
        assert one.lower == pytest.approx(other.lower, rel=1e-9)
        assert one.upper == pytest.approx(other.upper, rel=1e-9)


def test_mass_at_infinity_is_charged():
    curve = BASES["gaussian"]
    cut = pessimistic(curve, -100, 100, 0.01)
    assert cut.infinite >= curve.call(np.array([1.0]))[0][0]
