"""Many settings, one charge: draw how many trials there are, run them, release the best."""

import json
import multiprocessing
import secrets
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from hush import accounting
from hush.accounting import Bounds, Budget, Event, Trials, events
from hush.ledger import Ledger
from hush.ledger.owned import held
from hush.randomness.streams import Key
from hush.tuning import charge, state
from hush.tuning.state import State
from hush.tuning.trial import Settings, Trial, run_in_child, score_in

PAY_FOR_EACH = "pay-for-each"
"""The rule under which every setting is run once and paid for, so that every result may be kept and shown."""

_WINNER, _TRIALS = "winner", "trials"
_BITS = 200  # the number of trials follows its law to 2^-200


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The released trial, None in its places where no trial ended well, and what the whole tuning cost."""

    settings: Settings | None
    score: float | None
    folder: Path | None
    noise_multiplier: float | None
    event: Event
    epsilon: Bounds
    delta: float


def tune(
    trial_of: Callable[[Settings], Trial],
    settings: Sequence[Settings],
    *,
    budget: Budget,
    rule: str,
    mean: float | None = None,
    shape: float = 1.0,
    folder: str | PathLike[str],
    ledger: "str | PathLike[str] | Ledger | None" = None,
    create_ledger: bool = False,
    resume: bool = False,
    jobs: int = 1,
    progress: Callable[[int], None] = lambda done: None,
) -> Tuned:
    """Run random settings a random number of times and keep the best trial, in folder/winner.

    Guarantee: the winner, its settings and its score together cost `event`, at most `budget`, whatever happens: trials
    that fail count, the number of trials is drawn before the first one and kept, and the whole is charged to the ledger
    once, before any data is touched. The results of losing trials are deleted as soon as they have lost. With the rule
    "pay-for-each" every setting is run once, all results are kept in folder/trials, and each one is paid for.

    `mean` is the mean number of trials (by default the number of settings), `rule` and `shape` its law
    (`hush.accounting.Trials`). A tuning that was killed goes on with resume=True; a trial that was cut short by that is
    run again from its beginning, since nobody has seen anything of it. A trial that fails by itself is over.

    Who can see how many trials ran, or how long it took, knows more than the guarantee covers: keep both to yourself.
    A ledger given by its path must exist, unless `create_ledger` is set. `trial_of` is called in the process of each
    trial, and here to read the plans: it must be importable.
    """
    law = _law(rule, max(len(settings), 2) if mean is None else mean, shape, len(settings))
    folder = Path(folder)
    asked = {
        "settings": [dict(one) for one in settings],
        "rule": [rule, mean, shape],
        "budget": [budget.epsilon, budget.delta],
    }
    asked = json.loads(json.dumps(asked))  # as it will be read back
    with held(folder):
        kept = state.read(folder)
        if kept is None:
            kept = _begun(trial_of, settings, law, budget, asked)
            kept.write(folder)
        elif not kept.ended and not resume:
            raise ValueError(f"{folder} holds a tuning that has not ended: go on with resume=True (--resume)")
        elif kept.asked != asked:
            raise ValueError(
                f"{folder} holds a tuning of other settings, rule or budget: resume with what it began with"
            )
        event = events.from_dict(kept.event)
        if ledger is not None:
            charge.charge(ledger, kept.account, event, budget, create=create_ledger)
        if not kept.ended:
            _run(trial_of, kept, folder, jobs, progress, keep_all=law is None)
            _finish(kept, folder, keep_all=law is None)
    return _tuned(kept, folder, event, budget)


def _law(rule: str, mean: float, shape: float, settings: int) -> Trials | None:
    if settings == 0:
        raise ValueError("expected at least one setting, got none")
    if rule == "gupta":
        raise ValueError(
            "the paper's route (Gupta et al. 2010, Theorem 10.2) needs millions of runs: see hush.tuning.gupta; "
            "choose geometric, logarithmic, negative-binomial, poisson, binomial or pay-for-each"
        )
    return None if rule == PAY_FOR_EACH else Trials(rule, float(mean), shape)


def _begun(
    trial_of: Callable[[Settings], Trial],
    settings: Sequence[Settings],
    law: Trials | None,
    budget: Budget,
    asked: dict[str, Any],
) -> State:
    """Everything that is decided before the data is touched: noise, cost, and the settings of all trials, drawn."""
    trials = [trial_of(one) for one in settings]
    if not all(isinstance(trial, Trial) for trial in trials):
        raise TypeError("the function to tune must return a hush.tuning.Trial for every setting")
    priced = charge.price(trials, law, budget)
    order = list(range(len(settings)))
    if law is not None:
        stream = Key.from_os().stream("tuning")
        number = law.draw(int.from_bytes(stream.bytes(_BITS // 8), "little"), _BITS)
        order = [int(one) for one in stream.below(len(settings), number)]
    account = f"tuning {secrets.token_hex(8)}"
    return State(asked, account, list(priced.noise), events.to_dict(priced.event), priced.epsilon, order)


def _run(
    trial_of: Callable[[Settings], Trial],
    kept: State,
    folder: Path,
    jobs: int,
    progress: Callable[[int], None],
    *,
    keep_all: bool,
) -> None:
    """Run what is left, `jobs` trials at a time, each in its own process and folder."""
    trials = folder / _TRIALS
    trials.mkdir(exist_ok=True, mode=0o700)
    for number in _ended_unseen(kept, trials):
        _judge(kept, folder, number, keep_all=keep_all)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["hush.tuning.trial"])
    left = [number for number in range(len(kept.order)) if number not in set(kept.done)]
    running: dict[Any, tuple[int, Any]] = {}
    try:
        while left or running:
            while left and len(running) < max(jobs, 1):
                number = left.pop(0)
                setting = kept.order[number]
                place = _place(trials, number)
                shutil.rmtree(place, ignore_errors=True)  # what was cut short begins anew
                place.mkdir(mode=0o700)
                ours, theirs = context.Pipe()
                arguments = (trial_of, kept.asked["settings"][setting], kept.noise[setting], place, theirs)
                process = context.Process(target=run_in_child, args=arguments)
                process.start()
                theirs.close()
                running[process.sentinel] = (number, (process, ours))
            for sentinel in multiprocessing.connection.wait(list(running)):
                number, (process, _) = running.pop(sentinel)
                process.join()
                _judge(kept, folder, number, keep_all=keep_all)
                progress(len(kept.done))
    finally:
        for _, (process, _) in running.values():
            process.kill()
            process.join()


def _ended_unseen(kept: State, trials: Path) -> list[int]:
    """Trials that ended well while nobody was left to look."""
    return [
        number
        for number in range(len(kept.order))
        if number not in kept.done and score_in(_place(trials, number)) is not None
    ]


def _judge(kept: State, folder: Path, number: int, *, keep_all: bool) -> None:
    """Count the trial; keep it if it is the best so far (the earlier one of equals), else delete it."""
    score, loser = score_in(_place(folder / _TRIALS, number)), number
    best = kept.best
    if score is not None and (best is None or (score, -number) > (best["score"], -best["trial"])):
        loser = number if best is None else best["trial"]
        kept.best = {"trial": number, "setting": kept.order[number], "score": score}
    kept.done.append(number)
    kept.write(folder)
    if not keep_all and (kept.best is None or loser != kept.best["trial"]):
        shutil.rmtree(_place(folder / _TRIALS, loser), ignore_errors=True)


def _finish(kept: State, folder: Path, *, keep_all: bool) -> None:
    """Move the winner to its place and forget how many trials there were."""
    if kept.best is not None:
        place = _place(folder / _TRIALS, kept.best["trial"])
        if place.exists():  # else it was moved before the last crash
            shutil.rmtree(folder / _WINNER, ignore_errors=True)
            if keep_all:
                shutil.copytree(place, folder / _WINNER)
            else:
                place.rename(folder / _WINNER)
        if not keep_all:
            kept.best["trial"] = -1
    if not keep_all:
        shutil.rmtree(folder / _TRIALS, ignore_errors=True)
        kept.order, kept.done = [], []
    kept.ended = True
    kept.write(folder)


def _tuned(kept: State, folder: Path, event: Event, budget: Budget) -> Tuned:
    best = kept.best
    return Tuned(
        settings=None if best is None else kept.asked["settings"][best["setting"]],
        score=None if best is None else best["score"],
        folder=None if best is None else folder / _WINNER,
        noise_multiplier=None if best is None else kept.noise[best["setting"]],
        event=event,
        epsilon=accounting.epsilon(event, delta=budget.delta),
        delta=budget.delta,
    )


def _place(trials: Path, number: int) -> Path:
    return trials / f"{number:05d}"
