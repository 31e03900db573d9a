"""Replacing layers that mix examples, or remember them, by layers that treat each example alone."""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm


def replace_batchnorm(model: nn.Module, *, groups: int = 32) -> nn.Module:
    """Put GroupNorm where BatchNorm was, in place, and return the model.

    Scale and shift are kept (as the same parameters, so an optimizer made before stays right); running statistics are
    dropped. A layer gets the largest number of groups up to `groups` that divides its channels. InstanceNorm that
    tracks running statistics becomes one that does not. Do this before making the optimizer and `hush.Private`.

    >>> replace_batchnorm(nn.Sequential(nn.Conv2d(3, 48, 3), nn.BatchNorm2d(48)))[1].num_groups
    24
    """
    new = _replacement(model, groups)
    if new is not None:
        return new
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            new = _replacement(child, groups)
            if new is not None:
                setattr(module, name, new)
    return model


def mixes_examples(module: nn.Module) -> bool:
    """Whether the module, as it stands now, takes statistics over the batch or remembers them."""
    if isinstance(module, _BatchNorm):
        return module.training or not module.track_running_stats or module.running_mean is None
    return isinstance(module, _InstanceNorm) and module.training and module.track_running_stats


def may_mix(module: nn.Module) -> bool:
    """Whether the module is of a kind that `mixes_examples` in some setting."""
    return isinstance(module, _BatchNorm | _InstanceNorm)


def _replacement(module: nn.Module, groups: int) -> nn.Module | None:
    if isinstance(module, _BatchNorm):
        channels = module.num_features
        divisor = max(g for g in range(1, min(groups, channels) + 1) if channels % g == 0)
        new: nn.Module = nn.GroupNorm(divisor, channels, eps=module.eps, affine=module.affine)
    elif isinstance(module, _InstanceNorm) and module.track_running_stats:
        new = type(module)(module.num_features, eps=module.eps, affine=module.affine, track_running_stats=False)
    else:
        return None
    if module.affine:
        new.weight, new.bias = module.weight, module.bias
    return new.train(module.training)
