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

from hush.clipping.bounded_sum import BoundedSum, Group
from hush.noise.float_safe import Grid, _on_grid, add_float_safe_noise, distance_over
from hush.randomness import rounded_gaussian as integers
from hush.randomness.gaussian_samples import Normals
from hush.randomness.rounded_gaussian import rounded_gaussian
from hush.randomness.streams import Key

SUBKEY = bytes(range(32))


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
def test_hazard_28_integers_follow_their_exact_law(sigma: float) -> None:
    sample = rounded_gaussian(SUBKEY, 5, sigma=sigma, first=0, count=200_000)
    assert chi_square(sample, rounded_law, sigma) > 1e-3
    assert chi_square(sample, rounded_law, sigma * 0.97) < 1e-6
    assert chi_square(sample, rounded_law, sigma * 1.03) < 1e-6


@pytest.mark.parametrize("sigma", [1234.5, 1.1e6, 2.0**36])
def test_wide_integers_are_gaussian_to_the_tails_and_uniform_in_their_low_bits(sigma: float) -> None:
    sample = rounded_gaussian(SUBKEY, 6, sigma=sigma, first=0, count=150_000)
    scaled = sample / sigma
    assert stats.kstest(scaled, "norm").pvalue > 1e-3
    assert stats.kstest(scaled * 1.03, "norm").pvalue < 1e-6
    assert stats.chisquare(np.bincount(sample % 16)).pvalue > 1e-3
    for threshold in (2.0, 3.0, 4.0):
        beyond = int((np.abs(scaled) > threshold).sum())
        assert stats.binomtest(beyond, len(sample), 2 * stats.norm.sf(threshold)).pvalue > 1e-4


def test_the_law_is_not_that_of_the_discrete_gaussian() -> None:
    sample = rounded_gaussian(SUBKEY, 5, sigma=0.7, first=0, count=200_000)
    assert chi_square(sample, discrete_law, 0.7) < 1e-6


@pytest.mark.parametrize("sigma", [0.05, 0.7, 50.0, 1e6])
def test_the_exact_comparison_agrees_with_the_fast_one(sigma: float, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = rounded_gaussian(SUBKEY, 2, sigma=sigma, first=0, count=600)
    calls = []
    exactly = integers._decide_exactly

    def counted(*arguments: object) -> str:
        calls.append(1)
        return exactly(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(integers, "_decide_exactly", counted)
    monkeypatch.setattr(integers, "_UNIT", 1e9)
    assert np.array_equal(rounded_gaussian(SUBKEY, 2, sigma=sigma, first=0, count=600), fast)
    assert len(calls) >= 600


@pytest.mark.parametrize("sigma", [0.01, 0.3, 5.0, 127.0, 128.0, 1e6])
def test_the_bits_that_are_missing_cannot_move_a_share_past_the_margin(sigma: float) -> None:
    stairs = integers.staircase(sigma)
    rng = np.random.default_rng(0)
    cells = rng.integers(0, len(stairs.weights), 300)
    places = rng.integers(0, 1 << 32, 300, dtype=np.uint32)
    with mpmath.workdps(40):
        full, width = mpmath.mpf(stairs.height.numerator) / stairs.height.denominator, mpmath.mpf(2) ** stairs.shift

        def share(cell: int, a: int, unit: int) -> mpmath.mpf:
            x = (cell + mpmath.mpf(a) / unit) * width / mpmath.mpf(sigma)
            return full * mpmath.exp(-x * x / 2) / (2 * stairs.weights[cell])

        c = float(stairs.curvature)
        for cell, place in zip(cells.tolist(), places.tolist(), strict=True):
            rough = [
                stairs.shares[cell] * np.exp(-c * integers._product(np.uint32(a), cell))
                for a in (place, 0xFFFFFFFF - place)
            ]
            for rest in (0, (1 << 96) - 1):
                whole = (place << 96) + rest
                exact = [share(cell, a, 1 << 128) for a in (whole, (1 << 128) - 1 - whole)]
                assert abs(exact[0] - rough[0]) + mpmath.mpf(2) ** -33 < integers._margin(sigma)
                assert abs(sum(exact) - sum(rough)) + mpmath.mpf(2) ** -33 < integers._margin(sigma)


def test_the_exact_comparison_decides_within_a_hair() -> None:
    stairs = integers.staircase(5000.0)
    place, further = 0x9ABCDEF0, 0x123456789ABCDEF012345678
    cell = 33
    whole_bits = (place << 96) + further
    mirror = (1 << 128) - 1 - whole_bits
    with mpmath.workdps(60):
        width, sigma = mpmath.mpf(2) ** stairs.shift, mpmath.mpf(5000)
        full = mpmath.mpf(stairs.height.numerator) / stairs.height.denominator / (2 * stairs.weights[cell])
        heights = [
            full * mpmath.exp(-(((cell + mpmath.mpf(a) / 2**128) * width / sigma) ** 2) / 2)
            for a in (whole_bits, mirror)
        ]
        borders = [int(heights[0] * 2**128), int((heights[0] + heights[1]) * 2**128)]
    for border, below, above in ((borders[0], "place", "mirror"), (borders[1], "mirror", "neither")):
        for level, answer in ((border - 1, below), (border + 1, above)):
            words = [level >> shift & 0xFFFFFFFF for shift in (64, 32, 0)]
            words += [further >> shift & 0xFFFFFFFF for shift in (64, 32, 0)]
            block = np.array(words, "<u4").tobytes() + bytes(40)
            assert integers._decide_exactly(stairs, cell, level >> 96, place, block) == answer


@pytest.mark.parametrize("sigma", [0.01, 0.3, 1.0, 31.0, 127.9, 128.0, 1e3, 1e6, 2.0**36])
def test_the_staircase_lies_above_the_curve_and_its_table_is_exact(sigma: float) -> None:
    stairs = integers.staircase(sigma)
    width = 1 << stairs.shift
    assert sum(stairs.weights) == 1 << 31 and min(stairs.weights) > 0
    assert len(stairs.weights) * width >= 13 * sigma
    assert sigma < 128 or 128 <= sigma / width < 256
    full = mpmath.mpf(stairs.height.numerator) / stairs.height.denominator
    for j in range(0, len(stairs.weights), 7):
        for a in (mpmath.mpf(0), mpmath.mpf(1) / 7, mpmath.mpf(1) / 3, mpmath.mpf(1) / 2):
            pair = [mpmath.exp(-(((j + x) * width / mpmath.mpf(sigma)) ** 2) / 2) for x in (a, 1 - a)]
            assert sum(pair) * full / (2 * stairs.weights[j]) <= 1
        edge = mpmath.exp(-((mpmath.mpf(j) * width / sigma) ** 2) / 2)
        assert float(edge * full / (2 * stairs.weights[j])) == pytest.approx(stairs.shares[j], rel=1e-12)
    got = [0] * integers.COLUMNS
    for column in range(integers.COLUMNS):
        threshold = int(stairs.thresholds[column])
        assert threshold < integers.CAPACITY
        got[column] += threshold
        got[int(stairs.aliases[column])] += integers.CAPACITY - threshold
    assert got == [*stairs.weights, *[0] * (integers.COLUMNS - len(stairs.weights))]


@pytest.mark.parametrize("sigma", [1e6, 200.0])
def test_few_numbers_are_drawn_again(sigma: float, monkeypatch: pytest.MonkeyPatch) -> None:
    again = []
    scattered = integers.scattered_blocks

    def counted(key: bytes, nonce: int, numbers: np.ndarray) -> np.ndarray:
        again.append(len(numbers))
        return scattered(key, nonce, numbers)

    monkeypatch.setattr(integers, "scattered_blocks", counted)
    rounded_gaussian(SUBKEY, 9, sigma=sigma, first=0, count=1_000_000)
    assert sum(again) / 3 < 40  # one in 100,000 is expected


def test_a_number_does_not_depend_on_where_the_draw_began() -> None:
    whole = rounded_gaussian(SUBKEY, 1, sigma=10.0, first=0, count=40_000)
    for first in (9000, 9001, 16_383, 16_385):
        assert np.array_equal(
            rounded_gaussian(SUBKEY, 1, sigma=10.0, first=first, count=11_000), whole[first:][:11_000]
        )
    narrow = rounded_gaussian(SUBKEY, 1, sigma=0.5, first=0, count=20_000)  # many proposals are drawn again
    for numbers in (whole[:20_000], narrow):
        for apart in (1, 2, 16):
            assert abs(np.corrcoef(numbers[apart:], numbers[:-apart])[0, 1]) < 5 / math.sqrt(19_000)
    with pytest.raises(ValueError, match="2\\^44"):
        rounded_gaussian(SUBKEY, 1, sigma=10.0, first=2**44, count=5)
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


def released_residual(noise_multiplier: float = 2.0) -> tuple[BoundedSum, dict[str, torch.Tensor]]:
    tensors = {"a": torch.linspace(-3, 3, 80_001), "b": torch.full((60_000,), 0.1), "c": torch.zeros(70_000)}
    total = BoundedSum(tensors, (Group(("a", "b"), 1.0), Group(("c",), 0.02)))
    released = add_float_safe_noise(total, noise_multiplier=noise_multiplier, normals=Normals(Key.from_seed(1)), step=3)
    return total, released


def test_hazard_28_the_release_lies_on_a_grid_fixed_by_public_numbers() -> None:
    total, released = released_residual()
    for name, bound, entries in (("a", 1.0, 140_001), ("b", 1.0, 140_001), ("c", 0.02, 70_000)):
        grid = Grid.of(bound=bound, entries=entries)
        on_grid = released[name].double() / grid.step
        assert torch.equal(on_grid, on_grid.round())
    # Float noise is not on the grid: the test above can fail.
    assert not torch.equal(total.tensors["b"].double() / 2.0**-20, (total.tensors["b"].double() / 2.0**-20).round())


def test_the_release_has_the_right_scale_in_each_group() -> None:
    total, released = released_residual()
    for name, bound, entries in (("a", 1.0, 140_001), ("b", 1.0, 140_001), ("c", 0.02, 70_000)):
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

    monkeypatch.setattr("hush.noise.float_safe.rounded_gaussian", spy)
    released_residual(noise_multiplier=1.5)
    for sigma, bound, entries in zip(sigmas, (1.0, 1.0, 0.02), (140_001, 140_001, 70_000), strict=True):
        step = Grid.of(bound=bound, entries=entries).step
        assert sigma >= 1.5 * math.sqrt(2) * (bound / step + math.sqrt(entries))
        assert sigma < 1.5 * math.sqrt(2) * (bound / step + math.sqrt(entries)) * (1 + 1e-11)


def test_hazard_17_tensors_and_steps_do_not_share_numbers() -> None:
    _, released = released_residual()
    a, b = released["b"][:10_000] - 0.1, released["c"][:10_000]
    assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1].item()) < 0.05
    total = BoundedSum({"w": torch.zeros(10)}, (Group(("w",), 1.0),))
    source = Normals(Key.from_os())
    add_float_safe_noise(total, noise_multiplier=1.0, normals=source, step=0)
    with pytest.raises(RuntimeError, match="drawn once"):
        add_float_safe_noise(total, noise_multiplier=1.0, normals=source, step=0)


def test_what_leaves_the_range_of_exact_integers_is_cut() -> None:
    step = 2.0**-20
    far = torch.tensor([1e30, -1e30, math.inf, -math.inf, 2.0**40, -(2.0**31) - step], dtype=torch.float64)
    assert _on_grid(far, step).tolist() == [2**51, -(2**51), 2**51, -(2**51), 2**51, -(2**51)]
    assert _on_grid(torch.tensor([math.nan, 2.0**31 - step], dtype=torch.float64), step).tolist() == [0, 2**51 - 1]
    # Neighbours that differ beyond the cut come no further apart, and what is released lies on the grid, noise and all.
    entries = torch.tensor([1e30, 1e30 + 1e20, -1e30], dtype=torch.float64)
    total = BoundedSum({"w": entries}, (Group(("w",), 1.0),))
    released = add_float_safe_noise(total, noise_multiplier=1.0, normals=Normals(Key.from_seed(0)), step=0)["w"]
    grid = Grid.of(bound=1.0, entries=3)
    noise = released / grid.step - torch.tensor([2.0**51, 2.0**51, -(2.0**51)], dtype=torch.float64)
    assert bool((noise.abs() < 20 * grid.sensitivity).all()) and len(set(noise.tolist())) == 3


def test_the_distance_from_the_exact_law_is_counted() -> None:
    assert 2.0**-113 + 2.0**-117 + 2 * math.exp(-(13**2) / 2) <= integers.DISTANCE
    assert distance_over(10**9) == 1e9 * 2.0**-112


def test_scale_out_and_non_finite_entries() -> None:
    total = BoundedSum({"w": torch.tensor([math.nan, math.inf, -math.inf, 5.0])}, (Group(("w",), 1.0),))
    out = {"w": torch.empty(4, dtype=torch.bfloat16)}
    released = add_float_safe_noise(
        total, noise_multiplier=1.0, normals=Normals(Key.from_seed(0)), step=0, scale=0.5, out=out
    )
    assert released["w"] is out["w"] and bool(out["w"].isfinite().all())
    assert out["w"][1] > 1e6 and out["w"][2] < -1e6


def test_misuse_is_refused() -> None:
    good = BoundedSum({"w": torch.zeros(3)}, (Group(("w",), 1.0),))
    source = Normals(Key.from_seed(0))
    with pytest.raises(ValueError, match="positive on a grid"):
        add_float_safe_noise(good, noise_multiplier=0.0, normals=source, step=0)
    with pytest.raises(ValueError, match="positive bound"):
        bad = BoundedSum({"w": torch.zeros(3)}, (Group(("w",), 0.0),))
        add_float_safe_noise(bad, noise_multiplier=1.0, normals=source, step=1)
    with pytest.raises(ValueError, match="scale"):
        add_float_safe_noise(good, noise_multiplier=1.0, normals=source, step=2, scale=math.inf)
