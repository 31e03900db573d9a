"""Matrix products: Linear with any number of leading dimensions, functional matmul and einsum, their biases."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hush.gradients.layers.affine import Affine, Bias
from hush.gradients.layers.products import Products
from hush.gradients.sums.per_example import Contribution, Rule, Site, Stored, Weights, wide
from hush.gradients.sums.small import added_up


def _addmm(site: Site) -> dict[int, Contribution] | None:
    """beta * bias + alpha * mat1 @ mat2."""
    found = _products(site, first=1, scale=site.saved["alpha"])
    if found is None or 0 not in site.wanted:
        return found
    shape, weight = site.shapes[0], found.get(2)
    if shape is None or len(shape) > 2 or site.layout.dim != 0 or (len(shape) == 2 and shape[0] != 1):
        return None
    unscaled = site.saved["alpha"] == site.saved["beta"] == 1
    if isinstance(weight, Products) and weight.alone_on_cpu and unscaled and shape == site.grad.shape[1:]:
        layer = Affine(weight.inputs, weight.gradients, weight.layout)
        return found | {0: Bias(layer), 2: replace(weight, layer=layer)}
    bias = site.layout.split(site.grad)
    if shape[-1] == bias.shape[-1] and site.saved["beta"] == 1:
        return found | {0: added_up(bias.reshape(*bias.shape[:2], *shape))}
    bias = wide(bias[:, 0]) if bias.shape[1] == 1 else bias.sum(1, dtype=wide(bias[:0]).dtype)
    if shape[-1] == 1 != bias.shape[-1]:
        bias = bias.sum(-1, keepdim=True)
    return found | {0: Stored(_scaled(bias, site.saved["beta"]).view(-1, *shape))}


def _mm(site: Site) -> dict[int, Contribution] | None:
    """self @ mat2."""
    return _products(site, first=0, scale=1)


def _products(site: Site, first: int, scale: float) -> dict[int, Contribution] | None:
    left, right = site.saved.get("mat1", site.saved.get("self")), site.saved["mat2"]
    found: dict[int, Contribution] = {}
    if first + 1 in site.wanted:
        if left is None or site.layout.dim != 0:
            return None
        found[first + 1] = Products(left, _scaled(site.grad, scale), site.layout, transposed=True)
    if first in site.wanted:
        if right is None or site.layout.dim != 1:
            return None
        found[first] = Products(right.t(), _scaled(site.grad, scale).t(), replace(site.layout, dim=0), transposed=False)
    return found


def _scaled(tensor: Tensor, scale: float) -> Tensor:
    return tensor if scale == 1 else tensor * scale


def _bmm(site: Site) -> dict[int, Contribution] | None:
    """self @ mat2 with a leading dimension: one matrix (einsum makes such), or many shared ones (experts, heads)."""
    left, right, layout = site.saved["self"], site.saved["mat2"], site.layout
    if site.wanted == (1,) and left is not None and layout.dim == 1:
        inputs, gradients, flip = left, site.grad, True
    elif site.wanted == (0,) and right is not None and layout.dim == 2:
        inputs, gradients, flip = right.transpose(1, 2), site.grad.transpose(1, 2), False
    else:
        return None
    flat = replace(layout, dim=0)
    if inputs.shape[0] == 1:
        return {site.wanted[0]: Leading(Products(inputs[0], gradients[0], flat, flip))}
    inputs, gradients = wide(flat.split(inputs, 1)), wide(flat.split(gradients, 1))
    values = torch.einsum("bthi,bthj->bhij" if flip else "bthi,bthj->bhji", inputs, gradients)
    return {site.wanted[0]: Stored(values)}


@dataclass(frozen=True)
class Leading(Contribution):
    """A contribution with a leading dimension of size one in front of the tensor."""

    inside: Contribution

    @property
    def terms(self) -> int:
        return self.inside.terms

    @property
    def rounded(self) -> float:
        return self.inside.rounded

    @property
    def apart(self) -> bool:
        return self.inside.apart

    @property
    def pairs(self) -> bool:
        return self.inside.pairs

    def additions(self, batch: int) -> float:
        return self.inside.additions(batch)

    def chain(self, shape: tuple[int, ...]) -> int:
        return self.inside.chain(shape[1:])

    def squared_norms(self) -> Tensor:
        return self.inside.squared_norms()

    def squared_mass(self) -> Tensor:
        return self.inside.squared_mass()

    def weighted_sum(self, weights: Weights) -> Tensor:
        return self.inside.weighted_sum(weights)[None]

    def per_example(self) -> Tensor:
        return self.inside.per_example()[:, None]

    def formed(self) -> Contribution:
        return Leading(self.inside.formed())


RULES = {
    "AddmmBackward0": Rule(_addmm, saved=("mat1", "mat2", "alpha", "beta")),
    "MmBackward0": Rule(_mm, saved=("self", "mat2")),
    "BmmBackward0": Rule(_bmm, saved=("self", "mat2")),
}
