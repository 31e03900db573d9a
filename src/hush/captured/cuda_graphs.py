"""CUDA graphs: work that is recorded once and then replayed, always in the same memory."""

import gc
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
_OF_THREAD = threading.local()


def _side() -> torch.cuda.Stream:
    """One stream of this thread and device for warm runs and recordings: products keep 32 MiB for each stream they saw.

    They take them at the first product, out of the smallest block that is free; that could be a large one, which would
    stay with them. So the first product comes before anything else.
    Not of several threads: what one queues while another records would become part of the recording.
    """
    streams: dict[int, torch.cuda.Stream] = _OF_THREAD.__dict__.setdefault("streams", {})
    device = torch.cuda.current_device()
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)
        with torch.cuda.stream(streams[device]), torch.no_grad():
            small = torch.ones(16, 16, device=f"cuda:{device}")
            small.mm(small)
    return streams[device]


class Recording:
    """Recorded work; a replay does it again, in a few microseconds of the host, on what memory holds by then.

    `held` is the memory in bytes that was reserved for it.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, held: int) -> None:
        self.graph = graph
        self.held = held

    def replay(self) -> None:
        """Queue the work on the current stream; waits for nothing."""
        self.graph.replay()


def possible(tensors: Iterable[Tensor]) -> bool:
    """Whether work on these tensors can be recorded: all of them lie on the current GPU."""
    devices = {tensor.device for tensor in tensors}
    if len(devices) != 1:
        return False
    device = devices.pop()
    return device.type == "cuda" and device.index == torch.cuda.current_device()


def record(function: Callable[[], T], *, beside: Recording | None = None) -> tuple[Recording, T]:
    """Record what the function queues, without doing it, and return that with the function's result.

    The result's tensors hold nothing until the first replay. `beside` is a recording that is never replayed while the
    results of this one are still needed: both then use the same memory for what they compute in between.
    """
    graph = torch.cuda.CUDAGraph()
    pool = None if beside is None else beside.graph.pool()
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()  # an old graph that is freed while another is recorded would spoil it
    try:
        # Other threads may go on meanwhile.
        with _one_thread(), torch.cuda.graph(graph, pool=pool, stream=_side(), capture_error_mode="thread_local"):
            before = torch.cuda.memory_reserved()
            result = function()
            held = torch.cuda.memory_reserved() - before
    finally:
        if collecting:
            gc.enable()
    return Recording(graph, held), result


def warm_up(function: Callable[[], T], times: int) -> T:
    """Run the function a few times as it must run before it is recorded: on a stream of its own."""
    side = _side()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), _one_thread():
        for _ in range(times):
            result = function()
    torch.cuda.current_stream().wait_stream(side)
    return result


def _one_thread() -> AbstractContextManager[object]:
    """Backward passes run in this thread: products keep their 32 MiB for each thread as well."""
    alone: AbstractContextManager[object] = torch.autograd.set_multithreading_enabled(False)
    return alone
