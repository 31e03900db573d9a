"""Float-safe noise: exact integers, the grid, its counted sensitivity, and what the release looks like."""

import math
from collections.abc import Callable

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from hush import integers
from hush.discrete import Grid, _on_grid, add_discrete_noise
from hush.gradients.bounded import BoundedSum, Group
from hush.integers import discrete_gaussian, rounded_gaussian
from hush.normals import Normals
from hush.streams import Key

SUBKEY = bytes(range(32))
Draw = Callable[..., integers.Integers]


def discrete_law(n: int, sigma: float) -> float:
    return float(mpmath.exp(-(mpmath.mpf(n) ** 2) / (2 * mpmath.mpf(sigma) ** 2)))  # normalised by the caller


def rounded_law(n: int, sigma: float) -> float:
    edges = [(n - mpmath.mpf(0.5)) / sigma, (n + mpmath.mpf(0.5)) / sigma]
    return float(mpmath.ncdf(edges[1]) - mpmath.ncdf(edges[0]))


def chi_square(sample: np.ndarray, law: Callable[[int, float], float], sigma: float) -> float:
    """p-value of the sample under the law, cells of small expectation joined at the ends."""
    reach = math.ceil(10 * sigma) + 2
    support = np.arange(-reach, reach + 1)
    expected = np.array([law(int(n), sigma) for n in support])
    expected *= len(sample) / expected.sum()
    inner = np.flatnonzero(expected >= 10)
    low, high = inner[0], inner[-1]
    seen = np.bincount(np.clip(sample, support[low], support[high]) - support[low], minlength=high - low + 1)
    cells = expected[low : high + 1].copy()
    cells[0] += expected[:low].sum()
    cells[-1] += expected[high + 1 :].sum()
    return float(stats.chisquare(seen, cells).pvalue)


@pytest.mark.parametrize("sigma", [0.3, 0.7, 3.0, 33.3, 100.0])
@pytest.mark.parametrize("draw, law", [(discrete_gaussian, discrete_law), (rounded_gaussian, rounded_law)])
def test_hazard_28_integers_follow_their_exact_law(
    draw: Draw, law: Callable[[int, float], float], sigma: float
) -> None:
    sample = draw(SUBKEY, 5, sigma=sigma, first=0, count=200_000)
    assert chi_square(sample, law, sigma) > 1e-3
    assert chi_square(sample, law, sigma * 0.97) < 1e-6
    assert chi_square(sample, law, sigma * 1.03) < 1e-6


@pytest.mark.parametrize("draw", [discrete_gaussian, rounded_gaussian])
@pytest.mark.parametrize("sigma", [1234.5, 1.1e6, 2.0**36])
def test_wide_integers_are_gaussian_to_the_tails_and_uniform_in_their_low_bits(draw: Draw, sigma: float) -> None:
    sample = draw(SUBKEY, 6, sigma=sigma, first=0, count=150_000)
    scaled = sample / sigma
    assert stats.kstest(scaled, "norm").pvalue > 1e-3
    assert stats.kstest(scaled * 1.03, "norm").pvalue < 1e-6
    assert stats.chisquare(np.bincount(sample % 16)).pvalue > 1e-3
    for threshold in (2.0, 3.0, 4.0):
        beyond = int((np.abs(scaled) > threshold).sum())
        assert stats.binomtest(beyond, len(sample), 2 * stats.norm.sf(threshold)).pvalue > 1e-4


def test_the_rounded_and_the_discrete_law_can_be_told_apart_where_they_differ() -> None:
    sample = rounded_gaussian(SUBKEY, 5, sigma=0.7, first=0, count=200_000)
    assert chi_square(sample, discrete_law, 0.7) < 1e-6


@pytest.mark.parametrize("draw", [discrete_gaussian, rounded_gaussian])
@pytest.mark.parametrize("sigma", [0.7, 50.0, 1e6])
def test_the_exact_comparison_agrees_with_the_fast_one(
    draw: Draw, sigma: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = draw(SUBKEY, 2, sigma=sigma, first=0, count=1500)
    calls = []
    exactly = integers._accepted_exactly

    def counted(*arguments: object) -> bool:
        calls.append(1)
        return exactly(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(integers, "_accepted_exactly", counted)
    monkeypatch.setattr(integers, "_MARGIN", 1e9)
    assert np.array_equal(draw(SUBKEY, 2, sigma=sigma, first=0, count=1500), fast)
    assert len(calls) >= 1500


def test_the_exact_comparison_decides_within_a_hair() -> None:
    stairs = integers._staircase(50.0)
    mpmath.mp.dps = 120
    try:
        height = mpmath.exp(-(mpmath.mpf(33) ** 2) / (2 * mpmath.mpf(50) ** 2))
        level = height * stairs.height.numerator / stairs.height.denominator / stairs.weights[33]
        word = int(level * 2**320)
    finally:
        mpmath.mp.dps = 15
    for shift, accepted in ((-(2**10), True), (2**10, False)):
        uniform, further = divmod(word + shift, 1 << 256)
        assert (
            integers._accepted_exactly(stairs, 33, 33, None, uniform, bytes(32) + further.to_bytes(32, "little"))
            is accepted
        )


@pytest.mark.parametrize("sigma", [0.3, 1.0, 31.0, 32.0, 1e3, 1e6, 2.0**36])
def test_the_staircase_lies_above_the_curve_and_its_table_is_exact(sigma: float) -> None:
    stairs = integers._staircase(sigma)
    assert sum(stairs.weights) == 1 << 64
    full = mpmath.mpf(stairs.height.numerator) / stairs.height.denominator
    for j in range(0, len(stairs.weights), 7):
        assert stairs.weights[j] >= full * mpmath.exp(-((mpmath.mpf(j) * stairs.width / sigma) ** 2) / 2)
    got = [0] * 1024
    for column in range(1024):
        threshold = int(stairs.thresholds[column])
        got[column] += threshold
        got[int(stairs.aliases[column])] += (1 << 54) - threshold
    assert got == [*stairs.weights, *[0] * (1024 - len(stairs.weights))]
    assert len(stairs.weights) * stairs.width >= 13 * sigma


def test_a_number_does_not_depend_on_where_the_draw_began() -> None:
    whole = rounded_gaussian(SUBKEY, 1, sigma=10.0, first=0, count=20_000)
    assert np.array_equal(rounded_gaussian(SUBKEY, 1, sigma=10.0, first=9000, count=11_000), whole[9000:])
    narrow = rounded_gaussian(SUBKEY, 1, sigma=0.5, first=0, count=20_000)  # half of the proposals are drawn again
    for numbers in (whole, narrow):
        assert abs(np.corrcoef(numbers[::2], numbers[1::2])[0, 1]) < 5 / math.sqrt(10_000)
        assert abs(np.corrcoef(numbers[1:-1:2], numbers[2::2])[0, 1]) < 5 / math.sqrt(10_000)
    with pytest.raises(ValueError, match="even"):
        rounded_gaussian(SUBKEY, 1, sigma=10.0, first=1, count=5)
    with pytest.raises(ValueError, match="sigma"):
        rounded_gaussian(SUBKEY, 1, sigma=2.0**40, first=0, count=5)


@settings(deadline=None, max_examples=60)
@given(bound=st.floats(1e-6, 1e6), entries=st.integers(1, 10**9))
def test_a_grid_counts_the_roundings_sensitivity(bound: float, entries: int) -> None:
    grid = Grid.of(bound=bound, entries=entries)
    assert math.log2(grid.step).is_integer()
    assert grid.sensitivity >= mpmath.mpf(bound) / grid.step + mpmath.sqrt(entries)
    assert grid.added <= 1e-3
    assert grid.sensitivity * grid.step <= bound * 1.00101
    assert grid.added > 2e-4  # the largest such power of two: the grid is not finer than it must be


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), entries=st.integers(1, 400), bound=st.sampled_from([0.01, 1.0, 7.0]))
def test_hazard_28_neighbours_on_the_grid_differ_by_at_most_its_sensitivity(
    seed: int, entries: int, bound: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    grid = Grid.of(bound=bound, entries=entries)
    one = torch.randn(entries, generator=generator)
    move = torch.randn(entries, generator=generator, dtype=torch.float64)
    # The worst case: every entry just passes the border between two grid cells, in the direction of the move.
    one = ((one / grid.step).floor() + 0.5 - 1e-4 * torch.sign(move)) * grid.step
    other = one + move / move.norm() * bound
    apart = (_on_grid(one, grid.step) - _on_grid(other, grid.step)).double().norm().item()
    assert apart <= grid.sensitivity


def released_residual(kind: str, noise_multiplier: float = 2.0) -> tuple[BoundedSum, dict[str, torch.Tensor]]:
    tensors = {"a": torch.linspace(-3, 3, 30_001), "b": torch.full((20_000,), 0.1), "c": torch.zeros(30_000)}
    total = BoundedSum(tensors, (Group(("a", "b"), 1.0), Group(("c",), 0.02)))
    released = add_discrete_noise(
        total, noise_multiplier=noise_multiplier, normals=Normals(Key.from_seed(1)), step=3, kind=kind  # type: ignore[arg-type]
    )  # fmt: skip
    return total, released


@pytest.mark.parametrize("kind", ["rounded", "discrete"])
def test_hazard_28_the_release_lies_on_a_grid_fixed_by_public_numbers(kind: str) -> None:
    total, released = released_residual(kind)
    for name, bound, entries in (("a", 1.0, 50_001), ("b", 1.0, 50_001), ("c", 0.02, 30_000)):
        grid = Grid.of(bound=bound, entries=entries)
        on_grid = released[name].double() / grid.step
        assert torch.equal(on_grid, on_grid.round())
    # Float noise is not on the grid: the test above can fail.
    assert not torch.equal(total.tensors["b"].double() / 2.0**-20, (total.tensors["b"].double() / 2.0**-20).round())


@pytest.mark.parametrize("kind", ["rounded", "discrete"])
def test_the_release_has_the_right_scale_in_each_group(kind: str) -> None:
    total, released = released_residual(kind)
    for name, bound, entries in (("a", 1.0, 50_001), ("b", 1.0, 50_001), ("c", 0.02, 30_000)):
        noise = (released[name].double() - total.tensors[name].double()).numpy()
        grid = Grid.of(bound=bound, entries=entries)
        deviation = 2.0 * math.sqrt(2) * grid.sensitivity * grid.step
        assert stats.kstest(noise, "norm", args=(0, deviation)).pvalue > 1e-3
        assert stats.kstest(noise, "norm", args=(0, 0.95 * deviation)).pvalue < 1e-3
        assert stats.kstest(noise, "norm", args=(0, 1.05 * deviation)).pvalue < 1e-3


def test_the_added_sensitivity_is_in_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    sigmas = []

    def spy(subkey: bytes, nonce: int, *, sigma: float, first: int, count: int) -> np.ndarray:
        sigmas.append(sigma)
        return np.zeros(count, np.int64)

    monkeypatch.setattr("hush.discrete.rounded_gaussian", spy)
    released_residual("rounded", noise_multiplier=1.5)
    for sigma, bound, entries in zip(sigmas, (1.0, 1.0, 0.02), (50_001, 50_001, 30_000), strict=True):
        step = Grid.of(bound=bound, entries=entries).step
        assert sigma >= 1.5 * math.sqrt(2) * (bound / step + math.sqrt(entries))
        assert sigma < 1.5 * math.sqrt(2) * (bound / step + math.sqrt(entries)) * (1 + 1e-11)


def test_hazard_17_tensors_steps_and_kinds_of_noise_do_not_share_numbers() -> None:
    _, released = released_residual("rounded")
    a, b = released["b"][:10_000] - 0.1, released["c"][:10_000]
    assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1].item()) < 0.05
    total = BoundedSum({"w": torch.zeros(10)}, (Group(("w",), 1.0),))
    source = Normals(Key.from_os())
    add_discrete_noise(total, noise_multiplier=1.0, normals=source, step=0)
    with pytest.raises(RuntimeError, match="drawn once"):
        add_discrete_noise(total, noise_multiplier=1.0, normals=source, step=0)


def test_scale_out_and_non_finite_entries() -> None:
    total = BoundedSum({"w": torch.tensor([math.nan, math.inf, -math.inf, 5.0])}, (Group(("w",), 1.0),))
    out = {"w": torch.empty(4, dtype=torch.bfloat16)}
    released = add_discrete_noise(
        total, noise_multiplier=1.0, normals=Normals(Key.from_seed(0)), step=0, scale=0.5, out=out
    )
    assert released["w"] is out["w"] and bool(out["w"].isfinite().all())
    assert out["w"][1] > 1e6 and out["w"][2] < -1e6


def test_misuse_is_refused() -> None:
    good = BoundedSum({"w": torch.zeros(3)}, (Group(("w",), 1.0),))
    source = Normals(Key.from_seed(0))
    with pytest.raises(ValueError, match="positive on a grid"):
        add_discrete_noise(good, noise_multiplier=0.0, normals=source, step=0)
    with pytest.raises(ValueError, match="kind"):
        add_discrete_noise(good, noise_multiplier=1.0, normals=source, step=0, kind="float")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="positive bound"):
        bad = BoundedSum({"w": torch.zeros(3)}, (Group(("w",), 0.0),))
        add_discrete_noise(bad, noise_multiplier=1.0, normals=source, step=1)
    with pytest.raises(ValueError, match="scale"):
        add_discrete_noise(good, noise_multiplier=1.0, normals=source, step=2, scale=math.inf)
