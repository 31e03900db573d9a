"""The GPU's noise: the CPU's keystream bit for bit, its normals, and the release in one launch."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl

from hush import kernels
from hush.clipping.bounded_sum import BoundedSum, Group
from hush.kernels.noise import gaussian
from hush.kernels.noise.chacha20 import keystream
from hush.noise import gaussian as noise
from hush.noise.gaussian import add_noise
from hush.randomness.chacha20 import chacha20_blocks
from hush.randomness.gaussian_samples import REFINEMENT_BLOCK, RUN, Normals, fill_normals
from hush.randomness.streams import Key

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SUBKEY = bytes(range(32))
Parts = list[tuple[Tensor, float, Tensor]]


@pytest.mark.parametrize(
    "step, first_block, blocks", [(0, 0, 5), (2**40 + 7, 3, 200), (1, 2**32 - 3, 7), (2**64 - 1, 2**62, 1)]
)
def test_the_keystream_is_the_cpus_bit_for_bit(step: int, first_block: int, blocks: int) -> None:
    words = keystream(SUBKEY, step, first_block=first_block, blocks=blocks, device=DEVICE).cpu().numpy()
    assert np.array_equal(words.view(np.uint32), chacha20_blocks(SUBKEY, step, first_block, blocks).ravel())


def parts_of(sizes: list[int], dtype: torch.dtype = torch.float32, out: torch.dtype = torch.float32) -> Parts:
    return [
        (
            torch.full((n,), float(i), dtype=dtype, device=DEVICE),
            0.5 + i,
            torch.full((n,), math.nan, dtype=out, device=DEVICE),
        )
        for i, n in enumerate(sizes)
    ]


def expected(parts: Parts, scale: float, step: int) -> list[np.ndarray]:
    numbers = np.empty(sum(total.numel() for total, _, _ in parts), np.float32)
    fill_normals(numbers, SUBKEY, step)
    borders = np.cumsum([total.numel() for total, _, _ in parts])[:-1]
    return [
        (total.double().cpu().numpy().ravel() + deviation * z.astype(np.float64)) * scale
        for (total, deviation, _), z in zip(parts, np.split(numbers, borders), strict=True)
    ]


def assert_released(parts: Parts, scale: float, step: int, tolerance: float = 1e-6) -> None:
    for (_, deviation, out), want in zip(parts, expected(parts, scale, step), strict=True):
        got = out.double().cpu().numpy().ravel()
        assert not np.isnan(got).any()
        # 1e-6 of a standard deviation, and of the size of what is rounded
        assert (np.abs(got - want) <= tolerance * np.maximum(deviation * scale, np.abs(want)) + 1e-12).all()


@pytest.mark.parametrize("sizes", [[1], [33], [1000, 0, 7, 2900, 1, 800], [0], [4097]])
def test_one_launch_releases_tensors_of_any_sizes(sizes: list[int]) -> None:
    parts = parts_of(sizes)
    gaussian.release(parts, scale=0.25, subkey=SUBKEY, step=3)
    assert_released(parts, 0.25, 3)


def test_a_draw_of_several_runs_follows_the_cpu() -> None:
    # Whole runs are slow in the interpreter: shorter ones, on both sides.
    parts = parts_of([5000, 4000, 3000])
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            import hush.randomness.gaussian_samples

            patch.setattr(hush.randomness.gaussian_samples, "RUN", 8192)
            patch.setattr(gaussian, "RUN", 8192)
            patch.setattr(gaussian, "_RUN", gaussian.tl.constexpr(8192))
        else:
            parts = parts_of([RUN, 1, RUN + 77])
        gaussian._first_segments.cache_clear()
        gaussian.release(parts, scale=1.0, subkey=SUBKEY, step=0)
        assert_released(parts, 1.0, 0)
        gaussian._first_segments.cache_clear()


@triton.jit
def _turned_of(angles, x, y, n: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, n)
    cosine, sine = gaussian._turned(tl.load(angles + at))
    tl.store(x + at, cosine)
    tl.store(y + at, sine)


def test_angles_are_turned_to_float32_accuracy() -> None:
    words = np.linspace(-(2**31), 2**31 - 1, 1 << 16).astype(np.int64).astype(np.float32)
    angles = words * np.float32(math.pi * 2.0**-31)
    borders = np.float32(math.pi / 4) * np.arange(-4, 5, dtype=np.float32)
    for at, border in enumerate(borders):
        angles[3 * at : 3 * at + 3] = [np.nextafter(border, -9), border, np.nextafter(border, np.float32(9))]
    angles = angles.clip(-np.float32(math.pi), np.float32(math.pi))
    out = torch.empty(2, len(angles), device=DEVICE)
    _turned_of[(1,)](torch.from_numpy(angles).to(DEVICE), *out, n=len(angles))
    wide = angles.astype(np.float64)
    for got, want in zip(out.cpu().double().numpy(), (np.cos(wide), np.sin(wide)), strict=True):
        assert np.abs(got - want).max() < 2.0**-23


def refined_place(step: int) -> int | None:
    """A place of a draw of 4,096 whose radius needs further bits, and gets enough of them to be noticed."""
    words = chacha20_blocks(SUBKEY, step, 0, 128).ravel().view(np.int32)
    for place in np.flatnonzero((words >= -4096) & (words < 4096)).tolist():
        if chacha20_blocks(SUBKEY, step, REFINEMENT_BLOCK + place // 16, 1)[0, place % 16] > 1 << 31:
            return int(place)
    return None


def test_the_tail_is_refined_as_on_the_cpu() -> None:
    step, place = next((step, place) for step in range(4000) if (place := refined_place(step)) is not None)
    parts = parts_of([4096])
    gaussian.release(parts, scale=1.0, subkey=SUBKEY, step=step)
    assert_released(parts, 1.0, step)
    radius = math.hypot(parts[0][2][place].item() / 0.5, parts[0][2][place + 2048].item() / 0.5)
    assert radius > math.sqrt(2 * 19 * math.log(2)) - 1e-5


@pytest.mark.parametrize("dtype, out", [(torch.float32, torch.bfloat16), (torch.float64, torch.float64)])
def test_dtypes(dtype: torch.dtype, out: torch.dtype) -> None:
    parts = parts_of([40, 60], dtype, out)  # the interpreter cuts bfloat16 where the GPU rounds
    gaussian.release(parts, scale=1.0, subkey=SUBKEY, step=0)
    assert_released(parts, 1.0, 0, tolerance=2**-7 if out == torch.bfloat16 else 1e-6)


def test_tensors_that_one_launch_cannot_serve_are_copied() -> None:
    image = torch.zeros(2, 3, 4, 4, device=DEVICE).to(memory_format=torch.channels_last)
    parts = [(image, 1.0, torch.empty_like(image)), *parts_of([10], torch.float16)]
    assert not gaussian.fits(parts)
    gaussian.release(parts, scale=1.0, subkey=SUBKEY, step=0)
    flat = [(parts[0][0], 1.0, parts[0][2].contiguous()), parts[1]]
    assert_released(flat, 1.0, 0)
    with pytest.raises(ValueError, match="contiguous"):
        gaussian.Release(parts, scale=1.0, subkey=SUBKEY, step=0)


def test_a_prepared_release_takes_another_key_and_step_by_its_table() -> None:
    parts = parts_of([50])
    prepared = gaussian.Release(parts, scale=1.0, subkey=bytes(32), step=7)
    for step in (7, 8, 2**64 - 1):
        prepared.at(SUBKEY, step, [part[1] for part in parts])
        prepared.launch()
        assert_released(parts, 1.0, step)


def test_add_noise_gives_the_same_release_on_both_paths() -> None:
    total = BoundedSum(
        {"a": torch.ones(70, device=DEVICE), "b": torch.ones(3, 5, device=DEVICE)},
        (Group(("a",), 1.0), Group(("b",), 0.1)),
    )
    on_cpu = add_noise(
        BoundedSum({name: tensor.cpu() for name, tensor in total.tensors.items()}, total.groups),
        noise_multiplier=2.0, normals=Normals(Key.from_seed(0)), step=1, scale=0.5,
    )  # fmt: skip
    out = {name: torch.empty_like(tensor) for name, tensor in total.tensors.items()}
    deviations = noise.standard_deviations(total, 2.0)
    parts = [(total.tensors[name], deviations[name], out[name]) for name in out]
    kernels.release(parts, scale=0.5, subkey=Normals(Key.from_seed(0)).begin(1).subkey(), step=1)
    for name in out:
        torch.testing.assert_close(out[name].cpu(), on_cpu[name], rtol=1e-6, atol=1e-6)
