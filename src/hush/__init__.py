"""hush: training neural networks with differential privacy.

The table of contents. Names are loaded when first used, so that `hush.accounting` and the command line start without torch.
"""

from importlib import import_module
from typing import Any

_WHERE = {
    "accounting": ("Bounds", "Budget"),
}
_MODULE = {name: module for module, names in _WHERE.items() for name in names}

__all__ = ["Bounds", "Budget"]


def __getattr__(name: str) -> Any:
    if name in _MODULE:
        return getattr(import_module(f"hush.{_MODULE[name]}"), name)
    raise AttributeError(f"module 'hush' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
