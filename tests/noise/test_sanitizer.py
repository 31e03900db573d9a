"""The sanitizer: its bound on one example, its noise, its event."""

import copy
import math
import pickle

import pytest
import torch
from scipy import stats

from hush.accounting.events import Gaussian
from hush.clipping.bounded_sum import BoundedSum, Group
from hush.clipping.clips import FlatClip, PerLayerClip, QuantileClip
from hush.noise.sanitizer import Sanitizer
from hush.randomness.streams import Key


def clipped(clip: FlatClip | PerLayerClip, gradients: dict[str, torch.Tensor]) -> BoundedSum:
    return Sanitizer(clip, noise_multiplier=1.0)._clipped_sum(gradients, clip)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_hazard_10_one_clipped_example_is_within_the_bound(dtype: torch.dtype, size: float) -> None:
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        gradients = {
            "a": (torch.randn(1, 30, 7, generator=generator) * size).to(dtype),
            "b": (torch.randn(1, 5, generator=generator) * size).to(dtype),
        }
        total = clipped(FlatClip(0.7), gradients)
        norm = math.sqrt(sum(tensor.square().sum().item() for tensor in total.tensors.values()))
        whole = math.sqrt(sum(tensor.double().square().sum().item() for tensor in gradients.values()))
        assert norm <= 0.7
        assert norm == pytest.approx(min(whole, 0.7), rel=1e-9)


def test_the_sum_is_that_of_a_loop_over_examples() -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = {"a": torch.randn(9, 4, 3, generator=generator), "b": torch.randn(9, 2, generator=generator)}
    want = {name: torch.zeros(tensor.shape[1:], dtype=torch.float64) for name, tensor in gradients.items()}
    for i in range(9):
        norm = math.sqrt(sum(tensor[i].double().square().sum().item() for tensor in gradients.values()))
        for name in want:
            want[name] += gradients[name][i].double() * min(1.0, 2.0 / norm)
    total = clipped(FlatClip(2.0), gradients)
    for name in want:
        torch.testing.assert_close(total.tensors[name], want[name], rtol=1e-12, atol=1e-12)


def test_neighbours_differ_by_at_most_the_sensitivity() -> None:
    generator = torch.Generator().manual_seed(1)
    gradients = {"a": 100 * torch.randn(50, 20, generator=generator), "b": torch.randn(50, 3, generator=generator)}
    with_it = clipped(FlatClip(1.0), gradients)
    for i in (0, 17, 49):
        without = {name: tensor.clone() for name, tensor in gradients.items()}
        for tensor in without.values():
            tensor[i] = 0
        other = clipped(FlatClip(1.0), without)
        moved = math.sqrt(
            sum((with_it.tensors[n] - other.tensors[n]).square().sum().item() for n in gradients)
        )  # fmt: skip
        assert 0.99 < moved <= with_it.sensitivity <= 1.00001


def test_layers_are_clipped_by_themselves() -> None:
    gradients = {"one.weight": torch.full((2, 4), 10.0), "two.weight": torch.full((2, 4), 10.0)}
    total = clipped(PerLayerClip({"one": 1.0, "two": 3.0}), gradients)
    assert total.tensors["one.weight"].norm().item() == pytest.approx(2.0)
    assert total.tensors["two.weight"].norm().item() == pytest.approx(6.0)
    assert [group.bound for group in total.groups] == pytest.approx([1.0, 3.0], rel=1e-5)


def test_hazard_9_a_gradient_that_is_not_finite_counts_as_zero() -> None:
    gradients = {"a": torch.ones(4, 3), "b": torch.ones(4, 2)}
    gradients["a"][1, 0] = math.nan
    gradients["b"][2, 1] = math.inf
    kept = {name: tensor[[0, 3]] for name, tensor in gradients.items()}
    total, want = clipped(FlatClip(10.0), gradients), clipped(FlatClip(10.0), kept)
    assert all(torch.equal(total.tensors[name], want.tensors[name]) for name in kept)


def test_the_noise_has_the_scale_of_the_event() -> None:
    sanitizer = Sanitizer(FlatClip(0.5), noise_multiplier=4.0, key=Key.from_seed(0))
    sanitized = sanitizer.sanitize({"w": torch.zeros(3, 60_000)})
    noise = sanitized.tensors["w"].double().numpy()
    assert sanitized.event == Gaussian(4.0)
    assert sanitized.tensors["w"].dtype == torch.float32
    assert stats.kstest(noise, "norm", args=(0, 2.0)).pvalue > 1e-3
    assert stats.kstest(noise, "norm", args=(0, 1.9)).pvalue < 1e-3
    assert stats.kstest(noise, "norm", args=(0, 2.1)).pvalue < 1e-3


def test_the_bound_does_not_tell_the_number_of_examples() -> None:
    bounds = {clipped(FlatClip(1.0), {"w": torch.zeros(n, 2)}).sensitivity for n in (0, 1, 600, 20_000)}
    assert len(bounds) == 1


def test_each_call_draws_new_noise_and_seeds_say_that_they_are_not_private() -> None:
    sanitizer = Sanitizer(FlatClip(1.0), noise_multiplier=1.0)
    first, second = (sanitizer.sanitize({"w": torch.zeros(0, 5)}) for _ in range(2))
    assert not torch.equal(first.tensors["w"], second.tensors["w"])
    assert first.private
    seeded = Sanitizer(FlatClip(1.0), noise_multiplier=1.0, key=Key.from_seed(1))
    assert not seeded.sanitize({"w": torch.zeros(0, 5)}).private


def noise_of(sanitizer: Sanitizer) -> bytes:
    return sanitizer.sanitize({"w": torch.zeros(1, 50)}).tensors["w"].numpy().tobytes()


@pytest.mark.parametrize("key", [Key.from_os(), Key.from_seed(0)], ids=["private", "seeded"])
def test_hazard_38_two_that_share_a_key_add_different_noise(key: Key) -> None:
    """The same noise on two sums: their difference would be the record."""
    sanitizers = [Sanitizer(FlatClip(1.0), noise_multiplier=100.0, key=key) for _ in range(2)]
    sanitizers.append(copy.copy(sanitizers[0]))
    noises = [noise_of(sanitizer) for _ in range(3) for sanitizer in sanitizers]
    assert len(set(noises)) == len(noises)
    with pytest.raises(TypeError, match="never pickled or copied"):
        copy.deepcopy(sanitizers[0])
    with pytest.raises(TypeError, match="never pickled or copied"):
        pickle.dumps(sanitizers[0])


def test_one_seed_gives_the_same_noise_in_the_same_order() -> None:
    def three() -> list[bytes]:
        key = Key.from_seed(3)
        first, second = (Sanitizer(FlatClip(1.0), noise_multiplier=1.0, key=key) for _ in range(2))
        return [noise_of(first), noise_of(second), noise_of(first)]

    assert three() == three()


def test_a_sum_that_is_bounded_already_only_gets_noise() -> None:
    total = BoundedSum({"w": torch.full((50_000,), 9.0)}, (Group(("w",), 3.0),))
    sanitized = Sanitizer(FlatClip(1.0), noise_multiplier=2.0, key=Key.from_seed(5)).sanitize(total)
    assert stats.kstest(sanitized.tensors["w"].double().numpy() - 9.0, "norm", args=(0, 6.0)).pvalue > 1e-3


def test_misuse_is_refused() -> None:
    with pytest.raises(ValueError, match="noise_multiplier"):
        Sanitizer(FlatClip(1.0), noise_multiplier=0.0)
    with pytest.raises(ValueError, match="releases a count"):
        Sanitizer(QuantileClip(initial=1.0), noise_multiplier=1.0)
    sanitizer = Sanitizer(FlatClip(1.0), noise_multiplier=1.0)
    with pytest.raises(ValueError, match="one first dimension"):
        sanitizer.sanitize({"a": torch.zeros(3, 2), "b": torch.zeros(4, 2)})
    with pytest.raises(ValueError, match="one first dimension"):
        sanitizer.sanitize({"a": torch.zeros(())})
    with pytest.raises(ValueError, match="at most"):
        sanitizer.sanitize({"a": torch.zeros(100_000, 1)})
