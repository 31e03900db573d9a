"""Adam for gradients that carry noise of known variance."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class NoiseAware(Protocol):
    """An optimizer that wants to know the noise in the gradient it is about to use; `Private.step` tells it."""

    def expect_noise(self, deviations: Mapping[Tensor, float]) -> None: ...


class CorrectedAdam(torch.optim.Optimizer):
    """Adam whose second moment has the variance of the privacy noise taken out (Tang, Panahi and Lecuyer 2023).

    Noise makes Adam's second moment too large by (sigma C / L)^2 for every coordinate, which hides the differences
    between coordinates that Adam lives from. Here the step is m / sqrt(max(v - u, floor)), both moments bias-corrected,
    with u the same moving average of the noise variance. It reads nothing but released gradients and public constants,
    so it costs no privacy. `floor` bounds the step where signal and noise cannot be told apart.

    `private.step(optimizer)` hands over the noise of each parameter by itself; weight decay is decoupled (AdamW).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        floor: float = 5e-8,
        weight_decay: float = 0.0,
    ) -> None:
        if lr < 0 or weight_decay < 0 or not floor >= 0:
            raise ValueError(f"lr, floor and weight_decay must be >= 0, got {lr}, {floor}, {weight_decay}")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must lie in [0, 1), got {betas}")
        super().__init__(params, {"lr": lr, "betas": betas, "floor": floor, "weight_decay": weight_decay})
        self._deviations: Mapping[Tensor, float] = {}

    def expect_noise(self, deviations: Mapping[Tensor, float]) -> None:
        """The standard deviation, per coordinate, of the noise in each parameter's next gradient."""
        self._deviations = dict(deviations)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        if closure is not None:
            raise ValueError("a closure would compute gradients that are not private; use private.step(optimizer)")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> None:
        if parameter not in self._deviations:
            raise RuntimeError(
                "CorrectedAdam does not know the noise of this gradient; call private.step(optimizer), or "
                "optimizer.expect_noise({parameter: standard deviation}) before each step"
            )
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["first"] = torch.zeros_like(parameter)
            state["second"] = torch.zeros_like(parameter)
            state["noise"] = 0.0
        slow, fast = group["betas"]
        state["step"] += 1
        state["first"].lerp_(gradient, 1 - slow)
        state["second"].mul_(fast).addcmul_(gradient, gradient, value=1 - fast)
        state["noise"] = fast * state["noise"] + (1 - fast) * self._deviations[parameter] ** 2
        unbias = 1 - fast ** state["step"]
        signal = (state["second"] - state["noise"]).div_(unbias).clamp_(min=group["floor"])
        if group["weight_decay"]:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.addcdiv_(state["first"], signal.sqrt_(), value=-group["lr"] / (1 - slow ** state["step"]))
