"""What a loss function gets besides the model: tensors with the examples along their first dimension, at any depth."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_NO_KWARGS: Mapping[str, Any] = {}


class Inputs(NamedTuple):
    """Positional and named inputs. Every tensor with a dimension has one row for each example; the rest is shared."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = _NO_KWARGS

    @staticmethod
    def of(given: Any) -> "Inputs":
        """A tuple or list is taken as positional inputs, a mapping as named ones, a tensor as the only input."""
        if isinstance(given, Inputs):
            return given
        if isinstance(given, Mapping):
            return Inputs((), given)
        return Inputs(tuple(given) if isinstance(given, (tuple, list)) else (given,))

    @property
    def rows(self) -> int:
        """The number of examples; refuses tensors that do not agree on it, by their place."""
        sized = [(path, tensor.shape[0]) for path, tensor in self.tensors() if tensor.dim()]
        if not sized:
            raise ValueError("the inputs hold no tensor with a dimension: expected one row for each example")
        rows = sized[0][1]
        for path, size in sized:
            if size != rows:
                raise ValueError(
                    f"inputs{path}: expected {rows} rows, one for each example as in inputs{sized[0][0]}, got {size}. "
                    "What all examples share (class weights, an edge list) is closed over, not passed"
                )
        return rows

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Every tensor and where it lies."""
        found: list[tuple[str, Tensor]] = []

        def note(tensor: Tensor, path: str) -> Tensor:
            found.append((path, tensor))
            return tensor

        self._walked(note)
        return found

    def map(self, function: Callable[[Tensor], Tensor]) -> "Inputs":
        """The same inputs with each tensor replaced by function(tensor)."""
        return self._walked(lambda tensor, path: function(tensor))

    def take(self, index: Tensor) -> "Inputs":
        """These rows of all tensors that have rows."""
        return self.map(lambda tensor: tensor[index.to(tensor.device)] if tensor.dim() else tensor)

    def _walked(self, function: Callable[[Tensor, str], Tensor]) -> "Inputs":
        args = tuple(_mapped(function, value, f"[{place}]") for place, value in enumerate(self.args))
        return Inputs(args, {name: _mapped(function, value, f'["{name}"]') for name, value in self.kwargs.items()})


def has_rows(leaf: Any) -> bool:
    """Whether the leaf is a tensor with the examples along its first dimension."""
    return isinstance(leaf, Tensor) and leaf.dim() > 0


def _mapped(function: Callable[[Tensor, str], Tensor], value: Any, path: str) -> Any:
    if isinstance(value, Tensor):
        if value.is_nested or value.layout != torch.strided:
            kind = "a nested tensor" if value.is_nested else f"a tensor with layout {value.layout}"
            raise ValueError(f"inputs{path} is {kind}: expected a dense one, padded where lengths differ")
        return function(value, path)
    if value is None or isinstance(value, (str, bytes, int, float, complex, bool)):
        return value
    if isinstance(value, Mapping):
        pairs = {key: _mapped(function, item, f"{path}[{key!r}]") for key, item in value.items()}
        return pairs if type(value) is dict else type(value)(pairs)  # type: ignore[call-arg]
    named: Any = getattr(value, "_asdict", dict)()
    if isinstance(value, tuple) and named:
        return type(value)(*[_mapped(function, item, f"{path}.{name}") for name, item in named.items()])
    if isinstance(value, (tuple, list)):
        return type(value)(_mapped(function, item, f"{path}[{place}]") for place, item in enumerate(value))
    leaves, structure = pytree.tree_flatten(value)
    if len(leaves) == 1 and leaves[0] is value:
        return value
    return pytree.tree_unflatten([_mapped(function, leaf, f"{path}.{k}") for k, leaf in enumerate(leaves)], structure)
