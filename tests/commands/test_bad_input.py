"""Whatever is typed wrong, for every command and each of its options: one line, status 2, nothing left behind.

A new command needs a line in GOOD: arguments that work. What is bad is then derived from its options' types.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from support.command_line import call
from torch import nn

from hush.accounting import Budget, Gaussian
from hush.clipping.clips import FlatClip
from hush.commands import app as cli
from hush.gradients.functional import per_example
from hush.ledger import DataNotLinked, Ledger
from hush.plan import Plan
from hush.training import Run, fit

GOOD = {
    "epsilon": "--rate 0.01 --noise 4 --steps 100 --delta 1e-5",
    "delta": "--rate 0.01 --noise 4 --steps 100 --epsilon 1",
    "noise": "--epsilon 2 --delta 1e-5 --rate 0.01 --steps 100",
    "steps": "--epsilon 2 --delta 1e-5 --rate 0.01 --noise 4",
    "compare": "--rate 0.1 --noise 4 --delta 1e-5 --epochs 2",
    "plan": "--records 100 --epsilon 2 --delta 1e-5 --steps 10",
    "tune": "tuned.py:trial --settings settings.toml --epsilon 2 --delta 1e-5 --out tuned",
    "train": "job.py:job --delta 1e-4 --device cpu",
    "report": "run",
    "ledger open": "fresh.hush --epsilon 3 --delta 1e-5",
    "ledger show": "data.hush",
    "ledger check": "data.hush",
    "ledger close": "data.hush first",
    "ledger link": "data.hush {refusal} --reason more",
}
JOB = """
import torch
import hush

def job():
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses_of = hush.per_example(torch.nn.functional.cross_entropy)
    return hush.Job(model=model, data=(x, (x.sum(1) > 0).long()), losses_of=losses_of, optimizer=optimizer,
                    lot_size=6, epochs=1, clip=hush.FlatClip(1.0))
"""
TUNED = """
import hush
from hush.tuning import Trial

def trial(settings):
    lots = hush.PoissonLots(examples=60, lot_size=60)
    plan = hush.Plan(lots=lots, steps=1, clip=hush.FlatClip(1.0), noise_multiplier=1.0)
    return Trial(plan=plan, train=lambda plan, folder: settings["score"])
"""
NOT_NUMBERS = ["", "x", "nan", "-1", "inf", "-inf", "1e400", "0x10", "1,5", "\u202e7"]
NOT_WHOLE = ["", "x", "nan", "-1", "1.5", "1e400", "9" * 5000, "\x1b[31m7", "None"]
NOT_WORDS = ["", "nonsense", "\x1b[2Jpoisson", "\u202edlp", "x" * 3000]
NOT_PATHS = ["", "folder", "garbage", "no/such/place", "x" * 300, "/dev/null", "\udcff", "\x1b[8mname", "garbage/x"]
ANY_TEXT = {"reason"}  # what may say anything
NOT_MADE = {  # of paths that need not exist
    "out": ["", "garbage", "garbage/x", "/dev/null/x", "x" * 300, "/proc/nope/x"],
    "ledger": ["", "folder", "garbage", "no/such/place", "garbage/x", "x" * 300, "dangling"],
    "plot": ["", "folder", "x.xyz", "no/such/x.png", "\x1b[31m"],
    "ledger open": ["", "folder", "garbage", "data.hush", "no/such/place", "garbage/x", "x" * 300, "dangling"],
}


def commands() -> dict[str, Any]:
    """Every command by its name, those of groups too."""

    def walk(command: Any, name: str) -> Iterator[tuple[str, Any]]:
        if hasattr(command, "commands"):
            for child, inner in command.commands.items():
                yield from walk(inner, f"{name} {child}".strip())
        else:
            yield name, command

    return dict(walk(typer.main.get_command(cli.app), ""))


def bad_values(command: str, option: Any) -> list[str]:
    """Values that this parameter may not have."""
    name = str(option.name)
    if getattr(option, "is_flag", False) or name in ANY_TEXT:
        return []
    if option.metavar in ("FILE", "FOLDER"):
        return NOT_MADE.get(command, NOT_MADE.get(name, NOT_PATHS))
    if option.metavar in ("N", "NUMBER"):
        return NOT_WHOLE
    return NOT_NUMBERS if _is_float(option) else NOT_WORDS


def _is_float(option: Any) -> bool:
    """Whether typer makes a float of it; where it keeps that has moved between its versions."""
    if hasattr(option, "type"):
        return bool(option.type.name == "float")
    return "float" in str(option.type_descriptor.annotation)


def mistakes(name: str, command: Any, good: list[str]) -> Iterator[tuple[list[str], str]]:
    """Arguments that must be refused, and a word that the refusal must have in it (none where it could be any)."""
    yield [*good, "--frobnicate"], "--frobnicate"
    yield [*good, "surplus", "more"], ""
    yield ["--json=7", *good], "--json"
    place = 0
    for option in command.params:
        flag = max(option.opts, key=len)
        if option.param_type_name == "argument":
            for value in bad_values(name, option):
                yield [*good[:place], value, *good[place + 1 :]], ""
            yield good[:place], ""
            place += 1
            continue
        if not getattr(option, "is_flag", False):
            yield [*good, flag], flag
        without = _without(good, flag)
        if option.required:
            yield without, flag
        for value in bad_values(name, option):
            yield [*without, f"{flag}={value}"], flag.strip("-").replace("-", " ").split()[0]


def _without(arguments: list[str], flag: str) -> list[str]:
    if flag not in arguments:
        return arguments
    at = arguments.index(flag)
    return [*arguments[:at], *arguments[at + 2 :]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A folder with a run, a ledger with a refusal, a job, and things that are nothing of the kind."""
    place = tmp_path_factory.mktemp("world")
    (place / "job.py").write_text(JOB)
    (place / "tuned.py").write_text(TUNED)
    (place / "settings.toml").write_text("[[settings]]\nscore = 1\n[[settings]]\nscore = 2\n")
    (place / "garbage").write_bytes(bytes(range(256)) * 20)
    (place / "folder").mkdir()
    (place / "dangling").symlink_to(place / "elsewhere" / "gone.hush")
    x, model = torch.randn(60, 3), nn.Linear(3, 2)
    plan = Plan.for_budget(Budget(epsilon=2.0, delta=1e-4), examples=60, lot_size=6, epochs=1, clip=FlatClip(1.0))
    data, losses_of = (x, (x.sum(1) > 0).long()), per_example(nn.functional.cross_entropy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fit(model, data, losses_of, optimizer, plan, run=Run(place / "run", progress=False))
    with Ledger(place / "data.hush", budget=Budget(epsilon=3.0, delta=1e-4)) as ledger:
        slices = {"budget": Budget(epsilon=1.0, delta=1e-5), "units": [(Gaussian(100.0), 3)]}
        ledger.open_account("first", data=torch.zeros(3), **slices)  # type: ignore[arg-type]
        with pytest.raises(DataNotLinked):
            ledger.open_account("second", data=torch.ones(3), **slices)  # type: ignore[arg-type]
        return place, ledger.head().sequence


def contents(place: Path) -> dict[str, object]:
    """Every name below a folder with what it holds."""
    return {
        str(path.relative_to(place)): path.read_bytes() if path.is_file() else path.is_symlink()
        for path in place.rglob("*")
        if "__pycache__" not in path.parts
    }


def arguments(name: str, refusal: int) -> list[str]:
    return GOOD[name].format(refusal=refusal).split()


@pytest.mark.parametrize("name", commands())
def test_every_mistake_is_one_line_with_status_two_and_leaves_nothing(
    name: str, world: tuple[Path, int], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert name in GOOD, f"give tests/commands/test_bad_input.py arguments with which `hush {name}` works"
    place, refusal = world
    monkeypatch.chdir(place)
    before = contents(place)
    tried = 0
    for wrong, word in mistakes(name, commands()[name], arguments(name, refusal)):
        status, out, err = call(capfd, *name.split(), *wrong)
        assert (status, out) == (2, ""), (wrong, status, out, err)
        assert err.startswith("hush: ") and err.endswith("\n") and err[:-1].isprintable(), (wrong, err)
        assert len(err) < 1200 and "Error" not in err and word in err, (wrong, word, err)
        tried += 1
    assert tried >= 10, f"only {tried} mistakes were tried"
    assert contents(place) == before, "something was left behind"


@pytest.mark.parametrize("name", commands())
def test_the_arguments_that_the_mistakes_are_made_from_work(
    name: str, world: tuple[Path, int], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    place, refusal = world
    shutil.copytree(place, tmp_path / "copy", symlinks=True)
    monkeypatch.chdir(tmp_path / "copy")
    status, out, err = call(capfd, *name.split(), *arguments(name, refusal))
    assert status == 0 and out, err
