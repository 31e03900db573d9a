"""Float-safe noise on the GPU: the CPU's integers bit for bit, their exact law, and the arithmetic that decides it."""

import math

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats

pytest.importorskip("triton")

import triton
import triton.language as tl

from hush import kernels
from hush.clipping.bounded_sum import BoundedSum, Group
from hush.kernels.noise import rounded
from hush.kernels.noise.chacha20 import state_words
from hush.kernels.noise.integers import MARGIN, _decided, _exact_share, _further, _shares, _times, staircase_on
from hush.noise.float_safe import add_float_safe_noise, grid_deviations
from hush.randomness import rounded_gaussian as integers
from hush.randomness.chacha20 import chacha20_blocks
from hush.randomness.gaussian_samples import Normals
from hush.randomness.rounded_gaussian import OnGrid, rounded_gaussian, staircase
from hush.randomness.streams import Key

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SUBKEY = bytes(range(32))


def drawn(sizes_and_sigmas: list[tuple[int, float]], *, step: int = 3, **traits: object) -> np.ndarray:
    """The kernel's integers, in one draw for tensors of these sizes."""
    kind = type("Changed", (rounded.Release,), {f"_{name}": value for name, value in traits.items()})
    parts = [
        (torch.zeros(n, device=DEVICE), OnGrid(1.0, sigma), torch.full((n,), math.nan, device=DEVICE).double())
        for n, sigma in sizes_and_sigmas
    ]
    kind(parts, scale=1.0, subkey=SUBKEY, step=step).launch()
    released = torch.cat([part[2] for part in parts]).cpu().numpy()
    assert np.array_equal(released, np.rint(released))
    return released.astype(np.int64)


def on_cpu(sizes_and_sigmas: list[tuple[int, float]], *, step: int = 3) -> np.ndarray:
    first, found = 0, []
    for n, sigma in sizes_and_sigmas:
        found.append(rounded_gaussian(SUBKEY, step, sigma=sigma, first=first, count=n))
        first += n
    return np.concatenate(found)


def test_the_integers_are_the_cpus_bit_for_bit() -> None:
    draw = [(700, 2.0**36), (3, 4.5e4), (0, 777.0), (1800, 1.7e7)]  # two programs, several tensors in one
    assert np.array_equal(drawn(draw), on_cpu(draw))
    one = [(1, 5000.0)]
    assert np.array_equal(drawn(one, step=2**64 - 1), on_cpu(one, step=2**64 - 1))


def law(n: np.ndarray, sigma: float) -> np.ndarray:
    edges = np.abs(n)[:, None] + np.array([-0.5, 0.5])  # upper tails, where the difference keeps its digits
    return stats.norm.sf(edges[:, 0] / sigma) - stats.norm.sf(edges[:, 1] / sigma)


def chi_square(sample: np.ndarray, sigma: float, wrong: float = 1.0) -> float:
    """p-value of the sample under the exact law: about 128 bins in a sigma, the tails joined where few are expected."""
    width = int(sigma / 128)
    reach = width * math.ceil(12 * sigma / width)
    pmf = law(np.arange(-reach, reach), sigma * wrong)
    expected = len(sample) * pmf.reshape(-1, width).sum(1)
    inner = np.flatnonzero(expected >= 10)
    low, high = inner[0], inner[-1]
    seen = np.bincount(np.clip((sample + reach) // width, low, high) - low, minlength=high - low + 1)
    cells = expected[low : high + 1].copy()
    cells[0] += expected[:low].sum()
    cells[-1] += expected[high + 1 :].sum()
    return float(stats.chisquare(seen, cells * len(sample) / cells.sum()).pvalue)


@pytest.mark.parametrize("sigma", [128.25, 6.0e4])
def test_hazard_28_the_kernels_integers_follow_their_exact_law(sigma: float) -> None:
    count = 1 << 17
    lanes = 1 << 13 if DEVICE == "cpu" else 128  # the interpreter is slow by the operation, not by the number
    sample = drawn([(count, sigma)], lanes=lanes)
    assert np.array_equal(sample, on_cpu([(count, sigma)]))
    assert chi_square(sample, sigma) > 1e-3
    assert chi_square(sample, sigma, wrong=0.95) < 1e-6
    assert chi_square(sample, sigma, wrong=1.05) < 1e-6
    assert stats.chisquare(np.bincount(sample % 32)).pvalue > 1e-4
    variance = sigma**2 + 1 / 12
    assert abs(np.mean(sample)) < 5 * sigma / math.sqrt(count)
    assert abs(np.mean(sample.astype(float) ** 2) / variance - 1) < 5 * math.sqrt(2 / count)
    assert abs(np.mean(sample.astype(float) ** 4) / (3 * variance**2) - 1) < 5 * math.sqrt(32 / 3 / count)
    for beyond in (2.5, 3.5, 4.0):
        far = int((np.abs(sample) > beyond * sigma).sum())
        p = 2 * float(stats.norm.sf((math.floor(beyond * sigma) + 0.5) / sigma))
        assert stats.binomtest(far, count, p).pvalue > 1e-4


def rejecting_step(count: int, sigma: float) -> int:
    """A step in which one of the first numbers is drawn again."""
    with pytest.MonkeyPatch.context() as patch:
        again: list[int] = []
        scattered = integers.scattered_blocks

        def counted(key: bytes, nonce: int, numbers: np.ndarray) -> np.ndarray:
            again.append(len(numbers))
            return scattered(key, nonce, numbers)

        patch.setattr(integers, "scattered_blocks", counted)
        for step in range(2000):
            on_cpu([(count, sigma)], step=step)
            if again:
                return step
    raise AssertionError("no such step")


def test_a_number_that_is_drawn_again_is_the_cpus() -> None:
    step = rejecting_step(2048, 130.0)
    draw = [(2048, 130.0)]
    assert np.array_equal(drawn(draw, step=step), on_cpu(draw, step=step))


@pytest.mark.parametrize("sigma", [128.0, 3e4])
def test_what_float32_cannot_settle_is_settled_as_on_the_cpu(sigma: float) -> None:
    draw = [(400, sigma)]
    # A wide margin sends many numbers to the arithmetic of 128 bits; they must come out the same.
    assert np.array_equal(drawn(draw, margin=2e-3, step=1), on_cpu(draw, step=1))


@triton.jit
def _product_of(a, b, c, d, high, low, n: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, n)
    left, right = tl.load(a + at).to(tl.uint64), tl.load(b + at).to(tl.uint64)
    other, least = tl.load(c + at).to(tl.uint64), tl.load(d + at).to(tl.uint64)
    one, two = _times(left, right, other, least)
    tl.store(high + at, one.to(tl.int64))
    tl.store(low + at, two.to(tl.int64))


def words_of(numbers: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    pairs = np.array([divmod(number, 1 << 64) for number in numbers], np.uint64).view(np.int64)
    return torch.from_numpy(pairs[:, 0].copy()).to(DEVICE), torch.from_numpy(pairs[:, 1].copy()).to(DEVICE)


def numbers_of(high: torch.Tensor, low: torch.Tensor) -> list[int]:
    return [(h % (1 << 64) << 64) + lo % (1 << 64) for h, lo in zip(high.tolist(), low.tolist(), strict=True)]


def test_products_of_128_bits_are_exact() -> None:
    edge = [0, 1, (1 << 128) - 1, 1 << 127, (1 << 64) - 1, 1 << 64, (1 << 128) - (1 << 64), (1 << 96) - 1]
    rng = np.random.default_rng(0)
    some = [int.from_bytes(rng.bytes(16), "little") for _ in range(192)]
    left = [a for a in edge for _ in edge] + some
    right = edge * len(edge) + some[::-1]
    high, low = torch.zeros(256, dtype=torch.int64, device=DEVICE), torch.zeros(256, dtype=torch.int64, device=DEVICE)
    _product_of[(1,)](*words_of(left), *words_of(right), high, low, n=256)
    assert numbers_of(high, low) == [a * b >> 128 for a, b in zip(left, right, strict=True)]


@triton.jit
def _shares_of(stairs, cells, a, b, high, low, one, both, n: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, n)
    cell = tl.load(cells + at)
    left, right = tl.load(a + at).to(tl.uint64), tl.load(b + at).to(tl.uint64)
    exact, rest = _exact_share(stairs, cell, left, right)
    tl.store(high + at, exact.to(tl.int64))
    tl.store(low + at, rest.to(tl.int64))
    place = (left >> 32).to(tl.uint32)
    first, second = _shares(stairs, cell, place, place ^ ((place & 0) - ((place & 0) + 1)))
    tl.store(one + at, first)
    tl.store(both + at, second)


@pytest.mark.parametrize("sigma", [128.0, 255.9, 1e6, 2.0**36])
def test_shares_are_as_exact_as_their_bounds_say(sigma: float) -> None:
    stairs, count = staircase(sigma), 512
    rng = np.random.default_rng(1)
    last = len(stairs.weights) - 1
    cells = np.concatenate(
        [[0, 0, last, last], rng.integers(0, last + 1, count // 2), rng.integers(0, 300, count // 2)]
    )
    cells = cells[:count].astype(np.int32)
    places = [0, (1 << 128) - 1, 0, (1 << 128) - 1] + [int.from_bytes(rng.bytes(16), "little") for _ in cells[4:]]
    whole = torch.zeros(2, count, dtype=torch.int64, device=DEVICE)
    rough = torch.zeros(2, count, device=DEVICE)
    table = staircase_on(torch.device(DEVICE), sigma)
    _shares_of[(1,)](table, torch.from_numpy(cells).to(DEVICE), *words_of(places), *whole, *rough, n=count)
    with mpmath.workdps(60):
        width = mpmath.mpf(2) ** stairs.shift / mpmath.mpf(sigma)
        full = mpmath.mpf(stairs.height.numerator) / stairs.height.denominator

        def share(cell: int, a: int) -> mpmath.mpf:
            x = (cell + mpmath.mpf(a) / 2**128) * width
            return full * mpmath.exp(-x * x / 2) / (2 * stairs.weights[cell])

        for k, got in enumerate(numbers_of(*whole)):
            cell, a = int(cells[k]), places[k]
            assert abs(mpmath.mpf(got) / 2**128 - share(cell, a)) < mpmath.mpf(2) ** -115
            one, both = share(cell, a), share(cell, a) + share(cell, (1 << 128) - 1 - a)
            # A level of float32 is wrong by another rounding: 2^-24.
            assert abs(rough[0, k].item() - one) < MARGIN - 2.0**-23
            assert abs(rough[1, k].item() - both) < MARGIN - 2.0**-23


@triton.jit
def _further_of(state, attempts, numbers, out, n: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, n)
    a, b, c, d, e, f = _further(state + 1, tl.load(state), tl.load(attempts + at), tl.load(numbers + at))
    tl.store(out + at, a.to(tl.int64))
    tl.store(out + n + at, b.to(tl.int64))
    tl.store(out + 2 * n + at, c.to(tl.int64))
    tl.store(out + 3 * n + at, d.to(tl.int64))
    tl.store(out + 4 * n + at, e.to(tl.int64))
    tl.store(out + 5 * n + at, f.to(tl.int64))


def test_further_bits_are_the_cpus() -> None:
    attempts, numbers = torch.tensor([0, 0, 1, 5]), torch.tensor([0, 7, 2**40 + 3, 2**44 - 1])
    state = torch.tensor(state_words(SUBKEY, 9), dtype=torch.int64, device=DEVICE)
    out = torch.zeros(6, 4, dtype=torch.int64, device=DEVICE)
    _further_of[(1,)](state, attempts.to(DEVICE), numbers.to(DEVICE), out, n=4)
    for k in range(4):
        block = integers.FURTHER + int(attempts[k]) * integers.ATTEMPT + int(numbers[k])
        assert out[:, k].tolist() == chacha20_blocks(SUBKEY, 9, block, 1)[0, :6].tolist()


@triton.jit
def _decisions_of(stairs, cells, v, w, a, b, out, n: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, n)
    accepted, taken = _decided(
        stairs, tl.load(cells + at), tl.load(v + at).to(tl.uint64), tl.load(w + at).to(tl.uint64),
        tl.load(a + at).to(tl.uint64), tl.load(b + at).to(tl.uint64),
    )  # fmt: skip
    tl.store(out + at, tl.where(accepted, taken.to(tl.int64), -1))


@pytest.mark.parametrize("sigma", [128.0, 5e3, 2.0**30, 2.0**36])
def test_the_kernel_decides_within_a_hair_of_the_border(sigma: float) -> None:
    stairs, rng, cases = staircase(sigma), np.random.default_rng(2), []
    with mpmath.workdps(60):
        full, width = mpmath.mpf(stairs.height.numerator) / stairs.height.denominator, mpmath.mpf(2) ** stairs.shift
        for _ in range(16):
            cell, whole = int(rng.integers(0, 500)), int.from_bytes(rng.bytes(16), "little")
            places = [whole, (1 << 128) - 1 - whole]
            x = [(cell + mpmath.mpf(place) / 2**128) * width / mpmath.mpf(sigma) for place in places]
            shares = [full * mpmath.exp(-z * z / 2) / (2 * stairs.weights[cell]) for z in x]
            first, second = int(shares[0] * 2**128), int((shares[0] + shares[1]) * 2**128)
            here, mirror = places[0] >> 96, places[1] >> 96
            for level, answer in (
                (first - 2**14, here), (first + 2**14, mirror), (second - 2**14, mirror), (second + 2**14, -1)
            ):  # fmt: skip
                cases.append((cell, level, whole, answer))
    cells, levels, wholes, answers = zip(*cases, strict=True)
    out = torch.zeros(64, dtype=torch.int64, device=DEVICE)
    _decisions_of[(1,)](
        staircase_on(torch.device(DEVICE), sigma),
        torch.tensor(cells, dtype=torch.int32, device=DEVICE), *words_of(list(levels)), *words_of(list(wholes)), out,
        n=64,
    )  # fmt: skip
    assert out.tolist() == list(answers)


def test_totals_of_any_kind_are_rounded_and_cut_as_on_the_cpu() -> None:
    special = torch.tensor([math.nan, math.inf, -math.inf, 1e30, -1e30, 0.5, 1.5, 2.5, -0.5, -1.5, 2.0**23 + 1])
    total = BoundedSum({"a": special * 2.0**-13, "b": torch.randn(40)}, (Group(("a",), 1.0), Group(("b",), 0.02)))
    for dtype, out in ((torch.float32, torch.float32), (torch.float16, torch.float64)):
        tensors = {name: tensor.to(dtype) for name, tensor in total.tensors.items()}
        normals, again = Normals(Key.from_seed(0)), Normals(Key.from_seed(0))
        places = {name: torch.empty(tensor.shape, dtype=out) for name, tensor in tensors.items()}
        want = add_float_safe_noise(
            BoundedSum(tensors, total.groups), noise_multiplier=2.0, normals=normals, step=1, scale=1 / 3, out=places
        )
        deviations = grid_deviations(total, 2.0)
        parts = [
            (tensor.to(DEVICE), deviations[name], torch.empty(tensor.shape, dtype=out, device=DEVICE))
            for name, tensor in tensors.items()
        ]
        assert kernels.release_on_grids(parts, scale=1 / 3, subkey=again.begin(1).subkey(), step=1)
        for (_, _, got), name in zip(parts, want, strict=True):
            assert torch.equal(got.cpu(), want[name])


def test_a_prepared_release_moves_on_and_takes_new_deviations_and_tensors() -> None:
    out = torch.empty(40, device=DEVICE, dtype=torch.float64)
    prepared = rounded.Release(
        [(torch.zeros_like(out), OnGrid(1.0, 500.0), out)], scale=1.0, subkey=SUBKEY, step=7
    )  # fmt: skip
    prepared.launch()
    assert np.array_equal(out.cpu(), on_cpu([(40, 500.0)], step=7))
    other = torch.full_like(out, 3.0)
    prepared.onto([other])
    prepared.at(SUBKEY, 12, [OnGrid(1.0, 9000.0)])
    prepared.launch()
    assert np.array_equal(other.cpu(), 3 + on_cpu([(40, 9000.0)], step=12))


def test_what_the_kernel_cannot_draw_is_left_to_the_cpu() -> None:
    part = (torch.zeros(4, device=DEVICE), OnGrid(1.0, 100.0), torch.zeros(4, device=DEVICE))
    assert not kernels.release_on_grids([part], scale=1.0, subkey=SUBKEY, step=0)
    with pytest.raises(ValueError, match="128 to"):
        rounded.Release([part], scale=1.0, subkey=SUBKEY, step=0)
    total = BoundedSum({"w": torch.zeros(4, device=DEVICE)}, (Group(("w",), 1.0),))
    released = add_float_safe_noise(total, noise_multiplier=0.01, normals=Normals(Key.from_seed(0)), step=0)["w"]
    assert released.device.type == DEVICE and 0 < released.abs().max() < 1


def test_tensors_that_one_launch_cannot_serve_are_copied() -> None:
    image = torch.zeros(1, 3, 4, 4, device=DEVICE).to(memory_format=torch.channels_last)
    half = torch.zeros(10, device=DEVICE, dtype=torch.float16)
    grid = OnGrid(2.0**-10, 1000.0)
    parts = [(image, grid, torch.empty_like(image)), (half, grid, torch.empty(10, device=DEVICE))]
    assert kernels.release_on_grids(parts, scale=1.0, subkey=SUBKEY, step=0)
    got = np.concatenate([part[2].double().cpu().numpy().ravel() for part in parts])
    assert np.array_equal(got * 2.0**10, on_cpu([(58, 1000.0)], step=0))
