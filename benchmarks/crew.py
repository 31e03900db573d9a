"""Processes of a benchmark: as many at a time as there is room for, and all of them can be stopped while one is timed.

Each process writes what it knows, and how far it is, to a file of its own.
"""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Job:
    """What a process is to do: `phase` of `case`, for one `part` of it where there are several."""

    case: str
    phase: str
    part: str = ""
    gib: float = 4.0
    """Memory of the GPU that it may need at most; a guess."""
    listens: bool = False
    """Whether it waits for orders when it is ready; others end by themselves."""


def end_with_parent() -> None:
    """For the process itself: it ends with the one that started it, however that ends (Linux)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Child:
    """A process in a group of its own, so that its helpers are stopped and ended with it."""

    def __init__(self, command: list[str], file: Path, environment: dict[str, str], listens: bool) -> None:
        self._file = file
        self._log = file.with_suffix(".log")
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE if listens else subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        self._ended = False

    def found(self) -> dict:
        return json.loads(self._file.read_text()) if self._file.exists() else {}

    def at(self, stage: str) -> bool:
        """Whether it has come so far; one that is over comes no further."""
        return self.over() or stage in self.found().get("stages", ())

    def over(self) -> bool:
        return self._process.poll() is not None

    def trouble(self) -> str:
        """The last line that a process left that failed by itself."""
        if self._ended or not self._process.poll():
            return ""
        lines = [line for line in self._log.read_text().splitlines() if line.strip()]
        return f"process ended with {self._process.returncode}: {lines[-1][:200] if lines else ''}"

    def tell(self, order: str) -> None:
        with contextlib.suppress(OSError):
            self._process.stdin.write(order + "\n")
            self._process.stdin.flush()

    def signal(self, number: int) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, number)

    def end(self) -> None:
        self._ended = self._ended or not self.over()
        self.signal(signal.SIGKILL)  # helpers of a process that is over may still be there
        self._process.wait()
        if self._process.stdin:
            with contextlib.suppress(OSError):
                self._process.stdin.close()


class Crew:
    """Starts jobs in the order in which they stand, each as soon as it may begin and there is room for it."""

    def __init__(self, start: Callable[[Job], Child], *, most: int, gib: float) -> None:
        self._start = start
        self._most, self._gib = most, gib
        self._waiting: list[Job] = []
        self._children: dict[Job, Child] = {}
        self._after: dict[Job, tuple[Job, ...]] = {}

    def __enter__(self) -> "Crew":
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children.values():
            child.end()

    def add(self, jobs: Iterable[Job], *, after: Iterable[Job] = ()) -> None:
        """Jobs that begin, in their order and behind all that wait, when those in `after` are over."""
        jobs = list(jobs)
        self._after |= {job: tuple(after) for job in jobs}
        self._waiting += jobs

    def tend(self) -> None:
        """Start what can be started."""
        alive = [job for job, child in self._children.items() if not child.over()]
        for job in list(self._waiting):
            if not all(other in self._children and self._children[other].over() for other in self._after[job]):
                continue
            if alive and (len(alive) >= self._most or sum(other.gib for other in alive) + job.gib > self._gib):
                return  # what stands behind must not take the room for which this one waits
            self._waiting.remove(job)
            self._children[job] = self._start(job)
            alive.append(job)

    def wait(self, until: float, enough: Callable[[], bool]) -> bool:
        """Tend until it is enough or too late; says whether it was enough."""
        while not enough():
            if time.monotonic() > until:
                return False
            self.tend()
            time.sleep(0.05)
        return True

    def at(self, job: Job, stage: str) -> bool:
        return job in self._children and self._children[job].at(stage)

    def over(self, job: Job) -> bool:
        return job in self._children and self._children[job].over()

    def end(self, job: Job) -> None:
        """End the job; one that has not begun is dropped."""
        if job in self._children:
            self._children[job].end()
        elif job in self._waiting:
            self._waiting.remove(job)

    def found(self) -> Iterator[tuple[Job, dict, str]]:
        """What each job knows so far, and what went wrong."""
        for job, child in self._children.items():
            yield job, child.found(), child.trouble()

    @contextlib.contextmanager
    def alone(self, job: Job) -> Iterator[Child]:
        """All other processes are stopped meanwhile."""
        others = [child for other, child in self._children.items() if other != job and not child.over()]
        for child in others:
            child.signal(signal.SIGSTOP)
        try:
            time.sleep(0.3 if others else 0.0)  # what they had queued on the GPU
            yield self._children[job]
        finally:
            for child in others:
                child.signal(signal.SIGCONT)
