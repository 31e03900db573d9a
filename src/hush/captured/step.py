"""Noise and optimizer as one CUDA graph; with the clipped sum of a small model, so that a step is one launch."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from hush import kernels
from hush.captured import cuda_graphs as graphs
from hush.captured.batch import Placed
from hush.kernels.noise.descent import NUMBERS, Descent, descent_of, numbers_of
from hush.randomness.discrete_gaussian import OnGrid
from hush.randomness.gaussian_samples import Normals
from hush.randomness.streams import this_process

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

    Guarantee: the noise of a replay is that of its step, as it would be outside a graph. The number of the step lies in
    device memory; each replay moves it on, and it is written anew wherever it might be another than the host's. The
    host uses a step up before its replay, so that no noise is ever used twice.

    Tensors and settings are captured the second time in a row that they are seen. Every capture doubles the number of
    times for the next one, so that settings that change often are not captured for nothing. The numbers of plain SGD
    (learning rate, momentum, weight decay) may change freely: the kernel that adds the noise takes its step as well,
    and reads them from a table.
    """

    def __init__(self) -> None:
        self._seen: list[object] | None = None
        self._times = 0
        self._patience = 2
        self._captured: _CapturedUpdate | None = None
        self._descends = True
        """Whether no optimizer was found whose step the kernel cannot take."""

    def prepare(
        self, optimizer: torch.optim.Optimizer, planned: PlannedRelease, placed: Placed, step: int
    ) -> Callable[[], None] | None:
        """The update of this step, ready to run; None where it cannot be captured, or not yet.

        `placed` is the lot's only batch, not computed yet: the update does that first.
        """
        placed.must_be_fresh()
        numbers: list[float] = []
        if self._descends and type(optimizer) is torch.optim.SGD and not isinstance(planned.deviations[0], OnGrid):
            numbers = numbers_of(optimizer)
        key = _key(optimizer, planned, placed, but=NUMBERS if numbers else ())
        if key is None:
            return None
        if key != self._seen:
            self._seen, self._times, self._captured = key, 0, None
        captured = self._captured
        if captured is None:
            self._times += 1
            if self._times < self._patience or not graphs.possible(planned.totals):
                return None
            descent = descent_of(optimizer, placed.region.parameters) if numbers else None
            if numbers and descent is None:
                self._descends = False  # from the next step on as any other optimizer
                return None
            self._patience = min(2 * self._patience, _MOST_PATIENCE)
            captured = self._captured = _capture(optimizer, planned, placed, descent, numbers, step)
        return None if captured is None else lambda: captured.run(planned, placed, numbers, step)


class _CapturedUpdate:
    """A recorded update and the table in device memory that it reads its step from.

    With a descent the release is that of `DescendingRelease`, and the optimizer is not part of the recording.
    """

    def __init__(
        self,
        recording: graphs.Recording,
        release: Any,
        descent: Descent | None,
        gradients: Sequence[tuple[nn.Parameter, Tensor]],
        whole: bool,
    ) -> None:
        self._recording = recording
        self._release = release
        self._descent = descent
        self._gradients = gradients
        self._whole = whole
        self._on_device: tuple[int, object, list[float]] | None = None

    def run(self, planned: PlannedRelease, placed: Placed, numbers: list[float], step: int) -> None:
        """Compute the sums, add the noise of the step, and update."""
        if not self._whole:
            placed.region.recording.replay()
        planned.normals.begin(step)
        on_device, self._on_device = self._on_device, None  # unknown if anything below fails
        if on_device != (step, planned.deviations, numbers):
            self._release.at(step, _settings_of(planned, self._descent, numbers))
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._recording.replay()
        self._on_device = step + 1, planned.deviations, numbers


def _capture(
    optimizer: torch.optim.Optimizer,
    planned: PlannedRelease,
    placed: Placed,
    descent: Descent | None,
    numbers: list[float],
    step: int,
) -> _CapturedUpdate | None:
    parameters = placed.region.parameters
    release = _release(parameters, planned, descent, numbers, step)
    if release is None:
        return None
    # Recorded a second time in the same memory, large blocks may not fit where they lay: it would hold more than once.
    region = placed.region if placed.region.recording.held < _WHOLE_BELOW else None

    def update() -> list[Tensor]:
        gradients = list(planned.totals) if region is None else region.function(region.inputs)
        release.launch()
        release.next_step()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        if descent is None:
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
    return _CapturedUpdate(recording, release, descent, pairs, region is not None)


def _release(
    parameters: Sequence[nn.Parameter],
    planned: PlannedRelease,
    descent: Descent | None,
    numbers: list[float],
    step: int,
) -> Any:
    """The kernel's launch, in place; None where one launch cannot serve all tensors."""
    from hush.kernels.noise import discrete, gaussian
    from hush.kernels.noise.table import fits

    totals, deviations = planned.totals, planned.deviations
    parts: list[Any] = list(zip(totals, _settings_of(planned, descent, numbers), totals, strict=True))
    if not fits(parts) or any(total.dtype != p.dtype for total, p in zip(totals, parameters, strict=True)):
        return None
    on_grids = [deviation for deviation in deviations if isinstance(deviation, OnGrid)]
    if on_grids and not discrete.can_draw(on_grids):
        return None
    scale, subkey = planned.scale, planned.normals.subkey(0)
    if descent is not None:
        return gaussian.DescendingRelease(parts, descent, parameters, scale=scale, subkey=subkey, step=step)
    kind: Any = discrete.Release if on_grids else gaussian.Release
    return kind(parts, scale=scale, subkey=subkey, step=step)


def _settings_of(planned: PlannedRelease, descent: Descent | None, numbers: list[float]) -> Sequence[Any]:
    """What the kernel must know of each tensor."""
    deviations: Any = planned.deviations
    return deviations if descent is None else descent.paces(deviations, numbers)


def _key(
    optimizer: torch.optim.Optimizer, planned: PlannedRelease, placed: Placed, *, but: Sequence[str]
) -> list[object] | None:
    """What a captured update depends on, less some settings; None where a replay would not do what a call does."""
    if not (kernels.available() and _capturable(optimizer)):
        return None
    # A recording has its own sums and parameters; the key of the noise belongs to `normals` and the process.
    key = [optimizer, placed.region.recording, planned.normals, this_process(), *_settings(optimizer, but)]
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


def _settings(optimizer: torch.optim.Optimizer, but: Sequence[str] = ()) -> list[object]:
    """What a replay takes from the settings: addresses of tensors on the device, values of everything else.

    Of those left out only whether they are zero: that decides which passes there are.
    """
    found: list[object] = []
    for group in optimizer.param_groups:
        settings = dict(group)
        found += map(id, settings.pop("params"))
        for name in but:
            settings[name] = settings[name] == 0
        if _PLAIN.issuperset(map(type, settings.values())):
            found += settings.values()
        else:
            found += map(_setting, settings.values())
    return found


def _setting(value: object) -> object:
    if isinstance(value, Tensor):
        return value.data_ptr() if graphs.possible([value]) else value.tolist()
    return list(map(id, value)) if isinstance(value, list) else value
