"""When a run looks at its forward pass: before the account, at the first batch, then at lots 1, 2, 4, 8, ..."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hush.checks.check import check_gradients, look_at, rounding
from hush.checks.company import refuse_by_padding
from hush.checks.guards import must_match, refuse_mixing
from hush.checks.passes import seed_all, undisturbed
from hush.checks.reading import check_reading
from hush.gradients.engine import Gradients, Inputs
from hush.sampling.batches import Batch
from hush.sampling.loader import Loader, on_device

_ROWS = 8
_PADDED = 32  # records that are looked at in shorter and longer company


class Watch:
    """Has the forward pass of a run checked, and says what was looked at."""

    def __init__(
        self, gradients: Gradients, public_buffers: Sequence[str], loader: Loader | None, device: torch.device
    ) -> None:
        self._gradients = gradients
        self._loader, self._device = loader, device
        self._public = tuple(public_buffers)
        self._checked = False
        self._looked = -1
        self.looks = 0
        """Real batches that were looked at."""

    def whole_way(self, examples: int) -> None:
        """Before anything is charged: the data, if known, fits the plan, is read record by record, is trainable."""
        loader = self._loader
        if loader is None:
            return
        if len(loader) != examples:
            raise ValueError(
                f"the plan was made for {examples:,} examples, and the data has {len(loader):,}: make the plan with "
                f"examples={len(loader)}"
            )
        check_reading(loader)
        rows = loader.rows(_telling_rows(loader))
        self._check(Inputs.of(on_device(rows, self._device)))
        self._look_at_padding(torch.arange(min(_PADDED, len(loader))))

    def rows(self, batch: Batch, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> Inputs:
        """The inputs of a batch: those that were given, else read from the data."""
        if inputs or named:
            rows = Inputs(inputs, named)
        elif self._loader is not None:
            rows = Inputs.of(on_device(self._loader.of_batch(batch), self._device))
        else:
            raise TypeError("add(batch) reads its rows from data; give Private(data=...), or add(batch, *inputs)")
        if rows.rows != len(batch):
            raise ValueError(f"expected inputs of {len(batch)} rows, one for each of the batch, got {rows.rows}")
        return rows

    def before(self, rows: Inputs, step: int, batch: Batch) -> None:
        """Before a batch is added: the whole check once, later a look at the batch itself at some of the lots."""
        if not self._checked:
            self._check(rows)
        if step & (step - 1) == 0 and step != self._looked:
            refuse_mixing(self._gradients.model)
            look_at(self._gradients, rows, seed=step)
            self._look_at_padding(batch.index)
            self._looked, self.looks = step, self.looks + 1

    def _look_at_padding(self, index: torch.Tensor) -> None:
        """Where a collate decides the shape of a batch: the shorter records with and without the longest."""
        loader = self._loader
        if loader is None or loader.in_memory or len(index) < 2:
            return
        with undisturbed(self._gradients.model), torch.no_grad():
            items = [loader.data[i] for i in index[:_PADDED].tolist()]

            def rows_of(some: list[Any]) -> Inputs:
                seed_all(0)
                return Inputs.of(on_device(loader.collate(list(some)), self._device))

            refuse_by_padding(self._gradients, items, rows_of, 50 * rounding(self._gradients))

    def explain(self) -> str:
        """How the gradient of each parameter is found, and what was tested."""
        checked = "checked on drawn rows" if self._checked else "not checked yet"
        return f"{self._gradients.explain()}\nlosses_of: {checked}, and on {self.looks} later batches"

    def _check(self, rows: Inputs) -> None:
        must_match(self._gradients.model, self._public)
        check_gradients(self._gradients, rows, self._public)
        self._checked = True


def _telling_rows(loader: Loader) -> torch.Tensor:
    """The first few rows, and those with the smallest and the largest label or code: a class that the model does not
    know is found before anything is charged. Which classes there are is public (the report says so)."""
    rows = set(range(min(_ROWS, len(loader))))
    for array in loader.tensors:
        values = torch.as_tensor(array)
        if values.ndim == 1 and not values.is_floating_point() and not values.is_complex():
            rows |= {int(values.argmin()), int(values.argmax())}
    return torch.tensor(sorted(rows))
