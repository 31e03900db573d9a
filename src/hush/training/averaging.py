"""An exponential moving average of parameters: smoother weights for evaluation, free of charge.

The average is computed from released parameters alone, so it costs no privacy.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class Average:
    """Keeps average = decay * average + (1 - decay) * parameters; call `update()` after each step.

    The decay warms up as min(decay, (1 + t) / (10 + t)), so that early weights are forgotten quickly. Buffers are not
    averaged. The model is left alone except inside `applied()`, which lends it the average.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> average = Average(model, decay=0.5)
    >>> _ = nn.init.constant_(model.weight, 3.0)
    >>> average.update()
    >>> with average.applied():
    ...     averaged = model.weight.item()
    >>> model.weight.item(), averaged < 3.0
    (3.0, True)
    """

    def __init__(self, model: nn.Module, decay: float = 0.9999) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay must lie in [0, 1), got {decay}")
        self._parameters = dict(model.named_parameters())
        self._average = {name: p.detach().clone() for name, p in self._parameters.items()}
        self._decay = decay
        self._updates = 0

    @torch.no_grad()
    def update(self) -> None:
        """Take in the parameters as they are now."""
        self._updates += 1
        decay = min(self._decay, (1 + self._updates) / (10 + self._updates))
        torch._foreach_lerp_(list(self._average.values()), [p.detach() for p in self._parameters.values()], 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Lend the model the averaged parameters; its own come back at the end, whatever happens inside."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, parameter in self._parameters.items():
            own = parameter.detach().clone()
            parameter.copy_(self._average[name])
            self._average[name] = own

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self._updates, "average": {name: a.clone() for name, a in self._average.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        average: dict[str, Tensor] = state["average"]
        if set(average) != set(self._average):
            raise ValueError(
                f"the saved average has parameters that the model lacks, or lacks some of its own: "
                f"{sorted(set(average) ^ set(self._average))}"
            )
        self._updates = int(state["updates"])
        for name, value in average.items():
            self._average[name].copy_(value)
