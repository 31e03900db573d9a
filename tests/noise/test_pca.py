"""DP-PCA: sensitivity, noise, edge rows, streaming, sampling; eigenvectors against numpy."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

import hush.noise.pca
from hush.accounting.events import Gaussian, PoissonSampled
from hush.clipping.bounded_sum import BoundedSum
from hush.noise.pca import _second_moment, _unit_rows, dp_pca
from hush.randomness.streams import Key


def rows(count: int = 300, width: int = 6, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(count, width, generator=g) * torch.tensor([5.0, 3.0, 2.0, 1.0, 0.5, 0.2])[:width]


def moment_of(x: torch.Tensor) -> np.ndarray:
    return _second_moment([x]).tensors["moment"].numpy()


def noisy_matrix(monkeypatch: pytest.MonkeyPatch, x: torch.Tensor, **options: object) -> np.ndarray:
    """The symmetrised matrix whose eigenvectors are released."""
    seen: list[np.ndarray] = []
    real = torch.linalg.eigh

    def spy(matrix: torch.Tensor):
        seen.append(matrix.numpy().copy())
        return real(matrix)

    with monkeypatch.context() as patch:
        patch.setattr(torch.linalg, "eigh", spy)
        dp_pca(x, dimensions=1, **options)  # type: ignore[arg-type]
    return seen[0]


def test_directions_are_those_of_numpy_when_noise_is_negligible() -> None:
    x = rows(20_000)
    found = dp_pca(x, dimensions=3, noise_multiplier=1e-3, key=Key.from_seed(1))
    unit = x.double().numpy() / np.linalg.norm(x.double().numpy(), axis=1, keepdims=True)
    _, vectors = np.linalg.eigh(unit.T @ unit)
    for k in range(3):
        assert abs(abs(found.matrix[:, k].numpy() @ vectors[:, -1 - k]) - 1) < 1e-6
    torch.testing.assert_close(found.matrix.T @ found.matrix, torch.eye(3, dtype=torch.float64))
    assert found.event == Gaussian(1e-3) and found.seeded


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8])
def test_one_row_moves_the_computed_sum_by_at_most_the_bound(dtype: torch.dtype) -> None:
    x = (rows(5000) * 20).abs().to(dtype)
    whole = _second_moment(x.split(700))
    for victim in (0, 1234, 4999):
        without = x.clone()
        without[victim] = 0
        moved = whole.tensors["moment"].numpy() - _second_moment(without.split(700)).tensors["moment"].numpy()
        assert 0.999 < np.linalg.norm(moved) <= whole.sensitivity
    assert 1 < whole.sensitivity < 1 + 1e-6


@pytest.mark.parametrize("scale", [1e-300, 1e-160, 1.0, 1e150, 1e300])
def test_scaling_neither_overflows_nor_vanishes(scale: float) -> None:
    x = rows(50).double() * scale
    norms = np.linalg.norm(_unit_rows(x).numpy(), axis=1)
    assert np.abs(norms - 1).max() < 1e-14


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf, -math.inf])
def test_a_zero_or_non_finite_row_contributes_nothing(value: float) -> None:
    x = rows(40)
    x[7] = 0.0
    x[7, 2] = value
    assert np.array_equal(moment_of(x), moment_of(torch.cat([x[:7], torch.zeros(1, 6), x[8:]])))
    assert abs(np.trace(moment_of(x)) - 39) < 1e-9


def test_noise_is_on_every_entry_with_the_stated_deviation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Diagonal: deviation sigma. Off it: the mean of two independent entries, sigma / sqrt(2)."""
    x, sigma, width = torch.zeros(10, 60), 3.0, 60
    draws = [noisy_matrix(monkeypatch, x, noise_multiplier=sigma, key=Key.from_seed(s)) for s in range(40)]
    diagonal = np.concatenate([np.diag(m) for m in draws]) / sigma
    above = np.concatenate([m[np.triu_indices(width, 1)] for m in draws]) / sigma
    assert stats.kstest(diagonal, "norm").pvalue > 1e-3
    assert stats.kstest(above * math.sqrt(2), "norm").pvalue > 1e-3
    assert stats.kstest(above, "norm").pvalue < 1e-6  # a mirrored triangle would look like this
    assert all(np.array_equal(m, m.T) for m in draws)


def test_noise_reads_the_bound_of_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[BoundedSum] = []
    real = hush.noise.pca.add_noise

    def spy(total: BoundedSum, **options):
        seen.append(total)
        return real(total, **options)

    monkeypatch.setattr(hush.noise.pca, "add_noise", spy)
    dp_pca(rows(), dimensions=2, noise_multiplier=2.0)
    assert len(seen) == 1 and seen[0].sensitivity >= 1


def test_streaming_gives_the_same_directions() -> None:
    x = rows(10_000)
    whole = dp_pca(x, dimensions=2, noise_multiplier=4.0, key=Key.from_seed(3))
    parts = dp_pca(iter(x.split(777)), dimensions=2, noise_multiplier=4.0, key=Key.from_seed(3))
    torch.testing.assert_close(whole.matrix, parts.matrix, rtol=0, atol=1e-9)
    other = dp_pca(x, dimensions=2, noise_multiplier=4.0, key=Key.from_seed(4))
    assert (whole.matrix - other.matrix).abs().max() > 1e-6
    assert not dp_pca(x, dimensions=2, noise_multiplier=4.0).seeded


def test_hazard_38_two_that_share_a_key_add_different_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same noise on two moments: their difference would be the record."""
    for rate in (1.0, 0.5):
        key, nothing = Key.from_seed(0), torch.zeros(20, 5)
        one, two = (
            noisy_matrix(monkeypatch, nothing, noise_multiplier=1.0, sample_rate=rate, key=key) for _ in range(2)
        )
        assert np.abs(one - two).min() > 1e-6
        again = noisy_matrix(monkeypatch, nothing, noise_multiplier=1.0, sample_rate=rate, key=Key.from_seed(0))
        assert np.array_equal(one, again), "one seed, one order"


def test_the_sampled_variant_draws_rows_at_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    x = rows(20_000)
    event = dp_pca(x, dimensions=1, noise_multiplier=2.0, sample_rate=0.05).event
    assert event == PoissonSampled(0.05, Gaussian(2.0))
    options = {"noise_multiplier": 1e-9, "sample_rate": 0.05}
    sizes = [np.trace(noisy_matrix(monkeypatch, x, key=Key.from_seed(s), **options)) for s in range(30)]
    deviation = math.sqrt(20_000 * 0.05 * 0.95)
    assert abs(np.mean(sizes) - 1000) < 5 * deviation / math.sqrt(30)
    assert 0.6 * deviation < np.std(sizes) < 1.5 * deviation  # binomial, not a fixed size


def test_as_a_frozen_first_layer() -> None:
    found = dp_pca(rows(200, 6).reshape(200, 2, 3), dimensions=2, noise_multiplier=1.0)
    layer = found.layer()
    x = torch.randn(4, 2, 3)
    assert list(layer.parameters()) == [] and layer(x).shape == (4, 2)
    torch.testing.assert_close(layer(x), found(x), rtol=1e-5, atol=1e-6)


def test_wrong_questions_are_refused() -> None:
    with pytest.raises(ValueError, match="dimensions"):
        dp_pca(rows(), dimensions=7, noise_multiplier=1.0)
    with pytest.raises(ValueError, match="noise_multiplier"):
        dp_pca(rows(), dimensions=2, noise_multiplier=0.0)
    with pytest.raises(ValueError, match="sample_rate"):
        dp_pca(rows(), dimensions=2, noise_multiplier=1.0, sample_rate=0.0)
    with pytest.raises(ValueError, match="at least one row"):
        dp_pca([], dimensions=2, noise_multiplier=1.0)
    with pytest.raises(ValueError, match="same number of columns"):
        dp_pca([torch.zeros(2, 3), torch.zeros(2, 4)], dimensions=2, noise_multiplier=1.0)
    with pytest.raises(ValueError, match=r"\[N, d\]"):
        dp_pca(torch.zeros(5), dimensions=1, noise_multiplier=1.0)
