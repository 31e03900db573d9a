"""When a run looks at its forward pass: before the account, at the first batch, then at lots 1, 2, 4, 8, ..."""

from collections.abc import Sequence

import torch

from hush.checks.check import check_gradients, look_at
from hush.checks.guards import must_match, refuse_mixing
from hush.checks.reading import check_reading
from hush.gradients.engine import Gradients, Inputs
from hush.sampling.loader import Loader, on_device

_ROWS = 8


class Watch:
    """Has the forward pass of a run checked, and says what was looked at."""

    def __init__(self, gradients: Gradients, public_buffers: Sequence[str]) -> None:
        self._gradients = gradients
        self._public = tuple(public_buffers)
        self._checked = False
        self._looked = -1
        self.looks = 0
        """Real batches that were looked at."""

    def whole_way(self, loader: Loader, examples: int, device: torch.device) -> None:
        """Before anything is charged: the data fits the plan, is read record by record, and can be trained on."""
        if len(loader) != examples:
            raise ValueError(
                f"the plan was made for {examples:,} examples, and the data has {len(loader):,}: make the plan with "
                f"examples={len(loader)}"
            )
        check_reading(loader)
        rows = loader.rows(torch.arange(min(_ROWS, len(loader))))
        self._check(Inputs.of(on_device(rows, device)))

    def before(self, rows: Inputs, step: int) -> None:
        """Before a batch is added: the whole check once, later a look at the batch itself at some of the lots."""
        if not self._checked:
            self._check(rows)
        if step & (step - 1) == 0 and step != self._looked:
            refuse_mixing(self._gradients.model)
            look_at(self._gradients, rows)
            self._looked, self.looks = step, self.looks + 1

    def explain(self) -> str:
        """What was found, in lines."""
        trained = self._gradients.parameters()
        lines = [f"{name} {tuple(p.shape)}" for name, p in trained.items()]
        checked = f"independence of examples: tested on drawn rows{'' if self._checked else ' (not yet)'}"
        return "\n".join([*lines, f"{checked} and {self.looks} later batches"])

    def _check(self, rows: Inputs) -> None:
        must_match(self._gradients.model, self._public)
        check_gradients(self._gradients, rows, self._public)
        self._checked = True
