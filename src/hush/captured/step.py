"""Noise and optimizer as one CUDA graph; with the clipped sum of a small model, so that a step is one launch."""

import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from hush import kernels
from hush.captured import cuda_graphs as graphs
from hush.captured.batch import Placed
from hush.randomness.gaussian_samples import Normals
from hush.randomness.rounded_gaussian import OnGrid

_WHOLE_BELOW = 64 << 20  # bytes; a region that holds more takes so long that one launch more does not matter
_MOST_PATIENCE = 64
_PLAIN = {bool, int, float, type(None)}


class PlannedRelease(NamedTuple):
    """What is released in a step: (total + deviation * normal numbers of the step) * scale, tensor by tensor.

    With deviations on a grid as integers on that grid.
    """

    totals: Sequence[Tensor]
    deviations: Sequence[float] | Sequence[OnGrid]
    scale: float
    normals: Normals


class Update:
    """Captures the update of a run, and replays it.

    Guarantee: the noise of a replay is that of its step, as it would be outside a graph. Key and number of the step lie
    in device memory and are written before each replay, after the host has used the step up, so that no noise is ever
    used twice.

    Tensors and settings are captured the second time in a row that they are seen. Every capture doubles the number of
    times for the next one, so that settings that change often are not captured for nothing; a learning rate in a tensor
    on the device may change freely.
    """

    def __init__(self) -> None:
        self._seen: list[object] | None = None
        self._times = 0
        self._patience = 2
        self._captured: _CapturedUpdate | None = None

    def prepare(
        self, optimizer: torch.optim.Optimizer, planned: PlannedRelease, placed: Placed, step: int
    ) -> Callable[[], None] | None:
        """The update of this step, ready to run; None where it cannot be captured, or not yet.

        `placed` is the lot's only batch, not computed yet: the update does that first.
        """
        placed.must_be_fresh()
        key = _key(optimizer, planned, placed)
        if key is None:
            return None
        if key != self._seen:
            self._seen, self._times, self._captured = key, 0, None
        captured = self._captured
        if captured is None:
            self._times += 1
            if self._times < self._patience or not graphs.possible(planned.totals):
                return None
            self._patience = min(2 * self._patience, _MOST_PATIENCE)
            captured = self._captured = _capture(optimizer, planned, placed)
        return None if captured is None else lambda: captured.run(planned, placed, step)


class _CapturedUpdate:
    """A recorded update and the table in device memory that it reads its step from."""

    def __init__(
        self,
        recording: graphs.Recording,
        release: Any,
        gradients: Sequence[tuple[nn.Parameter, Tensor]],
        whole: bool,
    ) -> None:
        self._recording = recording
        self._release = release
        self._gradients = gradients
        self._whole = whole

    def run(self, planned: PlannedRelease, placed: Placed, step: int) -> None:
        """Compute the sums, add the noise of the step, and update."""
        if not self._whole:
            placed.region.recording.replay()
        claim = planned.normals.begin(step)
        self._release.at(claim.subkey(), claim.step, planned.deviations)
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._recording.replay()


def _capture(optimizer: torch.optim.Optimizer, planned: PlannedRelease, placed: Placed) -> _CapturedUpdate | None:
    parameters = placed.region.parameters
    release = _release(parameters, planned)
    if release is None:
        return None
    # Recorded a second time in the same memory, large blocks may not fit where they lay: it would hold more than once.
    region = placed.region if placed.region.recording.held < _WHOLE_BELOW else None

    def update() -> list[Tensor]:
        gradients = list(planned.totals) if region is None else region.function(region.inputs)
        release.launch()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        return gradients

    gpu = [planned.totals[0].device] if planned.totals[0].is_cuda else []
    try:
        with torch.random.fork_rng(devices=gpu):  # a resumed run records at another step, and must draw the same
            recording, gradients = graphs.record(update, beside=None if region is None else region.recording)
        if region is not None:
            release.onto(gradients)
    except RuntimeError as error:
        warnings.warn(f"the update is not captured, and goes on without: {error}", RuntimeWarning, stacklevel=5)
        return None
    finally:
        for parameter in parameters:
            parameter.grad = None  # nothing was computed yet
        placed.accept_changes()  # recording counts as a change
    pairs = list(zip(parameters, gradients, strict=True))
    return _CapturedUpdate(recording, release, pairs, region is not None)


def _release(parameters: Sequence[nn.Parameter], planned: PlannedRelease) -> Any:
    """The kernel's launch, in place; None where one launch cannot serve all tensors."""
    from hush.kernels.noise import gaussian, rounded
    from hush.kernels.noise.table import fits

    totals, deviations = planned.totals, planned.deviations
    parts: list[Any] = list(zip(totals, deviations, totals, strict=True))
    if not fits(parts) or any(total.dtype != p.dtype for total, p in zip(totals, parameters, strict=True)):
        return None
    on_grids = [deviation for deviation in deviations if isinstance(deviation, OnGrid)]
    if on_grids and not rounded.can_draw(on_grids):
        return None
    kind: Any = rounded.Release if on_grids else gaussian.Release
    # A key that nobody knows stands in until `at` writes that of a step.
    return kind(parts, scale=planned.scale, subkey=os.urandom(32), step=0)


def _key(optimizer: torch.optim.Optimizer, planned: PlannedRelease, placed: Placed) -> list[object] | None:
    """What a captured update depends on; None where a replay would not do what a call does."""
    if not (kernels.available() and _capturable(optimizer)):
        return None
    # A recording has its own sums and parameters.
    key = [optimizer, placed.region.recording, *_settings(optimizer)]
    if optimizer.state:
        state = [value for values in optimizer.state.values() for value in values.values() if value is not None]
        if state and not (all(isinstance(value, Tensor) for value in state) and graphs.possible(state)):
            return None
        key += map(Tensor.data_ptr, state)
    return key


def _capturable(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a replay does what a call would: all state on the device, no hooks, no method of its own."""
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    if hooks or torch_optimizer._global_optimizer_pre_hooks or torch_optimizer._global_optimizer_post_hooks:
        return False
    own = vars(optimizer).get("step")
    if own is not None and not hasattr(own, "_wrapped_by_lr_sched"):  # schedulers only count calls
        return False
    kind = type(optimizer)
    return kind is torch.optim.SGD or (
        kind in (torch.optim.Adam, torch.optim.AdamW) and all(group["capturable"] for group in optimizer.param_groups)
    )


def _settings(optimizer: torch.optim.Optimizer) -> list[object]:
    """What a replay takes from the settings: addresses of tensors on the device, values of everything else."""
    found: list[object] = []
    for group in optimizer.param_groups:
        settings = dict(group)
        found += map(id, settings.pop("params"))
        if _PLAIN.issuperset(map(type, settings.values())):
            found += settings.values()
        else:
            found += map(_setting, settings.values())
    return found


def _setting(value: object) -> object:
    if isinstance(value, Tensor):
        return value.data_ptr() if graphs.possible([value]) else value.tolist()
    return list(map(id, value)) if isinstance(value, list) else value
