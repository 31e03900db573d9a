"""Drives the batched programs, one after another: on a GPU twenty steps are one captured graph.

A step of a small program is a chain of some forty short kernels, whose launches would take longer than they do. Nothing
returns to the host before the end.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from side_by_side import Data, Program, Run
from torch import Tensor

TURN = 20  # steps launched together
Readings = dict[int, dict[str, list[float]]]  # step -> what was read there -> a number for each run


class Steps(Protocol):
    """What can be stepped, and begun anew."""

    generator: torch.Generator

    def step(self) -> None: ...

    def reset(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Job:
    """One program and what to read on its way: accuracies at the given steps (and at the end).

    `probe` measures something more of every run at those steps, kept as "probe".
    """

    runs: list[Run]
    data: Data
    seed: int
    marks: list[int] = field(default_factory=list)
    train_accuracy: bool = False
    truncated: bool = False
    probe: Callable[[Program], Tensor] | None = None


@dataclass(frozen=True)
class Plan:
    """The jobs of an experiment, and what it makes of their readings."""

    jobs: list[Job]
    result: Callable[[list[Readings]], dict[str, Any]]


def carried_out(plan: Plan) -> dict[str, Any]:
    """Train all jobs of a plan; its result."""
    return plan.result(train_together(plan.jobs))


class Course:
    """A job under way."""

    def __init__(self, job: Job) -> None:
        self.job, self.done = job, 0
        self.program = Program(job.runs, job.data, seed=job.seed, truncated=job.truncated)
        cuda = job.data.train_x.is_cuda
        if cuda:
            torch.cuda.empty_cache()  # the memory of earlier programs' graphs
            torch.set_float32_matmul_precision("high")  # TF32: its rounding is far below the noise
        self.advance = captured(self.program) if cuda else plainly(self.program)
        self.end = max(run.steps for run in job.runs)
        self.stops = sorted({step for step in job.marks if 0 < step <= self.end} | {self.end})
        self.readings: dict[int, dict[str, Tensor]] = {}

    def turn(self) -> bool:
        """A few steps, and what is to be read after them; whether steps are left."""
        stop = self.stops[0]
        count = min(TURN, stop - self.done)
        self.advance(count)
        self.done += count
        if self.done == stop:
            self.readings[stop] = self.read()
            self.stops.pop(0)
        return self.done < self.end

    def read(self) -> dict[str, Tensor]:
        """The accuracies of all runs as they are now."""
        program, data = self.program, self.job.data
        found = {"test": program.accuracy(data.test_x, data.test_y)}
        if self.job.train_accuracy:
            found["train (private)"] = program.accuracy(data.train_x, data.train_y)
        if self.job.probe is not None:
            found["probe"] = self.job.probe(program)
        return found

    def result(self) -> Readings:
        """All readings, on the host."""
        program = self.program
        if program.overfull.any():
            raise RuntimeError(f"a lot of expected size {program.lot} did not fit into {program.width} places")
        return {step: {name: v.tolist() for name, v in reading.items()} for step, reading in self.readings.items()}


def train_together(jobs: list[Job]) -> list[Readings]:
    """Train the runs of all jobs; for each job the accuracies of its runs, as {step: {"test": [...]}}.

    A run that has ended keeps its last model, so the entry of the longest run's end holds every run's last model.
    """
    found = dict(as_they_end(jobs))
    return [found[i] for i in range(len(jobs))]


def as_they_end(jobs: list[Job]) -> Iterator[tuple[int, Readings]]:
    """The number of each job and what was read of it, when it has ended; the longest come first."""
    started = time.time()
    for i in sorted(range(len(jobs)), key=lambda i: -max(run.steps for run in jobs[i].runs)):
        course = Course(jobs[i])
        while course.turn():
            pass
        yield i, course.result()
        told = f"{len(course.job.runs)} runs of {course.job.runs[0].shape}, {course.end} steps"
        print(f"  {told}: at {time.time() - started:.1f} s", flush=True)


def train_all(runs: list[Run], data: Data, *, seed: int, most: int = 64) -> list[float]:
    """Test accuracy of every run's last model; runs are put together by shape and length, `most` in a program."""
    order = sorted(range(len(runs)), key=lambda i: (runs[i].shape, runs[i].steps))
    groups: list[list[int]] = []
    while order:
        shape, longest = runs[order[0]].shape, 2 * runs[order[0]].steps
        groups.append([i for i in order[:most] if runs[i].shape == shape and runs[i].steps <= longest])
        order = order[len(groups[-1]) :]
    jobs = [Job(runs=[runs[i] for i in group], data=data, seed=seed + group[0]) for group in groups]
    result = [math.nan] * len(runs)
    for group, readings in zip(groups, train_together(jobs), strict=True):
        for i, accuracy in zip(group, readings[max(readings)]["test"], strict=True):
            result[i] = accuracy
    return result


def captured(program: Steps) -> Callable[[int], None]:
    """So many steps as CUDA graphs, TURN of them in one: a launch of hundreds of kernels becomes one launch."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            program.step()
    torch.cuda.current_stream().wait_stream(side)
    program.reset()
    one, many, pool = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    for graph, steps in ((one, 1), (many, TURN)):
        graph.register_generator_state(program.generator)
        with torch.cuda.graph(graph, pool=pool):
            for _ in range(steps):
                program.step()
    program.reset()

    def advance(count: int) -> None:
        for _ in range(count // TURN):
            many.replay()
        for _ in range(count % TURN):
            one.replay()

    return advance


def plainly(program: Steps) -> Callable[[int], None]:
    """So many steps one after another."""

    def advance(count: int) -> None:
        for _ in range(count):
            program.step()

    return advance
