"""The scattering against sums over pixels, and that it treats every image on its own."""

import numpy as np
import pytest
import torch
from oracles.scattering import scattering as by_sums

from hush.recipes.features.scattering import Scattering, scatter


def images(count: int, size: int) -> torch.Tensor:
    return torch.rand(count, size, size, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def test_equals_sums_over_pixels() -> None:
    x = images(1, 12)
    ours = Scattering(12, angles=3)(x)[0].numpy()
    assert ours.shape == (1 + 6 + 9, 3, 3)
    np.testing.assert_allclose(ours, by_sums(x[0].numpy(), 3), atol=1e-12)


def test_mnist_shape_and_single_precision() -> None:
    x = images(3, 28)
    exact, single = scatter(x), scatter(x.float(), batch_size=2)
    assert exact.shape == (3, 81, 7, 7) and single.dtype == torch.float32
    assert (exact - single).abs().max() < 1e-5


def test_an_image_does_not_see_its_neighbours() -> None:
    x = images(4, 28)
    changed = x.clone()
    changed[1] = 0
    before, after = scatter(x), scatter(changed)
    assert torch.equal(before[[0, 2, 3]], after[[0, 2, 3]]) and not torch.equal(before[1], after[1])


def test_wavelets_ignore_a_constant_image() -> None:
    coefficients = scatter(torch.full((1, 28, 28), 0.7, dtype=torch.float64))[0]
    assert coefficients[1:].abs().max() < 1e-12
    assert (coefficients[0] - coefficients[0, 3, 3]).abs().max() < 1e-12


@pytest.mark.parametrize("shape", [(2, 28), (2, 1, 28, 28), (2, 28, 32)])
def test_wrong_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="expected images of shape"):
        Scattering(28)(torch.zeros(shape))
