"""Norms and clipped sums of many models against a float64 loop of single backward passes."""

import math
import warnings

import pytest
import torch
from oracles import gradients as oracle
from oracles.models import CASES, Case

from hush.clipping import FlatClip, PerLayerClip
from hush.clipping.clips import layer_of
from hush.gradients.engine import Gradients


def trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: param for name, param in model.named_parameters() if param.requires_grad}


def clipped_sum(case: Case, model: torch.nn.Module, batch, clip, **options):
    return Gradients(lambda model, *batch: case.losses(model, batch), model).clipped_sum(batch, clip, **options)


def norm(tensors: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors.values()))


def distance(one, other) -> float:
    return norm({name: one[name].double() - other[name] for name in other})


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    torch.manual_seed(CASES.index(request.param))
    return request.param


def test_there_are_sixty_models():
    assert len({case.name for case in CASES}) == len(CASES) >= 60


def test_norms_and_clipped_sums(case: Case):
    model, batch = case.build(), case.batch()
    exact = oracle.per_example_gradients(model, batch, case.losses)
    norms = Gradients(lambda model, *batch: case.losses(model, batch), model).squared_norms(batch)
    expected = oracle.squared_norms(exact)
    assert list(norms) == list(expected)
    whole = sum(expected.values())
    for name, values in expected.items():
        # Relative to the tensor's own norm, or to a small part of the whole gradient's where the tensor's vanishes.
        torch.testing.assert_close(
            norms[name].double() / (values + 1e-3 * whole), values / (values + 1e-3 * whole), rtol=0, atol=1e-5
        )
    bound = 0.7 * float(whole.sqrt().median())
    ours = clipped_sum(case, model, batch, FlatClip(bound))
    theirs = oracle.clipped_sum(exact, bound)
    assert distance(ours.tensors, theirs) <= 1e-5 * norm(theirs)
    assert all(ours.tensors[name].shape == param.shape for name, param in trainable(model).items())


def test_one_example_at_a_time_is_bounded(case: Case):
    """A lot of one example, judged in float64: norm <= C, for every example of every model."""
    model, batch = case.build(), case.batch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for example in range(2):
            alone = tuple(tensor[example : example + 1] for tensor in batch)
            total = clipped_sum(case, model, alone, FlatClip(1e-3))
            assert 0.9e-3 < norm(total.tensors) <= 1e-3


def test_layers_clipped_alone(case: Case):
    model, batch = case.build(), case.batch()
    exact = oracle.per_example_gradients(model, batch, case.losses)
    bound = 0.5 * float(sum(oracle.squared_norms(exact).values()).sqrt().median())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = clipped_sum(case, model, batch, PerLayerClip(bound))
    for layer in {layer_of(name) for name in exact}:
        members = {name: values for name, values in exact.items() if layer_of(name) == layer}
        theirs = oracle.clipped_sum(members, bound)
        assert distance(ours.tensors, theirs) <= 1e-5 * norm(theirs) + 1e-12


def test_batches_add_up_to_one(case: Case):
    """Hazard 19 in general: two physical batches of any size give what one batch gives."""
    model, batch = case.build(), case.batch()
    bound = FlatClip(0.8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = clipped_sum(case, model, batch, bound)
        first = clipped_sum(case, model, tuple(t[:2] for t in batch), bound, rows=5)
        second = clipped_sum(case, model, tuple(t[2:] for t in batch), bound, rows=5)
    total = first + second
    assert distance(total.tensors, {name: t.double() for name, t in whole.tensors.items()}) <= 1e-5 * norm(
        whole.tensors
    )
    assert total.sensitivity >= 0.8


def test_the_model_is_left_alone(case: Case):
    """No gradient written, no hook, no attribute, no buffer, no parameter changed."""
    model, batch = case.build(), case.batch()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        clipped_sum(case, model, batch, FlatClip(1.0))
    assert all(param.grad is None and not param._backward_hooks for param in model.parameters())
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
