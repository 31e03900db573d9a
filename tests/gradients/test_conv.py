"""Convolution rules against the definition, in float64, over random geometries."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.convolution import kernel_gradients as oracle

from hush.gradients.layers.convolution import ghost as conv_ghost
from hush.gradients.layers.convolution import kernels as conv_kernels
from hush.gradients.layers.convolution import rule as conv
from hush.gradients.layers.convolution.geometry import Geometry
from hush.gradients.layers.convolution.rule import Convolution, KeptKernels, NormedKernels
from hush.gradients.sums.per_example import Layout, Site, Weights

FORWARD = {
    (1, False): F.conv1d,
    (2, False): F.conv2d,
    (3, False): F.conv3d,
    (1, True): F.conv_transpose1d,
    (2, True): F.conv_transpose2d,
    (3, True): F.conv_transpose3d,
}


@st.composite
def layers(draw):
    """A random convolution that PyTorch accepts: input shape, weight shape and arguments."""
    n = draw(st.integers(1, 3))
    per_axis = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(n))  # noqa: E731
    kernel, stride, dilation, padding = per_axis(1, 4), per_axis(1, 3), per_axis(1, 3), per_axis(0, 3)
    transposed = draw(st.booleans())
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    inputs, outputs = draw(st.integers(1, 3)) * groups, draw(st.integers(1, 3)) * groups
    sizes = per_axis(1, 7 if n < 3 else 4)
    extent = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    extra = (0,) * n
    if transposed:
        extra = tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True))
        least = [(2 * p - e - x) // s + 2 for p, e, x, s in zip(padding, extent, extra, stride, strict=True)]
    else:
        least = [e - 2 * p for e, p in zip(extent, padding, strict=True)]
    sizes = tuple(max(size, low, 1) for size, low in zip(sizes, least, strict=True))
    shape = (inputs, outputs // groups) if transposed else (outputs, inputs // groups)
    arguments = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    if transposed:
        arguments["output_padding"] = extra
    return (draw(st.integers(1, 4)), inputs, *sizes), (*shape, *kernel), transposed, arguments


def convolve(x, weight, transposed, arguments):
    return FORWARD[x.dim() - 2, transposed](x, weight, **arguments)


def convolution(x, grad, weight_shape, transposed, arguments, layout=None):
    names = ("stride", "padding", "dilation", "groups")
    geometry = Geometry(tuple(weight_shape), *(arguments[name] for name in names))
    if transposed:
        x, grad = grad, x
    return Convolution(x, grad, geometry, layout or Layout(0, 1, x.shape[0], 1))


def expected(x, grad, weight_shape, transposed, arguments):
    geometry = {**arguments, "transposed": transposed}
    return oracle(x.double().numpy(), grad.double().numpy(), tuple(weight_shape), geometry)


def sample(layer, seed=0, dtype=torch.float32):
    shape, weight_shape, transposed, arguments = layer
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator).to(dtype)
    out = convolve(x.float(), torch.zeros(weight_shape), transposed, arguments)
    return x, torch.randn(out.shape, generator=generator).to(dtype)


def norms_of(gradients):
    return (gradients.reshape(len(gradients), -1) ** 2).sum(1)


def close(actual, wanted, tolerance=1e-5, mass=0.0):
    """Relative to the result; a millionth of the mass of what was added up is rounding that nothing can avoid."""
    actual, wanted = np.asarray(actual, dtype=np.float64), np.asarray(wanted)
    assert actual.shape == wanted.shape
    assert np.linalg.norm(actual - wanted) <= tolerance * np.linalg.norm(wanted) + 1e-6 * mass + 1e-12


@settings(max_examples=250, deadline=None)
@given(layers(), st.integers(0, 10**6))
def test_all_ways_agree_with_the_definition(layer, seed):
    x, grad = sample(layer, seed)
    wanted = expected(x, grad, *layer[1:])
    place = convolution(x, grad, *layer[1:])
    pixels, sent = place.split()
    ways = [torch.cat(list(conv_kernels._window_gradients(pixels, sent, place.geometry)))]
    ways.append(conv_kernels._grouped_gradients(pixels, sent, place.geometry))
    kept = [KeptKernels(values, place.geometry.weight_shape) for values in ways]
    norms, masses = conv_ghost.ghost_norms(*place.with_rows_as_axis())
    ghost = NormedKernels(place, norms, masses, ghost=True)
    weights = Weights(torch.rand(len(wanted), generator=torch.Generator().manual_seed(seed)))
    total = np.tensordot(weights.factors.numpy(), wanted, 1)
    mass = masses.double().sum().item()
    for contribution in (*kept, ghost, conv.kernel_contribution(place)):
        close(contribution.squared_norms(), norms_of(wanted), 2e-5, mass)
        close(contribution.per_example(), wanted, mass=mass**0.5)
        close(contribution.weighted_sum(weights), total, mass=2 * mass**0.5)
    squared = conv_kernels.kernel_norms(*place.split(), place.geometry)
    close(squared, norms_of(wanted), 2e-5, mass)
    for bound in (masses, conv.squared_mass(place)):
        assert (bound.double().numpy() >= norms_of(wanted) * (1 - 1e-5) - 1e-12).all()


LAYER = ((4, 4, 6, 5), (6, 2, 3, 2), False, {"stride": (2, 1), "padding": (1, 2), "dilation": (1, 2), "groups": 2})
WIDE = ((4, 16, 15, 15), (32, 16, 3, 3), False, {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1})
STRIDED = ((4, 16, 13, 13), (32, 16, 4, 4), False, {**WIDE[3], "stride": (2, 2), "padding": (0, 0)})
SMALL = ((4, 16, 3, 3), (32, 16, 3, 3), False, {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1})
NAMES = ["odd", "wide", "small", "strided"]


def site(x, grad, layer, layout=None):
    _, weight_shape, transposed, arguments = layer
    saved = {"input": x, "transposed": transposed, **arguments}
    outputs = weight_shape[1] * arguments["groups"] if transposed else weight_shape[0]
    return Site(
        name="ConvolutionBackward0",
        saved=saved,
        grads=(grad,),
        layouts=(layout or Layout(0, 1, len(x), 1),),
        wanted=(1, 2),
        shapes=(None, tuple(weight_shape), (outputs,)),
        node=None,
    )


def through_the_rule(x, grad, layer, layout=None):
    return conv.RULES["ConvolutionBackward0"].contributions(site(x, grad, layer, layout))


@pytest.mark.parametrize(
    "shape, kernel, stride, dilation, padding",
    [
        ((2, 1, 2, 1, 1), (1, 1, 4, 1, 1), (2, 1, 1), (1, 1, 1), (3, 0, 0)),
        ((2, 1, 4, 1, 1), (1, 1, 4, 1, 1), (2, 1, 1), (1, 1, 1), (3, 0, 0)),
        ((2, 3, 3, 1, 1), (1, 3, 4, 2, 3), (2, 1, 3), (1, 1, 2), (3, 1, 2)),
    ],
)
def test_padding_that_pytorch_gets_wrong(shape, kernel, stride, dilation, padding):
    """PyTorch's own kernel gradient is wrong here (torch 2.13, CPU); ours must not inherit it."""
    layer = (shape, kernel, False, {"stride": stride, "padding": padding, "dilation": dilation, "groups": 1})
    for seed in range(5):
        x, grad = sample(layer, seed)
        wanted = expected(x, grad, *layer[1:])
        place = convolution(x, grad, *layer[1:])
        close(conv.scaled_kernel_gradient(place, Weights(torch.ones(2))), wanted.sum(0), mass=10.0)
        values = conv_kernels._grouped_gradients(*place.split(), place.geometry)
        close(KeptKernels(values, kernel).per_example(), wanted, mass=10.0)


def test_what_the_rule_asks_for_is_what_autograd_saves():
    """The names of the saved values are semi-private in PyTorch: this fails where a version renames one."""
    for (axes, transposed), forward in FORWARD.items():
        weight = torch.ones(2, 2, *[3] * axes, requires_grad=True)
        out = forward(torch.ones(1, 2, *[4] * axes), weight, torch.ones(2))
        node = out.grad_fn
        assert node.name() == "ConvolutionBackward0"
        for name in conv.RULES["ConvolutionBackward0"].saved:
            assert getattr(node, f"_saved_{name}") is not None
        assert node._saved_transposed is transposed


@pytest.mark.parametrize("layer", [LAYER, WIDE, SMALL, STRIDED], ids=NAMES)
@pytest.mark.parametrize("outer, inner", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_rows_of_an_example_add_up_in_every_layout(layer, outer, inner):
    """Video frames folded into the batch: rows lie around, within, or both around and within the examples."""
    shape, *rest = layer
    batch = shape[0]
    x, grad = sample(((outer * batch * inner, *shape[1:]), *rest))
    rows = expected(x, grad, *rest).reshape(outer, batch, inner, -1)
    wanted = rows.sum((0, 2))
    found = through_the_rule(x, grad, layer, Layout(0, outer, batch, inner))
    weights = Weights(torch.rand(batch, generator=torch.Generator().manual_seed(3)))
    close(found[1].squared_norms(), norms_of(wanted), 2e-5)
    close(found[1].per_example().flatten(1), wanted)
    close(found[1].weighted_sum(weights).flatten(), weights.factors.double().numpy() @ wanted)
    bias = grad.double().flatten(2).sum(2).view(outer, batch, inner, -1).sum((0, 2))
    close(found[2].per_example(), bias)


def test_the_cost_model_takes_each_way_somewhere(monkeypatch):
    """Otherwise the other tests of the rule would show less than they seem to."""
    used = []
    for name in ("_window_gradients", "_grouped_gradients", "ghost_norms", "kernel_norms"):
        for module in (conv, conv_kernels):
            if function := getattr(module, name, None):
                spy = lambda *a, name=name, function=function: used.append(name) or function(*a)  # noqa: E731
                monkeypatch.setattr(module, name, spy)
    ways = {}
    for name, layer in {"odd": LAYER, "wide": WIDE, "small": SMALL, "strided": STRIDED}.items():
        used.clear()
        through_the_rule(*sample(layer), layer)
        ways[name] = list(used)
    assert ways == {
        "odd": ["_window_gradients"],
        "wide": ["_grouped_gradients"],
        "small": ["ghost_norms"],
        "strided": ["kernel_norms", "_window_gradients"],
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("layer", [LAYER, WIDE, SMALL, STRIDED], ids=NAMES)
def test_half_precision_is_accumulated_in_fp32(layer, dtype):
    x, grad = sample(layer, dtype=dtype)
    wanted = expected(x, grad, *layer[1:])
    found = through_the_rule(x, grad, layer)
    contribution = found[1]
    weights = Weights(torch.rand(len(wanted)))
    accumulated = torch.float64 if dtype == torch.float64 else torch.float32
    for part in found.values():
        for result in (part.squared_norms(), part.per_example(), part.weighted_sum(weights)):
            assert result.dtype == accumulated
    close(found[2].per_example(), grad.double().flatten(2).sum(2), mass=10.0)
    close(contribution.squared_norms(), norms_of(wanted), 2e-5)
    close(contribution.weighted_sum(weights), np.tensordot(weights.factors.numpy(), wanted, 1))


@pytest.mark.parametrize("layer", [LAYER, WIDE, SMALL, STRIDED], ids=NAMES)
def test_memory_formats(layer):
    x, grad = sample(layer)
    wanted = through_the_rule(x, grad, layer)[1]
    weights = Weights(torch.rand(len(x)))
    last = torch.channels_last
    for a, b in ((x.to(memory_format=last), grad.to(memory_format=last)), (x.mT.contiguous().mT, grad)):
        found = through_the_rule(a, b, layer)[1]
        close(found.squared_norms(), wanted.squared_norms())
        close(found.weighted_sum(weights), wanted.weighted_sum(weights))


@pytest.mark.parametrize("layer", [LAYER, WIDE, SMALL, STRIDED], ids=NAMES)
@pytest.mark.parametrize("where", ["input", "gradient"])
@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e30])
def test_hazard_09_a_broken_example_stays_alone(layer, where, value):
    """Its norm is not finite, nobody else's changes, and the sum is that of the others."""
    x, grad = sample(layer)
    clean = through_the_rule(x, grad, layer)
    x, grad = x.clone(), grad.clone()
    (x if where == "input" else grad)[1] = value
    found = through_the_rule(x, grad, layer)
    silent = torch.tensor([False, True, False, False])
    factors = torch.tensor([0.5, 0.0, 1.0, 0.25])
    for index, contribution in found.items():
        if index == 1 or where == "gradient":
            assert not contribution.squared_norms()[1].isfinite()
        assert torch.equal(contribution.squared_norms()[~silent], clean[index].squared_norms()[~silent])
        close(contribution.weighted_sum(Weights(factors, silent)), clean[index].weighted_sum(Weights(factors)))


@pytest.mark.parametrize("seed", range(6))
def test_ghost_norm_is_never_below_the_truth_by_more_than_its_mass_says(seed):
    """Nearly constant pixels and gradients that nearly cancel: the norm is a small difference of large products."""
    generator = torch.Generator().manual_seed(seed)
    x = 1 + 1e-4 * torch.randn(8, 32, 8, 8, generator=generator)
    grad = torch.randn(8, 32, 8, 8, generator=generator)
    grad -= grad.mean((2, 3), keepdim=True)
    geometry = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}
    place = convolution(x, grad, (32, 32, 1, 1), False, geometry)
    wanted = norms_of(expected(x, grad, (32, 32, 1, 1), False, geometry))
    norms, masses = (values.double().numpy() for values in conv_ghost.ghost_norms(*place.with_rows_as_axis()))
    assert (wanted < 1e-6 * masses).all()
    assert (np.abs(norms - wanted) <= 2**-23 * masses).all()


def test_the_rule_exchanges_the_tensors_of_a_transposed_convolution():
    arguments = {"stride": (2, 1), "padding": (1, 0), "dilation": (1, 2), "groups": 2, "output_padding": (1, 0)}
    layer = ((3, 4, 5, 4), (4, 3, 3, 2), True, arguments)
    x, grad = sample(layer)
    wanted = expected(x, grad, *layer[1:])
    found = through_the_rule(x, grad, layer)
    close(found[1].per_example(), wanted)
    close(found[1].squared_norms(), norms_of(wanted), 2e-5)
    close(found[2].per_example(), grad.double().flatten(2).sum(2))
