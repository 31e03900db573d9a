"""Gradients: the forward pass as a function, its per-example gradients, their norms and their clipped sum."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from hush.clipping.bounded_sum import BoundedSum
from hush.clipping.clips import Clip
from hush.gradients.clipped import clipped_sum, squared_norms

LossesOf = Callable[..., Tensor]


class Inputs(NamedTuple):
    """What losses_of gets besides the model."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}

    @classmethod
    def of(cls, inputs: Any) -> "Inputs":
        """A tuple's parts become arguments, a mapping's become keywords; anything else is the only argument."""
        if isinstance(inputs, Inputs):
            return inputs
        if isinstance(inputs, Mapping):
            return cls((), dict(inputs))
        return cls(tuple(inputs)) if isinstance(inputs, tuple | list) else cls((inputs,))

    @property
    def rows(self) -> int:
        """The number of examples; every tensor with a dimension has them along its first.

        >>> Inputs.of({"x": torch.zeros(3, 2), "scale": torch.tensor(1.0)}).rows
        3
        """
        found = list(tensors_of(self))
        if not found:
            raise TypeError("expected inputs with at least one tensor that has a row for each example, got none")
        rows = len(found[0][1])
        for path, tensor in found:
            if len(tensor) != rows:
                raise ValueError(
                    f"{path}: expected {rows} rows, got {len(tensor)}. Tensors have the examples along dimension 0; "
                    "what is shared by all (class weights, an edge list) belongs into losses_of, not into its inputs"
                )
        return rows

    def map(self, change: Callable[[Any], Any]) -> "Inputs":
        """The same structure with `change` applied to every leaf."""
        return Inputs(_mapped(change, self.args), _mapped(change, dict(self.kwargs)))

    def take(self, index: Tensor) -> "Inputs":
        """These rows of every tensor."""
        return self.map(lambda leaf: leaf[index.to(leaf.device)] if has_rows(leaf) else leaf)


class Gradients:
    """Per-example gradients of `losses_of(model, *inputs)`, which gives one loss for each row.

    Losses of shape [B, K] are those of K views of each example; they are averaged before clipping.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> gradients = Gradients(lambda model, x: model(x).squeeze(1), model)
    >>> gradients.squared_norms((torch.tensor([[3.0, 4.0], [0.0, 1.0]]),))
    {'weight': tensor([25.,  1.])}
    """

    def __init__(self, losses_of: LossesOf, model: nn.Module, *, engine: Literal["fast", "reference"] = "fast") -> None:
        if engine not in ("fast", "reference"):
            raise ValueError(f"engine must be 'fast' or 'reference', got {engine!r}")
        self.losses_of, self.model, self.engine = losses_of, model, engine

    def clipped_sum(
        self, inputs: Any, clip: Clip, *, mask: Tensor | None = None, rows: int | None = None
    ) -> BoundedSum:
        """The sum over the examples of their clipped gradients, with what one example can move it by.

        `mask` is 0 for rows that only fill up; `rows` is the physical batch size, which is public.
        """
        inputs = Inputs.of(inputs)
        if self.engine == "reference" and inputs.rows > 1:
            return self._one_by_one(inputs, clip, mask, rows)
        parameters = self.parameters()
        return clipped_sum(self.losses(inputs), parameters, clip, mask=mask, rows=rows, allow_unused=True)

    def per_example(self, inputs: Any) -> dict[str, Tensor]:
        """What the paper writes: each example's gradient, {name: [B, ...]}; private."""
        losses, parameters = self.losses(Inputs.of(inputs)), self.parameters()
        rows = [
            torch.autograd.grad(loss, list(parameters.values()), retain_graph=True, materialize_grads=True)
            for loss in losses
        ]
        return {name: torch.stack(parts) for name, parts in zip(parameters, zip(*rows, strict=True), strict=True)}

    def squared_norms(self, inputs: Any) -> dict[str, Tensor]:
        """For each parameter the squared norms of the examples' gradients, {name: [B]}; private."""
        return squared_norms(self.losses(Inputs.of(inputs)), self.parameters(), allow_unused=True)

    def losses(self, inputs: Inputs) -> Tensor:
        """One loss for each row, those of several views averaged; anything else is refused."""
        rows = inputs.rows
        with torch.enable_grad():
            losses = self.losses_of(self.model, *inputs.args, **inputs.kwargs)
            check_losses(losses, rows)
            return losses.mean(1) if losses.ndim == 2 else losses

    def parameters(self) -> dict[str, nn.Parameter]:
        """The trainable parameters as they are now."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def _one_by_one(self, inputs: Inputs, clip: Clip, mask: Tensor | None, rows: int | None) -> BoundedSum:
        counts = torch.ones(inputs.rows, dtype=torch.bool) if mask is None else mask
        total: BoundedSum | None = None
        for row in range(inputs.rows):
            one = self.clipped_sum(inputs.take(torch.tensor([row])), clip, mask=counts[row : row + 1], rows=rows)
            total = one if total is None else total + one
        assert total is not None
        return total


def has_rows(leaf: Any) -> bool:
    """Whether the leaf is a tensor with the examples along its first dimension."""
    return isinstance(leaf, Tensor) and leaf.ndim > 0


def tensors_of(inputs: Inputs) -> "list[tuple[str, Tensor]]":
    """All tensors with rows, each with the path to it as a user would write it."""
    found: list[tuple[str, Tensor]] = []

    def walk(value: Any, path: str) -> None:
        if has_rows(value):
            found.append((path, value))
        elif isinstance(value, Mapping):
            for key, part in value.items():
                walk(part, f"{path}[{key!r}]")
        elif isinstance(value, tuple | list):
            for number, part in enumerate(value):
                walk(part, f"{path}[{number}]")

    walk(inputs.args, "inputs")
    walk(inputs.kwargs, "inputs")
    return found


def check_losses(losses: Any, rows: int) -> None:
    """Refuse anything but one loss for each row, or K for each row."""
    if not isinstance(losses, Tensor):
        raise TypeError(f"losses_of must return a tensor with one loss for each row, got {type(losses).__name__}")
    if losses.ndim == 0:
        raise ValueError(
            "expected one loss for each example, got a scalar. A loss that is averaged or summed over the batch "
            "cannot be clipped example by example: use reduction='none'. A term for the whole batch (a penalty on the "
            "weights, say) belongs into the optimizer (weight_decay) or, per example, into each loss"
        )
    if not losses.is_floating_point():
        raise TypeError(f"losses must be floating point, got {losses.dtype}")
    if losses.ndim > 2 or len(losses) != rows:
        raise ValueError(
            f"expected losses of shape ({rows},), one for each row of the batch, or ({rows}, K) for K views of each, "
            f"got {tuple(losses.shape)}. Average tokens or pixels per example first"
        )


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _mapped(change, part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        parts = [_mapped(change, part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return change(value)
