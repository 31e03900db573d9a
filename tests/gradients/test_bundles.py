"""Small stored gradients side by side: the same norms and sums as one by one."""

import torch

from hush.gradients.sums.norms import upper_squared_norms
from hush.gradients.sums.per_example import Contribution, Stored, Weights
from hush.gradients.sums.small import Parts, bundled


def stored(batch: int = 5, **shapes: tuple[int, ...]) -> tuple[dict[str, Contribution], dict[str, tuple[int, ...]]]:
    torch.manual_seed(0)
    return {name: Stored(torch.randn(batch, *shape)) for name, shape in shapes.items()}, shapes


def test_norms_and_sums_are_those_of_the_parts() -> None:
    found, shapes = stored(a=(3,), b=(), c=(2, 4), d=(50, 100), e=(1,))
    bundles = bundled(found, shapes)
    assert sorted(len(bundle.names) for bundle in bundles) == [1, 4]
    together = upper_squared_norms([(bundle.contribution, bundle.shape) for bundle in bundles])
    exact = sum(part.per_example().double().reshape(5, -1).square().sum(1) for part in found.values())
    assert bool((together >= exact).all())
    torch.testing.assert_close(together.double(), exact, rtol=2e-3, atol=0)
    weights = Weights(torch.rand(5), torch.tensor([False, True, False, False, False]))
    sums = {name: total for bundle in bundles for name, total in bundle.sums(weights).items()}
    for name, part in found.items():
        want = part.weighted_sum(weights)
        assert sums[name].shape == want.shape == shapes[name]
        torch.testing.assert_close(sums[name], want)


def test_what_is_large_alone_or_known_stays_alone() -> None:
    found, shapes = stored(a=(4097,), b=(3,), c=(3,))
    assert [bundle.names for bundle in bundled(found, shapes)] == [("a",), ("b",), ("c",)]
    found["c"] = Stored(torch.ones(5, 3), known=torch.full((5,), 3.0))
    found |= {"d": Stored(torch.ones(5, 3)), "e": Stored(torch.ones(5, 3).double())}
    shapes |= {"d": (3,), "e": (3,)}
    assert all(len(bundle.names) == 1 for bundle in bundled(found, shapes))


def test_no_matrix_is_wider_than_the_bound_on_rounding_wants() -> None:
    found, shapes = stored(batch=2, **{f"p{number}": (3000,) for number in range(10)})
    bundles = bundled(found, shapes)
    assert max(bundle.shape[0] for bundle in bundles) <= 8192
    assert sorted(name for bundle in bundles for name in bundle.names) == sorted(found)


def test_parts_of_sums_are_added_up_for_a_whole_bundle() -> None:
    found, shapes = stored(a=(3,), b=(2, 4), c=(5,), d=(7,), e=(2,), f=(6,))
    found |= {name: Parts(torch.randn(5, 3, *shapes[name])) for name in ("a", "b", "d")}
    found |= {"e": Parts(torch.randn(5, 2, 2))}  # with another number of parts
    bundles = bundled(found, shapes)
    assert sorted(bundle.names for bundle in bundles) == [("a", "b", "d"), ("c",), ("e",), ("f",)]
    weights = Weights(torch.rand(5))
    sums = {name: total for bundle in bundles for name, total in bundle.sums(weights).items()}
    for bundle in bundles:
        exact = sum(found[name].per_example().double().reshape(5, -1).square().sum(1) for name in bundle.names)
        torch.testing.assert_close(bundle.contribution.squared_norms().double(), exact, rtol=1e-6, atol=0)
    for name, part in found.items():
        each = part.values.sum(1) if isinstance(part, Parts) else part.per_example()
        assert torch.equal(part.per_example(), each)
        torch.testing.assert_close(part.squared_norms(), each.reshape(5, -1).square().sum(1))
        torch.testing.assert_close(part.weighted_sum(weights), torch.einsum("b,b...->...", weights.factors, each))
        torch.testing.assert_close(sums[name], torch.einsum("b,b...->...", weights.factors, each))
    assert Parts(torch.ones(5, 2, 3)).additions(7) == Stored(torch.ones(5, 3)).additions(7)
