"""One trial: a plan and a function that trains by it; each runs in a process of its own."""

import json
import math
import os
import signal
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hush.accounting.events import NOTHING, Event
from hush.plan import Plan

Settings = Mapping[str, Any]
SCORE, FAILED = "score.json", "failed.txt"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What a setting means: the plan (its noise multiplier is found by `tune`) and the training.

    `train(plan, folder)` trains by exactly this plan, without a ledger, writes what shall be released if the trial wins
    into the folder, and returns its score, the higher the better. The score comes from public data, or is itself a
    private release of the event `score_event` (a noisy count of hits on private validation records, say).
    """

    plan: Plan
    train: Callable[[Plan, Path], float]
    score_event: Event = NOTHING

    def __post_init__(self) -> None:
        if not isinstance(self.plan, Plan):
            raise TypeError(f"a Trial's plan must be a hush.Plan, got {type(self.plan).__name__}")
        if isinstance(self.plan.noise_multiplier, tuple):
            raise ValueError("a Trial's plan has one noise multiplier for all steps; a schedule cannot be tuned for")

    def planned(self, noise: float) -> Plan:
        """The plan with this noise multiplier."""
        return replace(self.plan, noise_multiplier=noise, budget=None)

    def event(self, noise: float) -> Event:
        """All that the trial does to the data at this noise multiplier, its score included."""
        return self.planned(noise).event + self.score_event


def run_in_child(
    trial_of: Callable[[Settings], Trial], settings: Settings, noise: float, folder: Path, parent: Connection
) -> None:
    """The life of a trial's process. It ends when its parent does; what it raises is kept in the trial's folder."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tuning, which ends its trials itself
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    try:
        trial = trial_of(settings)
        score = float(trial.train(trial.planned(noise), folder))
        if not math.isfinite(score):
            raise ValueError("the score is not a finite number")
    except BaseException:
        (folder / FAILED).write_text(traceback.format_exc())
        os._exit(1)
    partial = folder / (SCORE + ".part")
    partial.write_text(json.dumps({"score": score}))
    os.replace(partial, folder / SCORE)


def score_in(folder: Path) -> float | None:
    """The score of a trial that ended well; None for one that failed."""
    try:
        return float(json.loads((folder / SCORE).read_text())["score"])
    except FileNotFoundError:
        return None


def _end_with(parent: Connection) -> None:
    try:
        parent.recv()
    except (EOFError, OSError):
        os._exit(1)
