"""What one process of the step benchmark on a GPU does: see `step_cuda.py`."""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, astuple

from cases import Case, cases
from crew import end_with_parent
from exactness import exactness
from forms import PEERS, SELDOM, Step, Unavailable, captured, forms
from jax_forms import JaxStep, used_mib
from measure import Rounds, Timing, interleaved, reserved_mib, seconds_per_step, settled_mib

CAPTURED = {"plain compiled+captured": "plain compiled"}
"""A way that is a graph of another: that one is captured, not compiled again."""
PATIENCE = 5
"""Times that memory is asked for again, which other processes may have."""
FULL = ("OutOfMemoryError", "RESOURCE_EXHAUSTED")
"""What PyTorch and JAX say when there is none."""
TURN = 0.05
"""Seconds that a way outside of the main figures is timed at once."""


class Report:
    """What is known so far, in a file that is never half written."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._file = options.json
        self.found: dict = {"stages": []}

    def save(self, stage: str | None = None) -> None:
        self.found["stages"] += [stage] if stage else []
        whole = self._file.with_suffix(".whole")
        whole.write_text(json.dumps(self.found))
        whole.replace(self._file)


def one_phase(options: argparse.Namespace) -> None:
    end_with_parent()
    case, report = cases("cuda")[options.case[0]], Report(options)
    {"exact": compare, "time": measure, "way": alone}[options.phase](case, options, report)


def compare(case: Case, options: argparse.Namespace, report: Report) -> None:
    """The sums of every way against float64; nobody waits for it, so others go first."""
    os.nice(10)
    kind = options.part
    known = report.found["exactness"] = {}

    def all_ways() -> None:
        for errors in exactness(case, kind, "cuda"):
            known[kind] = errors
            report.save()

    if failed := _patiently(all_ways):
        known.setdefault(kind, {"ways": {}})["failed"] = failed
    report.save("done")


def alone(case: Case, options: argparse.Namespace, report: Report) -> None:
    """The memory of one way, the only one in this process; if told so, its time beside the eager plain step."""
    name = options.part
    read = used_mib if name.startswith("jax") else reserved_mib
    answer = _patiently(lambda: read(lambda: forms("cuda", case)[name](case, "cuda")))
    if isinstance(answer, str):
        report.found["unavailable"] = {name: answer}
        report.save("memory")
        return
    step, mib, *building = answer
    report.found["reserved_mib"] = {name: mib}
    if building:
        report.found["building_mib"] = {name: building[0]}
    if isinstance(step, JaxStep):
        report.found["notes"] = {name: step.note}
    report.save("memory")
    for _ in sys.stdin:
        report.found["more"] = {name: asdict(_beside_plain(case, name, step))}
        report.save("timed")


def _beside_plain(case: Case, name: str, step: Step) -> Timing:
    """Its time and that of the eager plain step, in turns at whose end the GPU is waited for.

    For PyTorch that is part of the measurement. JAX waits by itself, which after every step would cost it the time in
    which it asks for the next one: all steps of a turn are taken as one, and what that took is divided by their number.
    """
    steps, count = {"plain": forms("cuda", case)["plain"](case, "cuda"), name: step}, 1
    if isinstance(step, JaxStep):
        count = max(1, round(TURN / min(seconds_per_step(step, 1, "cuda")[0] for _ in range(3))))
        steps[name] = lambda: step(count)
    timing = interleaved(steps, base="plain", rounds=3, device="cuda", slot=TURN).timings[name]
    return Timing(*(value / count for value in astuple(timing)))


def measure(case: Case, options: argparse.Namespace, report: Report) -> None:
    """Builds the ways, waits to be told that the machine is free, and times them in turns."""
    names = [name for name in forms("cuda", case) if not name.startswith(PEERS)]
    if case.name.startswith("gpt2"):
        names = [name for name in names if name not in SELDOM]
    steps: dict[str, Step] = {}
    report.found["unavailable"] = {}
    for name in sorted(names, key=lambda name: "compiled" in name):
        answer = _patiently(lambda name=name: _built(case, name, steps))
        if isinstance(answer, str):
            report.found["unavailable"][name] = answer
        else:
            steps[name] = answer
    report.save("ready")
    for _ in sys.stdin:
        rounds = interleaved(steps, base="plain", rounds=options.rounds, device="cuda", slot=0.07)
        report.found["timings"] = {name: asdict(timing) for name, timing in rounds.timings.items()}
        report.found["ratio"] = _fastest(rounds)
        report.save("timed")


def _built(case: Case, name: str, steps: dict[str, Step]) -> Step:
    base = CAPTURED.get(name)
    step = captured(steps[base]) if base in steps else forms("cuda", case)[name](case, "cuda")
    for _ in range(3):
        step()
    settled_mib()
    return step


def _patiently(work: Callable):
    """What it gives, or what went wrong; other processes use the GPU too, and give their memory back."""
    for _ in range(PATIENCE):
        answer = _or_error(work)
        if not any(sign in str(answer) for sign in FULL):
            break
        settled_mib()
        time.sleep(4)
    return answer


def _or_error(work: Callable):
    """What it gives, or the first line of what went wrong: a way that fails on a case is a result."""
    try:
        return work()
    except Unavailable as reason:
        return str(reason)
    except Exception as error:
        return f"{type(error).__name__}: {(str(error).strip() or repr(error)).splitlines()[0][:200]}"


def _fastest(rounds: Rounds) -> dict:
    """The fastest hush against the fastest plain way, in the same rounds."""
    best = {
        side: min((name for name in rounds.timings if name.startswith(side)), key=rounds.median, default=None)
        for side in ("plain", "hush")
    }
    if None in best.values():
        return {}
    timing = rounds.against(best["hush"], best["plain"])
    return best | {"of": {side: 1e3 * rounds.median(best[side]) for side in best}} | asdict(timing)
