"""What a forward pass keeps where no state dict shows it: attributes of modules, and their extra state."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hush.checks.guards import is_public
from hush.errors import NotSupported

_OWN = {"_parameters", "_buffers", "_modules", "training"}


def what_is_kept(model: nn.Module) -> dict[str, object]:
    """For every attribute of a module that is not a parameter, buffer or child, something that changes with it."""
    kept = {}
    for prefix, module in model.named_modules():
        dot = f"{prefix}." if prefix else ""
        for name, value in vars(module).items():
            if name not in _OWN:
                kept[dot + name] = _trace(value, 0)
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            kept[dot + "extra state"] = _trace(module.get_extra_state(), 0)
    return kept


def refuse_kept(model: nn.Module, before: Mapping[str, object], public: Sequence[str]) -> None:
    """Refuse a forward pass that left something in an attribute: it would be saved with the model, without noise."""
    for name, trace in what_is_kept(model).items():
        if before.get(name, _NOTHING) != trace and not is_public(name, public):
            raise NotSupported(
                f"the forward pass keeps something in {name!r} of the model: what it computes from the batch would "
                "leave with the model, without noise. Do not store activations, statistics or counters in modules; if "
                f"what is kept does not depend on the examples, declare it with public_buffers=({name!r},)"
            )


_NOTHING = object()


def _trace(value: Any, depth: int) -> object:
    """Equal for what is the same, other for what changed: numbers by value, tensors by place, version and content."""
    if isinstance(value, Tensor):
        return id(value), value._version, _content(value)
    if isinstance(value, np.ndarray):
        return id(value), value.tobytes()
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)
    if isinstance(value, Mapping) and depth < 4:
        return {repr(key): _trace(part, depth + 1) for key, part in value.items()}
    if isinstance(value, list | tuple | set) and depth < 4:
        return [_trace(part, depth + 1) for part in value]
    return id(value)


def _content(value: Tensor) -> object:
    if value.layout != torch.strided or value.numel() > 1 << 20:
        return None
    return value.detach().cpu().double().nan_to_num(7e77).sum().item() if not value.is_complex() else None
