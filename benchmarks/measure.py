"""Timing that a busy machine cannot spoil in silence, and peak memory of a step in a process of its own."""

import ctypes
import gc
import importlib.metadata
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

Step = Callable[[], None]
TICK = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Timing:
    """Medians over the rounds that nobody disturbed; `ratio` is the median of the ratios of each round."""

    milliseconds: float
    ratio: float
    low: float
    high: float


@dataclass(frozen=True)
class Rounds:
    timings: dict[str, Timing]
    kept: int
    dropped: int
    taken: tuple[dict[str, float], ...] = ()
    """Seconds of a step by name, for each round."""

    def against(self, name: str, base: str) -> Timing:
        """One way relative to another in the same rounds."""
        return _timing(name, base, self.taken)

    def median(self, name: str) -> float:
        return statistics.median(one[name] for one in self.taken)


def busy_seconds() -> float:
    """Time that all CPUs together have spent on anything, or lost to the hypervisor (/proc/stat)."""
    with open("/proc/stat") as file:
        user, nice, system, _idle, _wait, irq, soft, steal = map(int, file.readline().split()[1:9])
    return (user + nice + system + irq + soft + steal) * TICK


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_per_step(step: Step, repeats: int, device: str, cpu_time: bool = False) -> tuple[float, float]:
    """Wall time of a step, and which part of the CPUs was busy with foreign work meanwhile.

    With `cpu_time` the time that all threads of this process spent on a CPU, which foreign work hardly moves.
    """
    synchronize(device)
    foreign, own, start = busy_seconds(), time.process_time(), time.perf_counter()
    for _ in range(repeats):
        step()
    synchronize(device)
    wall, used = time.perf_counter() - start, time.process_time() - own
    if cpu_time:
        return used / repeats, 0.0
    foreign = busy_seconds() - foreign - used
    return wall / repeats, max(0.0, foreign) / (wall * (os.cpu_count() or 1))


def interleaved(
    steps: Mapping[str, Step],
    *,
    base: str,
    rounds: int,
    device: str,
    slot: float = 0.3,
    tolerated: float = 0.04,
    cpu_time: bool = False,
    tell: Callable[[], None] = lambda: None,
) -> Rounds:
    """Time all ways in turns; each turn lasts about `slot` seconds, so that the 10 ms ticks of /proc/stat can judge it.

    A round in which foreign work took more than the `tolerated` part of the CPUs during any turn is dropped and taken
    again, up to three times as many rounds in all.
    """
    repeats = {}
    for name, step in steps.items():
        for _ in range(3):
            step()
        once = min(seconds_per_step(step, 1, device, cpu_time)[0] for _ in range(3))
        repeats[name] = max(1, round(slot / once))
    taken: list[dict[str, float]] = []
    dropped = 0
    while len(taken) < rounds and len(taken) + dropped < 3 * rounds:
        measured = {name: seconds_per_step(step, repeats[name], device, cpu_time) for name, step in steps.items()}
        if device == "cpu" and max(foreign for _, foreign in measured.values()) > tolerated:
            dropped += 1
        else:
            taken.append({name: seconds for name, (seconds, _) in measured.items()})
            tell()
    timings = {name: _timing(name, base, taken) for name in steps} if taken else {}
    return Rounds(timings, len(taken), dropped, tuple(taken))


def _timing(name: str, base: str, taken: Sequence[dict[str, float]]) -> Timing:
    ratios = sorted(one[name] / one[base] for one in taken)
    quarter = len(ratios) // 4
    milliseconds = statistics.median(one[name] for one in taken) * 1e3
    return Timing(milliseconds, statistics.median(ratios), ratios[quarter], ratios[-1 - quarter])


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def peak_mib(build: Callable[[], Step]) -> float:
    """Peak memory in MiB of a few steps after the first ones: model, batch and step, without what was there before.

    To be called in a fresh process; it is the resident set.
    """
    torch.ones(64, 64) @ torch.ones(64, 64)
    before = resident_mib()
    step = build()
    for _ in range(3):
        step()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    for _ in range(3):
        step()
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(lines["VmHWM"].split()[0]) / 1024 - before


def settled_mib() -> float:
    """What PyTorch's allocator holds on the GPU once its cache is emptied."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved() / 2**20


def reserved_mib(build: Callable[[], Step]) -> tuple[Step, float, float]:
    """The step, and what the allocator reserved on the GPU while it ran: model, batch, pools of graphs, workspaces.

    Then the most that it had reserved before, while the step was built. To be called in a fresh process: where
    something else was there before, a step may use what that left free.
    """
    torch.cuda.reset_peak_memory_stats()
    step = build()
    for _ in range(8):  # everything is captured by then
        step()
    torch.cuda.synchronize()
    building = torch.cuda.max_memory_reserved() / 2**20
    settled_mib()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    return step, torch.cuda.max_memory_reserved() / 2**20, building


def machine(device: str) -> dict[str, str | int]:
    """What the numbers were measured on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
    found: dict[str, str | int] = {
        "cpu": cpu or platform.processor(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if device == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(), "triton": importlib.metadata.version("triton")}
    return found
