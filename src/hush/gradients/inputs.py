"""What a loss function gets besides the model: tensors with the examples along their first dimension, at any depth."""

from collections.abc import Callable, Iterator, Mapping
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

        def note(leaf: Any, path: str) -> Any:
            if isinstance(leaf, Tensor):
                if leaf.is_nested or leaf.layout != torch.strided:
                    kind = "a nested tensor" if leaf.is_nested else f"a tensor with layout {leaf.layout}"
                    raise ValueError(f"inputs{path} is {kind}: expected a dense one, padded where lengths differ")
                found.append((path, leaf))
            return leaf

        self._walked(note)
        return found

    def map(self, change: Callable[[Any], Any]) -> "Inputs":
        """The same structure with `change` applied to every leaf, tensor or not."""
        return self._walked(lambda leaf, path: change(leaf))

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> "Inputs":
        """The same inputs with each tensor replaced by change(tensor)."""
        return self._walked(lambda leaf, path: change(leaf) if isinstance(leaf, Tensor) else leaf)

    def take(self, index: Tensor) -> "Inputs":
        """These rows of all tensors that have rows."""
        return self.map_tensors(lambda tensor: tensor[index.to(tensor.device)] if tensor.dim() else tensor)

    def _walked(self, change: Callable[[Any, str], Any]) -> "Inputs":
        args = tuple(_mapped(change, value, f"[{place}]") for place, value in enumerate(self.args))
        return Inputs(args, {name: _mapped(change, value, f'["{name}"]') for name, value in self.kwargs.items()})


def device(inputs: Inputs) -> torch.device:
    """Where the first tensor lies."""
    return next((tensor.device for _, tensor in inputs.tensors()), torch.device("cpu"))


def sizes(inputs: Inputs) -> tuple[int, ...]:
    """All sizes but the number of examples."""
    return tuple(size for _, tensor in inputs.tensors() for size in tensor.shape[1:])


def choices(batch: int, losses: Tensor) -> Iterator[Tensor]:
    """Six rows for slices: from all over the batch, the last ones, and three drawn orders; finite ones first."""
    rows, good = torch.arange(batch), losses.detach().isfinite().cpu()
    rows = torch.cat([rows[good], rows[~good]]) if int(good.sum()) < 6 else rows[good]
    count, generator = len(rows), torch.Generator().manual_seed(0)
    spread = rows[torch.linspace(0, count - 1, min(6, count)).round().long()]
    orders = [spread, rows.flip(0), *[rows[torch.randperm(count, generator=generator)] for _ in range(3)]]
    for order in orders if batch > 3 else orders[:2]:
        yield order[torch.arange(6) % len(order)]


def has_rows(leaf: Any) -> bool:
    """Whether the leaf is a tensor with the examples along its first dimension."""
    return isinstance(leaf, Tensor) and leaf.dim() > 0


def _mapped(change: Callable[[Any, str], Any], value: Any, path: str) -> Any:
    if isinstance(value, Mapping):
        pairs = {key: _mapped(change, item, f"{path}[{key!r}]") for key, item in value.items()}
        return pairs if type(value) is dict else type(value)(pairs)  # type: ignore[call-arg]
    named: Any = getattr(value, "_asdict", dict)() if isinstance(value, tuple) else {}
    if named:
        return type(value)(*[_mapped(change, item, f"{path}.{name}") for name, item in named.items()])
    if isinstance(value, (tuple, list)):
        return type(value)(_mapped(change, item, f"{path}[{place}]") for place, item in enumerate(value))
    if value is None or isinstance(value, (Tensor, str, bytes, int, float, complex)):
        return change(value, path)
    leaves, structure = pytree.tree_flatten(value)
    if len(leaves) == 1 and leaves[0] is value:
        return change(value, path)
    return pytree.tree_unflatten([_mapped(change, leaf, f"{path}.{k}") for k, leaf in enumerate(leaves)], structure)
