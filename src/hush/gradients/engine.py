"""Gradients: a function of a model and a batch -> the clipped sum of per-example gradients, in one backward pass."""

import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hush.clipping.bounded_sum import BoundedSum
from hush.clipping.clips import Clip
from hush.errors import NotSupported
from hush.gradients import reference
from hush.gradients.analysis.analyst import Analyst
from hush.gradients.analysis.function import Function, is_recorded
from hush.gradients.analysis.plan import ParameterRow
from hush.gradients.functional import must_take_a_model
from hush.gradients.graph import read
from hush.gradients.inputs import Inputs as Inputs
from hush.gradients.inputs import has_rows as has_rows
from hush.gradients.layers.slow import Spoiled
from hush.gradients.sites import Declined, contributions
from hush.gradients.sums.clipped import quiet, summed
from hush.gradients.sums.per_example import Contribution, Stored, wide

log = logging.getLogger("hush")

_LOOKS = 1 / 500
"""The share of later batches on which independence is tested again, besides the second, fourth, eighth, ..."""


@dataclass(frozen=True)
class Explanation:
    """How each parameter's gradients are found, and how independence is known; str() of it is a table."""

    rows: tuple[ParameterRow, ...]
    notes: tuple[str, ...]
    independence: str

    def __str__(self) -> str:
        width = max([len(row.name) for row in self.rows], default=0)
        lines = [f"{row.name:{width}}  {row.how:12}  {tuple(row.shape)!s:18}  {row.why}".rstrip() for row in self.rows]
        return "\n".join([*lines, f"independence of examples: {self.independence}", *self.notes])


class Gradients:
    """Per-example gradients of `losses_of(model, *inputs)`, which gives one loss for each row of its inputs.

    Guarantee: each example adds at most the clip's bound to each group of a clipped sum, in L2 norm and after rounding;
    one with a non-finite gradient adds exactly zero and touches no other. The first batch is analysed: a function whose
    examples are not independent is refused, and every parameter's gradient is compared with single backward passes.
    engine="reference" takes one example after another.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> gradients = Gradients(lambda model, x: model(x)[:, 0], model)
    >>> x = torch.tensor([[30.0, 40.0], [0.3, 0.4]])
    >>> from hush.clipping.clips import FlatClip
    >>> gradients.clipped_sum((x,), FlatClip(1.0)).tensors["weight"].round(decimals=3)
    tensor([[0.9000, 1.2000]])
    >>> gradients.squared_norms((x,))["weight"].round()
    tensor([2500.,    0.])
    """

    def __init__(
        self,
        losses_of: Callable[..., Tensor],
        model: nn.Module,
        *,
        engine: Literal["fast", "reference"] = "fast",
        look_seed: int | None = None,
    ) -> None:
        if engine not in ("fast", "reference"):
            raise ValueError(f"engine must be 'fast' or 'reference', got {engine!r}")
        must_take_a_model(losses_of)
        self.model = model
        self._reference = engine == "reference"
        self._function = Function(losses_of, model)
        self._analyst = Analyst(self._function)
        self._batches = 0
        self._looks = random.Random(look_seed)

    def clipped_sum(
        self, inputs: Any, clip: Clip, *, mask: Tensor | None = None, rows: int | None = None
    ) -> BoundedSum:
        """The sum of the examples' gradients, each clipped; `mask` is zero for rows that do not count.

        `inputs` is a tuple, or a mapping of named inputs. `rows`, the physical batch size, bounds rounding.
        """
        inputs = Inputs.of(inputs)
        if inputs.rows == 0:
            return summed({}, self.parameters(), clip, batch=0)
        if self._reference:
            return reference.clipped_sum(self._function.losses_of, self.model, inputs, clip, mask)
        self._look(inputs)
        with quiet(self._device):
            return summed(self._found(inputs), self.parameters(), clip, batch=inputs.rows, rows=rows, mask=mask)

    def per_example(self, inputs: Any) -> dict[str, Tensor]:
        """{name: [B, *shape]}: what the paper writes; private."""
        inputs = Inputs.of(inputs)
        if self._reference:
            each = list(reference.gradients_of(self._function.losses_of, self.model, inputs))
            return {name: torch.stack([one[name] for one in each]) for name in self.parameters()}
        with quiet(self._device):
            found, shapes = self._found(inputs), {n: (inputs.rows, *p.shape) for n, p in self.parameters().items()}
            return {
                name: found[name].per_example().reshape(shape)
                if name in found
                else torch.zeros(shape, device=self._device)
                for name, shape in shapes.items()
            }

    def squared_norms(self, inputs: Any) -> dict[str, Tensor]:
        """{name: [B]}: squared norms of the examples' gradients; private."""
        inputs = Inputs.of(inputs)
        if self._reference:
            return {name: values.flatten(1).square().sum(1) for name, values in self.per_example(inputs).items()}
        with quiet(self._device):
            found = self._found(inputs)
            none = torch.zeros(inputs.rows, device=self._device)
            return {n: found[n].squared_norms() if n in found else none for n in self.parameters()}

    def check(self, inputs: Any) -> Explanation:
        """Analyse these inputs and sum nothing; raises what `clipped_sum` would."""
        if not self._reference:
            self._found(Inputs.of(inputs))
        return self.explain()

    def explain(self) -> Explanation:
        """What was learnt so far."""
        if self._reference:
            rows = [
                ParameterRow(name, tuple(p.shape), "one by one", "reference") for name, p in self.parameters().items()
            ]
            return Explanation(tuple(rows), (), "by construction: each example is alone in its batch")
        analyst = self._analyst
        rows = [analyst.rows[name] for name in self.parameters() if name in analyst.rows]
        known = f"tested on {analyst.tests.rows} rows of the first batch and on {analyst.tests.looks} later batches"
        return Explanation(tuple(rows), tuple(analyst.notes), known)

    def losses(self, inputs: Any) -> Tensor:
        """One loss for each row, views averaged; private."""
        return self._function(Inputs.of(inputs))

    def look_again(self, inputs: Any) -> None:
        """Test independence on this very batch, now."""
        if not self._reference:
            self._analyst.tests.look_again(Inputs.of(inputs), self._looks.randrange(1 << 30))

    def parameters(self) -> dict[str, Tensor]:
        """The trainable parameters as they are now."""
        params = self._function.trainable()
        if not params:
            raise ValueError("the model has no trainable parameter: every parameter has requires_grad=False")
        complex_ones = [name for name, param in params.items() if param.is_complex()]
        if complex_ones:
            raise NotSupported(
                f"{', '.join(complex_ones[:8])}: complex parameters cannot be released with real noise; keep real "
                "and imaginary parts in a real parameter and use torch.view_as_complex on it"
            )
        return params

    # Inside ----------------------------------------------------------------------------------------------------------

    @property
    def _device(self) -> torch.device:
        return next(iter(self.parameters().values())).device

    def _look(self, inputs: Inputs) -> None:
        """Independence again on the second, fourth, eighth batch, and on some later ones that nobody chooses."""
        if is_recorded():
            return
        self._batches += 1
        power = self._batches > 1 and self._batches & (self._batches - 1) == 0
        if power or self._looks.random() < _LOOKS * (self._batches > 1):
            self.look_again(inputs)

    def _found(self, inputs: Inputs) -> Mapping[str, Contribution]:
        """One forward and one backward pass: what the examples add to each parameter."""
        params = self.parameters()
        self._analyst.test(inputs)  # before the model itself sees the batch: a refusal leaves it as it was
        losses = self._function(inputs)
        graph = read(losses, params)
        self._analyst.refuse_unmet(graph, inputs)
        with quiet(losses.device):
            try:
                settled = self._analyst.find(graph, losses, inputs)
                return contributions(graph, settled.now(graph), losses, settled.side)
            except Declined:
                losses = self._function(inputs)
                graph = read(losses, params)
                settled = self._analyst.again(graph, losses, inputs)
                return contributions(graph, settled.now(graph), losses, settled.side)
            except Spoiled:  # only a pass of its own keeps an example apart from one that is not finite
                del losses, graph
                rows = list(reference.gradients_of(self._function.losses_of, self.model, inputs))
                return {name: Stored(wide(torch.stack([one[name] for one in rows]))) for name in params}
