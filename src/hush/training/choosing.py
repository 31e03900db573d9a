"""Which parameters a run gives back: the last, their moving average, or the best by a held-out set."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hush.training.callbacks import Averaging
from hush.training.evaluation import HeldOut, measure


class Judge:
    """Measures the model on held-out data, keeps the best, and says when patience is at an end."""

    def __init__(
        self, model: nn.Module, held_out: HeldOut | None, averaging: Averaging | None, device: torch.device
    ) -> None:
        self._model = model
        self._held_out = held_out
        self._averaging = averaging
        self._device = device
        self.best: dict[str, Any] | None = None
        self.since_best = 0

    @property
    def impatient(self) -> bool:
        """Whether the held-out set says to stop."""
        patience = None if self._held_out is None else self._held_out.patience
        return patience is not None and self.since_best >= patience

    def measure(self, step: int) -> dict[str, float]:
        """The held-out metric at this step by its label; nothing where nothing was held out."""
        held_out = self._held_out
        if held_out is None:
            return {}
        with self._smoothed():
            value = measure(self._model, held_out, self._device)
        if held_out.decides:
            if self.best is None or held_out.better(value, self.best["value"]):
                self.best, self.since_best = {"value": value, "step": step, "model": self._parameters()}, 0
            else:
                self.since_best += 1
        return {held_out.label: value}

    @torch.no_grad()
    def put_back(self) -> None:
        """Put the parameters that are given back into the model."""
        chosen = self._chosen()
        for name, parameter in self._model.named_parameters():
            parameter.copy_(chosen[name])

    def _chosen(self) -> dict[str, Tensor]:
        if self._held_out is not None and self._held_out.choose == "best" and self.best is not None:
            return dict(self.best["model"])
        return self._parameters()

    def chosen_entry(self, history: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """Where in the history the chosen parameters were measured: the last measurement, or the best."""
        if self._held_out is None:
            return None
        measured = [entry for entry in history if self._held_out.label in entry]
        if self._held_out.choose == "best" and self.best is not None:
            measured = [entry for entry in measured if entry["step"] == self.best["step"]]
        return measured[-1] if measured else None

    def _parameters(self) -> dict[str, Tensor]:
        with self._smoothed():
            return {name: p.detach().clone() for name, p in self._model.named_parameters()}

    @contextmanager
    def _smoothed(self) -> Iterator[None]:
        if self._averaging is None:
            yield
        else:
            with self._averaging.applied():
                yield
