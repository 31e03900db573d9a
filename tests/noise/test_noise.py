"""Noise on a bounded sum: its scale, its shape, who gets which numbers, dtypes, and what is refused."""

import ast
import inspect
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from hush.clipping.bounded_sum import BoundedSum, Group
from hush.noise.gaussian import add_noise, refuse_capture, standard_deviations
from hush.randomness.gaussian_samples import Normals
from hush.randomness.streams import Key


def bounded(sizes: dict[str, int], *groups: tuple[str, float], dtype: torch.dtype = torch.float32) -> BoundedSum:
    """A sum of sevens; each group is ("name name ...", bound)."""
    tensors = {name: torch.full((size,), 7.0, dtype=dtype) for name, size in sizes.items()}
    return BoundedSum(tensors, tuple(Group(tuple(names.split()), bound) for names, bound in groups))


def fresh() -> Normals:
    return Normals(Key.from_seed(0))


def residual(total: BoundedSum, released: dict[str, Tensor], name: str) -> np.ndarray:
    return (released[name].double() - total.tensors[name].double()).numpy()


def is_normal(sample: np.ndarray, deviation: float) -> bool:
    return bool(stats.kstest(sample, "norm", args=(0.0, deviation)).pvalue > 1e-3)


@pytest.mark.parametrize("bound, noise_multiplier", [(1.0, 1.1), (0.1, 4.0), (37.0, 0.5)])
def test_one_group_gets_noise_of_multiplier_times_bound(bound: float, noise_multiplier: float) -> None:
    total = bounded({"w": 60_000}, ("w", bound))
    released = add_noise(total, noise_multiplier=noise_multiplier, normals=Normals(Key.from_seed(1)), step=0)
    deviation = noise_multiplier * bound
    assert is_normal(residual(total, released, "w"), deviation)
    assert not is_normal(residual(total, released, "w"), 0.95 * deviation)
    assert not is_normal(residual(total, released, "w"), 1.05 * deviation)


def test_each_of_m_groups_gets_noise_of_multiplier_times_root_m_times_its_bound() -> None:
    total = bounded({"a": 40_000, "b": 30_000, "c": 40_000, "d": 40_000}, ("a b", 1.0), ("c", 3.0), ("d", 0.2))
    released = add_noise(total, noise_multiplier=2.0, normals=Normals(Key.from_seed(2)), step=0)
    for name, bound in {"a": 1.0, "b": 1.0, "c": 3.0, "d": 0.2}.items():
        deviation = 2.0 * math.sqrt(3) * bound
        assert is_normal(residual(total, released, name), deviation)
        assert not is_normal(residual(total, released, name), 0.95 * deviation)
        assert not is_normal(residual(total, released, name), 1.05 * deviation)


def test_the_joint_guarantee_of_groups_is_that_of_one_gaussian_with_the_multiplier() -> None:
    # sum over groups of (bound / deviation)^2 is the squared ratio of sensitivity to noise: 1 / multiplier^2.
    total = bounded({"a": 1, "b": 1, "c": 1}, ("a", 0.3), ("b", 5.0), ("c", 1e-6))
    deviations = standard_deviations(total, 1.7)
    ratio = sum((group.bound / deviations[group.names[0]]) ** 2 for group in total.groups)
    assert ratio == pytest.approx(1 / 1.7**2, rel=1e-12)


def test_hazard_17_tensors_of_equal_shape_get_different_noise() -> None:
    sizes = {f"w{i}": 1000 for i in range(8)}
    total = bounded(sizes, (" ".join(sizes), 1.0))
    released = add_noise(total, noise_multiplier=1.0, normals=Normals(Key.from_seed(3)), step=0)
    noise = np.stack([residual(total, released, name) for name in sizes])
    assert np.abs(np.corrcoef(noise) - np.eye(8)).max() < 6 / math.sqrt(1000)


def test_hazard_17_steps_and_purposes_get_different_noise() -> None:
    total = bounded({"w": 1000}, ("w", 1.0))
    key = Key.from_seed(3)
    gradient, count = Normals(key, "gradient"), Normals(key, "count")
    noise = np.stack(
        [
            residual(total, add_noise(total, noise_multiplier=1.0, normals=source, step=step), "w")
            for source in (gradient, count)
            for step in (0, 1, 7)
        ]
    )
    assert np.abs(np.corrcoef(noise) - np.eye(6)).max() < 6 / math.sqrt(1000)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_hazard_14_shares_of_the_ranks_add_up_to_the_planned_variance(world: int) -> None:
    key = Key.from_seed(world)
    part = bounded({"w": 60_000}, ("w", 0.5))
    shares = [
        add_noise(part, noise_multiplier=3.0 / math.sqrt(world), normals=Normals(key, rank=rank), step=0)["w"]
        for rank in range(world)
    ]
    noise = sum(share.double() - 7.0 for share in shares)
    assert isinstance(noise, Tensor)
    assert is_normal(noise.numpy(), 1.5)
    assert not is_normal(noise.numpy(), 1.5 * 1.05)


def test_noise_of_zero_leaves_the_sum_and_scale_applies() -> None:
    total = bounded({"w": 10}, ("w", math.inf))
    released = add_noise(total, noise_multiplier=0.0, normals=Normals(Key.from_seed(0)), step=0, scale=0.5)
    assert torch.equal(released["w"], torch.full((10,), 3.5))
    assert torch.equal(total.tensors["w"], torch.full((10,), 7.0))


def test_scale_and_out_give_the_same_release_and_leave_the_sum() -> None:
    total = bounded({"w": 1000, "v": 77}, ("w v", 2.0))
    plain = add_noise(total, noise_multiplier=1.0, normals=Normals(Key.from_seed(0)), step=4)
    out = {name: torch.full_like(tensor, math.nan) for name, tensor in total.tensors.items()}
    scaled = add_noise(total, noise_multiplier=1.0, normals=Normals(Key.from_seed(0)), step=4, scale=1 / 600, out=out)
    for name in out:
        assert scaled[name] is out[name]
        torch.testing.assert_close(scaled[name] * 600, plain[name], rtol=1e-5, atol=1e-5)
        assert torch.equal(total.tensors[name], torch.full_like(out[name], 7.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_noise_is_float32_or_wider_in_every_dtype(dtype: torch.dtype) -> None:
    total = bounded({"w": 50_000}, ("w", 1.0), dtype=dtype)
    released = add_noise(total, noise_multiplier=1.0, normals=Normals(Key.from_seed(5)), step=0)
    assert released["w"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert is_normal(residual(total, released, "w"), 1.0)
    assert len(np.unique(residual(total, released, "w"))) > 45_000  # not the few values of half precision
    out = {"w": torch.empty(50_000, dtype=torch.bfloat16)}
    add_noise(total, noise_multiplier=1.0, normals=Normals(Key.from_seed(5)), step=0, out=out)
    assert torch.equal(out["w"], released["w"].to(torch.bfloat16))


def test_a_float64_sum_does_not_show_the_bits_that_the_noise_leaves_bare() -> None:
    # Whoever knows the other records knows `rest`; before rounding, release - rest was a float32 number without the
    # record and, with all its entries, never with it.
    torch.manual_seed(0)
    rest, record = torch.randn(1000, dtype=torch.float64), torch.randn(1000, dtype=torch.float64) / 40

    def bare(total: Tensor, step: int) -> bool:
        sums = BoundedSum({"w": total}, (Group(("w",), 1.0),))
        left = add_noise(sums, noise_multiplier=4.0, normals=Normals(Key.from_seed(0)), step=step)["w"] - rest
        return bool((left - left.float()).abs().max() < 1e-14)

    assert [bare(rest + k * record, 2 * k) for k in (0, 1)] == [False, False]
    released = add_noise(bounded({"w": 99}, ("w", 1.0), dtype=torch.float64), noise_multiplier=1.0, normals=fresh())[
        "w"
    ]
    assert torch.equal(released, released.float().double())


@pytest.mark.parametrize("bound", [1e-50, 1e-39, 1e45])
def test_noise_that_float32_would_lose_is_refused(bound: float) -> None:
    total = bounded({"w": 3}, ("w", bound), dtype=torch.float64)
    with pytest.raises(ValueError, match="does not fit float32"):
        add_noise(total, noise_multiplier=5.0, normals=fresh())
    add_noise(bounded({"w": 3}, ("w", 0.0)), noise_multiplier=5.0, normals=fresh())  # nothing moves it: no noise


def test_shapes_strides_and_order_are_kept() -> None:
    image = torch.zeros(4, 3, 5, 5).to(memory_format=torch.channels_last)
    total = BoundedSum(
        {"image": image, "empty": torch.zeros(0, 3), "one": torch.zeros(())},
        (Group(("one", "image", "empty"), 1.0),),
    )
    released = add_noise(total, noise_multiplier=1.0, normals=Normals(Key.from_seed(0)), step=0)
    assert list(released) == ["image", "empty", "one"]
    assert released["image"].shape == image.shape and released["one"].shape == ()
    numbers = Normals(Key.from_seed(0)).draw(0, 301)
    assert torch.equal(released["image"].flatten(), torch.from_numpy(numbers[:300]))
    assert released["one"].item() == numbers[300]


def test_hazard_22_a_step_is_released_once() -> None:
    total = bounded({"w": 10}, ("w", 1.0))
    source = Normals(Key.from_os())
    add_noise(total, noise_multiplier=1.0, normals=source, step=2)
    with pytest.raises(RuntimeError, match="drawn once"):
        add_noise(total, noise_multiplier=1.0, normals=source, step=2)


def test_hazard_22_noise_is_not_recorded_in_a_graph_that_would_repeat_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    asked = []
    monkeypatch.setattr("hush.noise.gaussian.refuse_capture", asked.append)
    add_noise(bounded({"w": 3}, ("w", 1.0)), noise_multiplier=1.0, normals=Normals(Key.from_seed(0)), step=0)
    assert asked == [torch.device("cpu")]
    refuse_capture(torch.device("cpu"))
    with pytest.raises(RuntimeError, match="same noise at every replay"):
        refuse_capture(torch.device("cuda"))


def test_no_other_room_draws_gaussian_noise() -> None:
    """Nothing in the package asks torch or numpy for normal numbers, but weights, initial or jittered, and pictures."""
    without_records = {"networks.py", "drawings.py", "function.py"}
    names = {"randn", "randn_like", "normal", "normal_", "standard_normal", "log_normal_", "multivariate_normal"}
    package = Path(inspect.getfile(add_noise)).parent.parent
    assert (package / "private.py").exists()
    for path in sorted(package.rglob("*.py")):
        called = {
            node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call)
        }
        assert path.name in without_records or not called & names, f"{path.name} draws its own: {called & names}"


def test_misuse_is_refused() -> None:
    def release(total: BoundedSum, **changed: object) -> None:
        arguments = {"noise_multiplier": 1.0, "normals": Normals(Key.from_seed(0)), "step": 0} | changed
        add_noise(total, **arguments)  # type: ignore[arg-type]

    good = bounded({"w": 3}, ("w", 1.0))
    for multiplier in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="noise_multiplier"):
            release(good, noise_multiplier=multiplier)
    for bound in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="a bound must be"):
            release(bounded({"w": 3}, ("w", bound)))
    with pytest.raises(ValueError, match="exactly one group"):
        release(bounded({"w": 3, "v": 3}, ("w", 1.0)))
    with pytest.raises(ValueError, match="exactly one group"):
        release(bounded({"w": 3}, ("w", 1.0), ("w", 1.0)))
    with pytest.raises(TypeError, match="floating point"):
        release(bounded({"w": 3}, ("w", 1.0), dtype=torch.int64))
    with pytest.raises(ValueError, match="scale"):
        release(good, scale=math.nan)
    with pytest.raises(ValueError, match="shape and device"):
        release(good, out={"w": torch.zeros(4)})
    with pytest.raises(ValueError, match="out must name"):
        release(good, out={"v": torch.zeros(3)})
