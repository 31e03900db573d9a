"""What one process of the step benchmark on a GPU does, for one case: see `step_cuda.py`."""

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict

import torch
from cases import Case, cases
from exactness import exactness
from forms import Step, Unavailable, captured, forms
from measure import Rounds, held_mib, interleaved, settled_mib

PEERS = "opacus"
CAPTURED = {"plain compiled+captured": "plain compiled"}
"""A way that is a graph of another: that one is captured, not compiled again."""
SELDOM = ("plain captured", "hush captured")
"""Ways that come last for large models: graphs that are not compiled, which take most memory."""


class Report:
    """What is known so far, in a file that is never half written."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._file = options.json
        self.found: dict = {"stages": [], "reserved_mib": {}, "unavailable": {}}

    def save(self, stage: str | None = None) -> None:
        self.found["stages"] += [stage] if stage else []
        whole = self._file.with_suffix(".whole")
        whole.write_text(json.dumps(self.found))
        whole.replace(self._file)


def one_phase(options: argparse.Namespace) -> None:
    case, report = cases("cuda")[options.case[0]], Report(options)
    (compare if options.phase == "exact" else measure)(case, options, report)


def compare(case: Case, options: argparse.Namespace, report: Report) -> None:
    """The sums of every way against float64; nobody waits for it, so others go first."""
    os.nice(10)
    report.found = {"stages": [], "exactness": {}}
    known = report.found["exactness"]
    for kind in ("bf16", "fp32") if case.autocast else ("fp32",):

        def all_ways(kind: str = kind) -> None:
            for errors in exactness(case, kind, "cuda"):
                known[kind] = errors
                report.save()

        if failed := _or_error(all_ways):
            known.setdefault(kind, {"ways": {}})["failed"] = failed
        gc.collect()
        torch.cuda.empty_cache()
    report.save("done")


def measure(case: Case, options: argparse.Namespace, report: Report) -> None:
    """Builds the ways, waits to be told that the GPU is free, and times them in turns; then the rest."""
    ways = forms("cuda", case)
    large = case.name.startswith("gpt2")
    rest = [name for name in ways if name.startswith(PEERS) or (large and name in SELDOM)]
    first = [name for name in ways if name not in rest]
    steps = _build(case, sorted(first, key=lambda name: "compiled" in name), report)
    report.save("ready")
    for order in sys.stdin:
        if order.strip() == "main":
            rounds = interleaved(steps, base="plain", rounds=options.rounds, device="cuda", slot=0.07)
            report.found["timings"] = {name: asdict(timing) for name, timing in rounds.timings.items()}
            report.found["ratio"] = _fastest(rounds)
            report.save("main")
            continue
        steps = {name: step for name, step in steps.items() if name == "plain"}
        gc.collect()
        torch.cuda.empty_cache()
        report.found["more"] = {}
        for name in rest if options.peers else [name for name in rest if not name.startswith(PEERS)]:
            more = _build(case, [name], report)
            if name in more:
                both = {"plain": steps["plain"], name: more[name]}
                rounds = interleaved(both, base="plain", rounds=3, device="cuda", slot=0.05)
                report.found["more"][name] = asdict(rounds.timings[name])
            del more
            report.save()
        report.save("rest")


def _build(case: Case, names: list[str], report: Report) -> dict[str, Step]:
    """The steps that can be built, ready to be timed; the memory of each goes to the report."""
    steps: dict[str, Step] = {}
    before: dict[str, float] = {}
    for name in names:
        base = CAPTURED.get(name)

        def build(name: str = name, base: str | None = base) -> Step:
            return captured(steps[base]) if base in steps else forms("cuda", case)[name](case, "cuda")

        # The graph of a step that is there shares its model, which counts for both.
        before[name] = before[base] if base in steps else settled_mib()
        answer = _or_error(lambda build=build, name=name: held_mib(build, before[name]))
        for _ in range(5 if "ready" not in report.found["stages"] else 0):
            if not str(answer).startswith("OutOfMemoryError"):
                break
            settled_mib()  # other processes use the GPU too, and give their memory back
            time.sleep(4)
            answer = _or_error(lambda build=build, name=name: held_mib(build, before[name]))
        if isinstance(answer, str):
            report.found["unavailable"][name] = answer
        else:
            steps[name], report.found["reserved_mib"][name] = answer
        report.save()
    return steps


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
