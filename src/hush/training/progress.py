"""The progress bar: steps, epoch, epsilon spent, examples per second, time left. Nothing in it is private.

The rate counts the expected lot size L for each step, never how many examples a lot really had, and has two digits: the
time of a step follows that number.
"""

import sys
import time
from types import TracebackType
from typing import Any

from hush.accounting import Accountant, Budget, rounded_up
from hush.ledger.plain import plain
from hush.plan import Plan

_WIDE = 110  # columns of a terminal that have room for whole words


class Progress:
    """Shows how far a run is, on standard error; a bar on a terminal, a line now and then elsewhere.

    `rich` draws the bar; where it is missing there are lines.
    """

    def __init__(self, *, steps: int, steps_per_epoch: int, lot_size: int, budget: Budget, show: bool = True) -> None:
        self._steps, self._per_epoch, self._lot_size, self._budget = steps, steps_per_epoch, lot_size, budget
        self._show = show
        self._bar: Any = None
        self._task: Any = None
        self._spent, self._note = 0.0, ""
        self._began = self._said = time.monotonic()
        self._first: int | None = None

    def __enter__(self) -> "Progress":
        if self._show and sys.stderr.isatty():
            self._bar = _bar(self._steps)
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("", total=self._steps, epoch="", spent="", rate="", note="")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def learn(self, *, epsilon: float, step: int = 0, note: str = "") -> None:
        """What will be spent at most before the next call, and the last measurement on held-out data."""
        self._spent, self._note = epsilon, plain(note, most=60) or self._note
        if self._bar is not None:
            self._bar.update(self._task, completed=step, **self._fitting_words(step))

    def reach(self, step: int) -> None:
        """Show that so many steps are done."""
        if not self._show:
            return
        if self._first is None:
            self._first, self._began = step, time.monotonic()  # setting up before the first step is not its speed
        if self._bar is not None:
            self._bar.update(self._task, completed=step, **self._fitting_words(step))
        elif step == self._steps or time.monotonic() - self._said > 15:
            self._said = time.monotonic()
            words = self.words(step)
            print(", ".join(filter(None, [f"step {step} of {self._steps}", *words.values()])), file=sys.stderr)

    def words(self, step: int) -> dict[str, str]:
        """What stands beside the bar."""
        seconds = max(time.monotonic() - self._began, 1e-9)
        done = step - (self._first or 0)
        return {
            "epoch": f"epoch {min(step, self._steps) / self._per_epoch:.1f} of {self._steps / self._per_epoch:.4g}",
            "spent": f"epsilon <= {rounded_up(self._spent)} of {self._budget.epsilon:g}",
            "rate": f"{float(f'{done * self._lot_size / seconds:.2g}'):,.0f} examples/s" if done else "",
            "note": self._note,
        }

    def _fitting_words(self, step: int) -> dict[str, str]:
        """What stands beside the bar in a terminal of this width."""
        words = self.words(step)
        if self._bar.console.width < _WIDE:
            words = {name: _shorter(text) for name, text in words.items()}
        return words


def _shorter(words: str) -> str:
    """The same in fewer letters.

    >>> _shorter("epsilon <= 1.2 of 2")
    'eps<=1.2/2'
    """
    return words.replace(" of ", "/").replace("epsilon <= ", "eps<=").replace(" examples/s", "/s")


def announce(plan: Plan, *, resumed: bool, accountant: Accountant = "pld") -> None:
    """One line on standard error before the first step: what will be done, and what it costs."""
    size, noise, cost = plan.lots, plan.noise_at(0), ""
    if plan.budget is not None:
        epsilon = rounded_up(plan.epsilon(delta=plan.budget.delta, accountant=accountant).upper)
        cost = f": epsilon {epsilon} of {plan.budget.epsilon:g} at delta {rounded_up(plan.budget.delta, 6)}"
    print(
        f"{'resuming' if resumed else 'training'}: {plan.steps:,} steps on about {size.lot_size:,} of "
        f"{size.examples:,} records each, noise multiplier {noise:.4g}{cost}",
        file=sys.stderr,
    )


def _bar(steps: int) -> Any:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar
    except ImportError:
        return None
    return Bar(
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[epoch]}", markup=False),
        TextColumn("{task.fields[spent]}", style="bold", markup=False),
        TextColumn("{task.fields[rate]}", markup=False),
        TextColumn("{task.fields[note]}", style="green", markup=False),  # a label is text, not markup
        TimeRemainingColumn(compact=True),
        expand=True,
        console=Console(stderr=True),
        refresh_per_second=4,
    )
