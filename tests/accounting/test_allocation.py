"""Random allocation in the PLD accountant."""

import numpy as np
import pytest
from oracles.privacy_loss import two_lots_delta

from hush.accounting import pld
from hush.accounting.events import Allocated, Gaussian, Grouped, Laplace, PoissonSampled, PureDP


@pytest.mark.parametrize(
    ("noise", "epsilon"), [(1.0, 0.5), (2.0, 0.2), (0.8, 2.0), (4.0, 0.05), (0.5, 2.0), (0.4, 1.0), (0.3, 5.0)]
)
def test_two_lots_are_the_integral(noise, epsilon):
    exact = float(two_lots_delta(noise, epsilon))
    bounds = pld.delta(Allocated(2, Gaussian(noise)), epsilon=epsilon)
    assert bounds.lower <= exact <= bounds.upper
    assert bounds.upper - bounds.lower <= 5e-3 * bounds.upper


@pytest.mark.parametrize(("lots", "noise", "epsilon"), [(10, 1.0, 1.0), (100, 0.5, 2.0), (30, 0.3, 8.0)])
def test_simulated_epochs_lie_inside(lots, noise, epsilon):
    # Importance-free simulation of the remove direction: R is the mean of the lots' ratios under P.
    rng = np.random.default_rng(5)
    z = rng.standard_normal((4_000_000 // lots, lots))
    z[:, 0] += 1 / noise  # under P the record is in one lot; by symmetry the first
    ratio = np.exp(z / noise - 1 / (2 * noise**2)).mean(axis=1)
    samples = np.maximum(0.0, 1 - np.exp(epsilon) / ratio)
    bounds = pld.delta(Allocated(lots, Gaussian(noise)), epsilon=epsilon)
    spread = 4 * samples.std() / np.sqrt(len(samples))
    assert bounds.lower - spread <= samples.mean() <= bounds.upper + spread


@pytest.mark.parametrize(("lots", "noise", "epochs"), [(100, 0.5, 2), (1000, 0.5, 5), (7, 0.2, 3), (100, 0.35, 1)])
def test_little_noise_has_a_narrow_interval(lots, noise, epochs):
    run = Allocated(lots, Gaussian(noise)) * epochs
    found = pld.epsilon(run, delta=1e-5)
    assert found.lower > 0 and found.upper - found.lower <= 0.01 * found.upper
    at = pld.delta(run, epsilon=2.0)
    assert at.lower > 0 and at.upper - at.lower <= 0.05 * at.upper


def test_order_among_the_samplings():
    # More lots amplify more; no allocation costs more than taking part once; the authors' package gives
    # 0.6085 .. 0.6357 for the first setting.
    one = pld.epsilon(Allocated(100, Gaussian(1.0)), delta=1e-5)
    assert 0.6085 <= one.lower <= one.upper <= 0.6357
    few = pld.epsilon(Allocated(10, Gaussian(1.0)), delta=1e-5)
    alone = pld.epsilon(Gaussian(1.0), delta=1e-5)
    assert one.upper < few.lower <= few.upper < alone.lower
    assert pld.epsilon(Allocated(1, Gaussian(1.0)), delta=1e-5) == alone
    poisson = pld.epsilon(PoissonSampled(0.01, Gaussian(4.0)) * 10_000, delta=1e-5)
    epochs = pld.epsilon(Allocated(100, Gaussian(4.0)) * 100, delta=1e-5)
    assert epochs.upper - epochs.lower <= 2e-3 * epochs.upper
    assert epochs.upper <= poisson.upper


def test_other_mechanisms_and_groups():
    for mechanism in (Laplace(2.0), PureDP(0.5)):
        spread_out = pld.epsilon(Allocated(20, mechanism), delta=1e-6)
        together = pld.epsilon(mechanism, delta=1e-6)
        assert 0 < spread_out.upper < together.upper
    pair = pld.epsilon(Grouped(2, Allocated(10, Gaussian(3.0))), delta=1e-6)
    single = pld.epsilon(Allocated(10, Gaussian(3.0)), delta=1e-6)
    assert pair.lower <= single.upper <= pair.upper
