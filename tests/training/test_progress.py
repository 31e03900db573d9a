"""The progress bar: what it shows is public, and never an epsilon below what is spent."""

import io
import re
import sys
import time

import pytest

from hush.accounting import Budget
from hush.commands.watching import watched
from hush.training.progress import Progress


class Terminal(io.StringIO):
    """Standard error that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def bar(show: bool = True) -> Progress:
    return Progress(steps=200, steps_per_epoch=100, lot_size=600, budget=Budget(epsilon=2.0, delta=1e-5), show=show)


def test_the_rate_counts_the_expected_lot_size(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = bar()
    progress.learn(epsilon=1.23451, note="accuracy 0.9")
    progress.reach(10)  # a resumed run begins somewhere
    now[0] += 2.0
    words = progress.words(14)
    assert words["rate"] == "1,200 examples/s", "4 steps of L = 600 in 2 seconds"
    assert words["spent"] == "epsilon <= 1.235 of 2", "rounded up"
    assert words["epoch"] == "epoch 0.1 of 2" and words["note"] == "accuracy 0.9"
    assert progress.words(10)["rate"] == ""


@pytest.mark.parametrize("columns", [80, 140])
def test_a_bar_fits_its_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    with bar() as progress:
        progress.learn(epsilon=1.234, note="accuracy 0.9531")
        progress.reach(1)
        progress.reach(200)
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    last = [line for line in re.split(r"[\r\n]+", plain) if line.strip()][-1]
    words = ("200/200", "epoch 2.0/2", "eps<=1.234/2", "accuracy 0.9531", ":")
    for word in words if columns == 80 else ("200/200", "epoch 2.0 of 2", "epsilon <= 1.234 of 2", "examples/s", ":"):
        assert word in last, last
    assert "…" not in last


def test_a_terminal_gets_a_bar_and_a_file_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stream)
        with bar() as progress:
            progress.learn(epsilon=1.0)
            progress.reach(1)
            progress.reach(200)
        shown = stream.getvalue()
        assert "epsilon <= 1" in shown and "examples/s" in shown and "200" in shown
        assert stream.isatty() or shown.count("\n") == 1
    quiet = io.StringIO()
    monkeypatch.setattr(sys, "stderr", quiet)
    with bar(show=False) as progress:
        progress.reach(200)
    assert not quiet.getvalue()


def test_without_rich_there_are_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with bar() as progress:
        progress.reach(200)
    assert stream.getvalue().startswith("step 200 of 200")


def test_what_comes_before_the_training_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    now, plain = [0.0], io.StringIO()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(sys, "stderr", plain)
    for _ in watched("features")(range(10)):
        now[0] += 4.0
    assert plain.getvalue().splitlines() == ["features: 40%", "features: 80%"], "a line every 15 seconds"
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    assert list(watched("features")(range(3))) == [0, 1, 2]
    assert "features" in terminal.getvalue()
