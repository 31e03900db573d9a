"""CUDA graphs played on a CPU: operations are noted with the memory they use, undone, and done again at each replay.

As with a real graph, recording has no effect, a replay reads and writes the tensors that were there when it was
recorded, and numbers that were constants then stay what they were.
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from hush import kernels, machine
from hush.captured import cuda_graphs as graphs
from hush.noise import gaussian as noise
from hush.noise.gaussian import Part
from hush.randomness.gaussian_samples import fill_normals


class Notes(TorchDispatchMode):
    """Notes every operation, and what memory held before an operation changed it."""

    active: "Notes | None" = None

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], None]] = []
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.inplace_view in func.tags:
            return func(*args, **kwargs)  # another view of the same memory: nothing to do again
        given = tree_map(_window, args)
        for spec, argument in zip(func._schema.arguments, given, strict=False):
            if spec.alias_info is not None and spec.alias_info.is_write:
                for tensor in tree_leaves(argument):
                    self._before.setdefault(tensor.data_ptr(), (tensor, tensor.clone()))
        result = func(*args, **kwargs)
        if all(spec.alias_info is None for spec in func._schema.returns):
            written = [_window(leaf) for leaf in tree_leaves(result)]
            self.calls.append(lambda: _write(written, func(*given, **kwargs)))
        elif func._schema.is_mutable:
            self.calls.append(lambda: func(*given, **kwargs))
        return result

    def undo(self) -> None:
        for tensor, before in self._before.values():
            tensor.copy_(before)


def _window(value: Any) -> Any:
    """The same memory, as it is seen now."""
    return value.detach().as_strided(value.size(), value.stride(), value.storage_offset()) if _plain(value) else value


def _plain(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided


def _write(places: list[Any], values: Any) -> None:
    for place, value in zip(places, tree_leaves(values), strict=True):
        if isinstance(place, Tensor):
            place.copy_(value)


class Played(graphs.Recording):
    """A recording that counts its replays."""

    def __init__(self, notes: Notes) -> None:
        self.notes = notes
        self.replays = 0
        self.held = 0

    def replay(self) -> None:
        self.replays += 1
        with torch.no_grad():
            for call in self.notes.calls:
                call()


class Studio:
    """All that was recorded, and how often it was played."""

    def __init__(self) -> None:
        self.recordings: list[Played] = []

    def record(self, function: Callable[[], Any], *, beside: Any = None) -> tuple[Played, Any]:
        Notes.active = notes = Notes()
        try:
            with notes:
                result = function()
        finally:
            Notes.active = None
            with torch.no_grad():
                notes.undo()
        self.recordings.append(Played(notes))
        return self.recordings[-1], result

    @property
    def replays(self) -> list[int]:
        return [recording.replays for recording in self.recordings]


def play_graphs_on_cpu(patch: pytest.MonkeyPatch) -> Studio:
    """From now on tensors on the CPU, single numbers aside, are captured as if they were on a GPU."""
    from hush.kernels.noise import gaussian, table

    studio, interpreted = Studio(), table.TableRelease.launch

    def launch(release: Any) -> None:
        _launch(release) if isinstance(release, gaussian.Release) else interpreted(release)

    def noted(release: Any) -> None:
        if Notes.active is None:
            launch(release)
        else:
            Notes.active.calls.append(lambda: launch(release))

    def on_device(tensors: Iterable[Tensor]) -> bool:
        return all([tensor.ndim for tensor in tensors] or [0])

    def run(function: Callable[[], Any], times: int) -> Any:
        return [function() for _ in range(times)][-1]

    patch.setattr(machine, "can_capture", lambda device: True)
    patch.setattr(graphs, "possible", on_device)
    patch.setattr(graphs, "record", studio.record)
    patch.setattr(graphs, "warm_up", run)
    patch.setattr(kernels, "available", lambda: True)
    patch.setattr(table.TableRelease, "launch", noted)
    return studio


def _launch(release: Any) -> None:
    """What the kernel does, by the table as it stands, with the CPU's numbers and torch's operations."""
    table, (totals, outs) = release._table.numpy(), release._keep
    assert table[10 + len(totals) : 10 + 3 * len(totals)].tolist() == [tensor.data_ptr() for tensor in totals + outs]
    numbers = np.empty(sum(total.numel() for total in totals), np.float32)
    fill_normals(numbers, table[1:9].astype("<u4").tobytes(), int(table[0]))
    deviations = table[10 + 3 * len(totals) :].view(np.float64).tolist()
    noise._release([Part(*part) for part in zip(totals, deviations, outs, strict=True)], release._scale, numbers)
