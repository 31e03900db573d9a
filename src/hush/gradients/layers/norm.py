"""LayerNorm, GroupNorm, RMSNorm, and BatchNorm with fixed statistics; the affine part of each.

InstanceNorm needs no rule: it repeats its weight for each example, and that repetition is where the examples part.
"""

import torch
from torch import Tensor

from hush.gradients.sums.per_example import Contribution, Layout, Rule, Site, wide
from hush.gradients.sums.small import added_up


def _layer_norm(site: Site) -> dict[int, Contribution] | None:
    shape = tuple(site.saved["normalized_shape"])
    mean, scale = wide(site.saved["result1"]), wide(site.saved["result2"])
    return _affine(site, shape, (wide(site.saved["input"]) - mean) * scale)


def _rms_norm(site: Site) -> dict[int, Contribution] | None:
    shape = tuple(site.saved["normalized_shape"])
    return _affine(site, shape, wide(site.saved["input"]) * wide(site.saved["result1"]))


def _affine(site: Site, shape: tuple[int, ...], normalised: Tensor) -> dict[int, Contribution] | None:
    """Weight (input 1) and bias (input 2) of the trailing dimensions."""
    leading = site.grad.dim() - len(shape)
    if 0 in site.wanted or site.layout.dim >= leading:
        return None
    gradient = wide(site.grad)
    found: dict[int, Contribution] = {}
    if 1 in site.wanted:
        found[1] = added_up(_rows(site.layout, gradient * normalised, shape))
    if 2 in site.wanted:
        found[2] = added_up(_rows(site.layout, gradient, shape))
    return found


def _rows(layout: Layout, values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """[batch, T, *shape]"""
    return layout.split(values).reshape(layout.batch, -1, *shape)


def _group_norm(site: Site) -> dict[int, Contribution] | None:
    saved = site.saved
    images, channels, groups = saved["N"], saved["C"], saved["group"]
    if 0 in site.wanted or site.layout.dim != 0:
        return None
    # The sums that the layer's backward pass takes as well, written in the same way: a compiler takes them once.
    gradient = wide(site.grad)
    of_gradient = gradient.reshape(images, channels, saved["HxW"]).sum(dim=[2])
    found: dict[int, Contribution] = {}
    if 1 in site.wanted:
        of_product = torch.mul(gradient, wide(saved["input"])).reshape(images, channels, saved["HxW"]).sum(dim=[2])
        mean, scale = (wide(saved[name]).view(images, groups, 1) for name in ("result1", "result2"))
        centred = of_product.view(images, groups, -1) - of_gradient.view(images, groups, -1) * mean
        found[1] = added_up(_rows(site.layout, (centred * scale).reshape(images, channels), (channels,)))
    if 2 in site.wanted:
        found[2] = added_up(_rows(site.layout, of_gradient, (channels,)))
    return found


def _fixed_batch_norm(site: Site) -> dict[int, Contribution] | None:
    saved = site.saved
    if saved["training"] or 0 in site.wanted or site.layout.dim != 0 or saved["running_mean"] is None:
        return None
    gradient = wide(site.grad)
    channels = gradient.shape[1]
    gradient = gradient.reshape(gradient.shape[0], channels, -1)
    found: dict[int, Contribution] = {}
    if 1 in site.wanted:
        centred = wide(saved["input"]).reshape(gradient.shape) - wide(saved["running_mean"])[:, None]
        scale = torch.rsqrt(wide(saved["running_var"]) + saved.get("eps", saved.get("epsilon")))
        found[1] = added_up(_rows(site.layout, (gradient * centred).sum(-1) * scale, (channels,)))
    if 2 in site.wanted:
        found[2] = added_up(_rows(site.layout, gradient.sum(-1), (channels,)))
    return found


_BATCH_NORM = ("training", "input", "running_mean", "running_var")

RULES = {
    "NativeLayerNormBackward0": Rule(_layer_norm, saved=("normalized_shape", "input", "result1", "result2")),
    "FusedRmsNormBackward0": Rule(_rms_norm, saved=("normalized_shape", "input", "result1")),
    "NativeGroupNormBackward0": Rule(_group_norm, saved=("N", "C", "HxW", "group", "input", "result1", "result2")),
    "NativeBatchNormBackward0": Rule(_fixed_batch_norm, saved=(*_BATCH_NORM, "eps")),
    "CudnnBatchNormBackward0": Rule(_fixed_batch_norm, saved=(*_BATCH_NORM, "epsilon")),
    "MiopenBatchNormBackward0": Rule(_fixed_batch_norm, saved=(*_BATCH_NORM, "epsilon")),
}
