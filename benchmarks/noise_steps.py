"""Whole training steps, compiled and captured: noise from the secure stream beside the framework's generator.

A process for each case builds the steps; when all are built, one after another times its own in turns, the others
stopped meanwhile. The three steps of a case share model and compiled region and differ in release and update alone: the
kernel of the secure stream takes the step of SGD as well, after the others torch's optimizer takes it.
"""

import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from cases import cases
from crew import Child, Crew, Job, end_with_parent
from forms import prepare
from measure import interleaved

from hush.captured import batch as capture
from hush.captured import step as update
from hush.clipping.clips import FlatClip
from hush.kernels.noise import gaussian
from hush.machine import Machine
from hush.plan import Plan
from hush.private import Private
from hush.sampling.lots import PoissonLots

CASES = ("cnn24", "wrn16-4", "gpt2-512")


class FrameworkRelease:
    """What `hush.kernels.noise.gaussian.Release` does, with torch's own generator in the fewest launches."""

    launches = 0

    def __init__(
        self, parts: list[tuple[torch.Tensor, float, torch.Tensor]], *, scale: float, subkey: bytes, step: int
    ) -> None:
        self._totals = [part[0] for part in parts]
        self._scale, self._deviation = scale, parts[0][1] * scale
        self._numbers = torch.empty(sum(total.numel() for total in self._totals), device="cuda")
        shares = self._numbers.split([total.numel() for total in self._totals])
        self._shares = [share.view(total.shape) for share, total in zip(shares, self._totals, strict=True)]

    def launch(self) -> None:
        FrameworkRelease.launches += 1
        self._numbers.normal_(std=self._deviation)
        torch._foreach_mul_(self._totals, self._scale)
        torch._foreach_add_(self._totals, self._shares)

    def at(self, subkey: bytes, step: int, deviations: list[float]) -> None:
        """The generator keeps count itself."""


class Steps:
    """One private step of a case for each kind of noise: lot, forward, backward, clipping, noise, update."""

    def __init__(self, name: str) -> None:
        self._case = cases("cuda")[name]
        self._model, self._x, self._y, self._optimizer = prepare(self._case, "cuda")
        self._secure, self._compiled = gaussian.Release, capture.compiled
        self._region: list[Callable] = []
        self.steps: dict[str, Callable[[], None]] = {}
        update._WHOLE_BELOW = 0  # the release in a graph of its own, where torch's can take its place
        capture.compiled = self._once
        self.add("framework")
        launched = FrameworkRelease.launches
        self.steps["framework"]()
        assert FrameworkRelease.launches == launched, "the step with torch's generator was not captured"
        self.add("secure")

    def _once(self, function: Callable, inputs: list[torch.Tensor]) -> Callable:
        self._region.extend([] if self._region else [self._compiled(function, inputs)])
        return self._region[0]

    def add(self, label: str) -> None:
        framework = label == "framework"
        gaussian.Release = FrameworkRelease if framework else self._secure  # type: ignore[assignment,misc]
        self.steps[label] = step = self._step("float_safe" if label == "float-safe" else "gaussian")
        for _ in range(8):  # the update is captured by then
            step()

    def _step(self, noise: Literal["gaussian", "float_safe"]) -> Callable[[], None]:
        case, model, x, y = self._case, self._model, self._x, self._y
        plan = Plan(
            lots=PoissonLots(examples=len(x), lot_size=len(x)),
            steps=10**6,
            clip=FlatClip(1.0),
            noise_multiplier=1.0,
            noise=noise,
        )
        losses_of = lambda model, x, y: case.forward(model, x, y)  # noqa: E731
        private = Private(model, plan, losses_of, machine=Machine(compile=True))
        lots = private.lots()

        def step() -> None:
            for batch in next(lots).batches(len(x)):
                private.add(batch, x, y)
            private.step(self._optimizer)

        return step


def one_case(name: str, rounds: int, file: Path) -> None:
    """Build, wait to be told which kind of noise, time it beside torch's in turns."""
    found: dict = {"stages": [], "row": {}}

    def save(stage: str) -> None:
        found["stages"].append(stage)
        whole = file.with_suffix(".whole")
        whole.write_text(json.dumps(found))
        whole.replace(file)

    end_with_parent()
    built = Steps(name)
    save("ready")
    for order in sys.stdin:
        label = order.strip()
        if label not in built.steps:
            built.add(label)
        both = {one: built.steps[one] for one in ("framework", label)}
        taken = interleaved(both, base="framework", rounds=rounds, device="cuda", slot=0.06)
        found["row"].setdefault("framework", taken.timings["framework"].milliseconds)
        timing = taken.timings[label]
        found["row"] |= {label: timing.milliseconds, f"{label} / framework": timing.ratio}
        found["row"][f"{label} / framework, range"] = [timing.low, timing.high]
        save(label)


def step_rows(rounds: int, limit: float) -> dict[str, dict]:
    """Milliseconds of one step for each case and kind of noise, and ratios to torch's generator."""
    end = time.monotonic() + limit
    with tempfile.TemporaryDirectory() as folder:

        def start(job: Job) -> Child:
            file = Path(folder, f"{job.case}.json")
            command = [sys.executable, __file__, job.case, str(rounds), str(file)]
            return Child(command, file, os.environ | {"OMP_NUM_THREADS": "1"}, listens=True)

        jobs = [Job(name, "noise", gib=20.0, listens=True) for name in CASES]
        with Crew(start, most=len(jobs), gib=100.0) as crew:
            crew.add(jobs)
            crew.wait(end - 12, lambda: all(crew.at(job, "ready") for job in jobs))
            for label, job in itertools.product(("secure", "float-safe"), jobs):
                if not crew.at(job, "ready") or crew.over(job) or time.monotonic() > end:
                    continue
                with crew.alone(job) as child:
                    child.tell(label)
                    while not child.at(label) and time.monotonic() < end:
                        time.sleep(0.05)
            late = "not built in time"
            found = {job.case: known.get("row") or {"failed": trouble or late} for job, known, trouble in crew.found()}
    return found


if __name__ == "__main__":
    one_case(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
