"""The accounting commands: the numbers, the JSON, and one line with exit status 2 for every mistake."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hush.accounting import Allocated, Gaussian, Shuffled
from hush.commands.accounting import run_event, steps_in
from hush.commands.app import main

GOLDEN = "--rate 0.01 --noise 4 --steps 10000 --delta 1e-5"


def hush(capsys: pytest.CaptureFixture[str], line: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    printed = capsys.readouterr()
    return int(ended.value.code or 0), printed.out, printed.err


def answer(capsys: pytest.CaptureFixture[str], line: str) -> dict[str, object]:
    status, out, err = hush(capsys, line + " --json")
    assert (status, err) == (0, "")
    assert out.count("\n") == 1
    values = json.loads(out)
    assert isinstance(values, dict)
    return values


@pytest.mark.parametrize(
    ("accountant", "low", "high", "valid"),
    [
        ("pld", 0.9463, 0.9473, True),
        ("renyi", 1.0350, 1.0355, True),
        ("moments", 1.25855, 1.25865, True),
        ("strong", 26.15, 26.25, True),
        ("strong-paper", 9.335, 9.345, False),
    ],
)
def test_epsilon(capsys: pytest.CaptureFixture[str], accountant: str, low: float, high: float, valid: bool) -> None:
    values = answer(capsys, f"epsilon {GOLDEN} --accountant {accountant}")
    assert low <= values.pop("epsilon") <= high  # type: ignore[operator]
    assert 0 <= values.pop("lower") <= high  # type: ignore[operator]
    assert values == {"accountant": accountant, "sampling": "poisson", "valid": valid}


@pytest.mark.parametrize("accountant", ["pld", "renyi", "moments", "strong"])
def test_delta_is_the_other_question(capsys: pytest.CaptureFixture[str], accountant: str) -> None:
    spent = answer(capsys, f"epsilon {GOLDEN} --accountant {accountant}")["epsilon"]
    run = f"--rate 0.01 --noise 4 --steps 10000 --epsilon {spent} --accountant {accountant}"
    values = answer(capsys, f"delta {run}")
    assert values.pop("delta") == pytest.approx(1e-5, rel=6e-3)
    assert 0 <= values.pop("lower") <= 1.001e-5  # type: ignore[operator]
    assert values == {"accountant": accountant, "sampling": "poisson", "valid": True}
    printed = hush(capsys, f"delta {run}")[1]
    stated = float(printed.split(") at epsilon ")[1].removesuffix(f" ({accountant}, poisson)\n"))
    assert spent <= stated <= spent * (1 + 1e-5), "true of what is printed: epsilon is never rounded down"  # type: ignore[operator]


def test_epsilon_says_in_words_when_it_is_no_bound(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = hush(capsys, f"epsilon {GOLDEN} --accountant strong-paper")
    assert "NOT a valid bound" in out
    _, out, _ = hush(capsys, f"epsilon {GOLDEN} --accountant moments")
    assert "NOT" not in out and "1.259" in out


def test_sampling_by_epochs(capsys: pytest.CaptureFixture[str]) -> None:
    costs = {
        sampling: answer(capsys, f"epsilon {GOLDEN} --accountant renyi --sampling {sampling}")["epsilon"]
        for sampling in ("poisson", "allocated", "shuffled")
    }
    assert costs["shuffled"] > 10 * costs["poisson"]  # type: ignore[operator]
    assert costs["allocated"] < 2 * costs["poisson"]  # type: ignore[operator]


def test_a_begun_epoch_is_charged_whole() -> None:
    for steps, epochs in [(0, 0), (1, 1), (100, 1), (101, 2), (10_000, 100)]:
        assert (
            run_event(rate=0.01, noise=4.0, steps=steps, sampling="shuffled") == Shuffled(100, Gaussian(4.0)) * epochs
        )
        assert (
            run_event(rate=0.01, noise=4.0, steps=steps, sampling="allocated") == Allocated(100, Gaussian(4.0)) * epochs
        )


def test_hazard_18_no_lot_is_lost_between_epochs_and_rate() -> None:
    for lots in range(1, 10_001):
        assert steps_in(1, 1 / lots) == lots
        assert steps_in(7, 1 / lots) == 7 * lots
    assert steps_in(1, 0.3) == 4  # a begun lot counts


def test_noise_keeps_the_budget(capsys: pytest.CaptureFixture[str]) -> None:
    values = answer(capsys, "noise --epsilon 2 --delta 1e-5 --rate 0.01 --steps 10000 --accountant renyi")
    again = answer(
        capsys,
        f"epsilon --rate 0.01 --noise {values['noise_multiplier']} --steps 10000 --delta 1e-5 --accountant renyi",
    )
    assert 1.999 < again["epsilon"] == values["epsilon"] <= 2  # type: ignore[operator]


@pytest.mark.parametrize("sampling", ["poisson", "allocated", "shuffled"])
def test_steps_are_the_last_that_fit(capsys: pytest.CaptureFixture[str], sampling: str) -> None:
    rest = f"--delta 1e-5 --rate 0.05 --noise 8 --accountant renyi --sampling {sampling}"
    values = answer(capsys, f"steps --epsilon 3 {rest}")
    assert values["epsilon"] <= 3  # type: ignore[operator]
    assert answer(capsys, f"epsilon --steps {values['steps']} {rest}")["epsilon"] == values["epsilon"]
    assert answer(capsys, f"epsilon --steps {values['steps'] + 1} {rest}")["epsilon"] > 3  # type: ignore[operator]


def test_a_search_that_takes_long_gives_renyis_answer_and_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rest = "--epsilon 2 --delta 1e-5 --rate 0.01 --steps 10000"
    quick = answer(capsys, f"noise {rest} --accountant renyi")
    monkeypatch.setattr("hush.commands.accounting._PATIENCE", -1.0)
    status, out, err = hush(capsys, f"noise {rest} --json")
    assert status == 0 and json.loads(out) == quick
    assert err == "hush: warning: a search by pld takes too long: this is Renyi's answer\n"


def test_compare_draws_the_papers_figure(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "compare.png"
    values = answer(capsys, f"compare --rate 0.01 --noise 4 --epochs 400 --delta 1e-5 --plot {picture}")
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    epochs, curves = values["epochs"], values["epsilon"]
    assert epochs[-1] == 400 and 100 in epochs  # type: ignore[index, operator]
    last = {name: curve[-1] for name, curve in curves.items()}  # type: ignore[attr-defined]
    assert last["pld"] < last["renyi"] < last["moments"] < last["strong-paper"] < last["strong"]
    assert round(last["moments"], 4) == 2.5759 and round(last["strong-paper"], 2) == 24.22
    at_100 = epochs.index(100)  # type: ignore[attr-defined]
    assert round(curves["moments"][at_100], 4) == 1.2586  # type: ignore[index]
    assert values["valid"] == {name: name != "strong-paper" for name in last}


MISTAKES = {
    "epsilon --rate 1.5 --noise 4 --steps 10 --delta 1e-5": "rate must lie in [0, 1]",
    "epsilon --rate -0.1 --noise 4 --steps 10 --delta 1e-5": "rate must lie in [0, 1]",
    "epsilon --rate nan --noise 4 --steps 10 --delta 1e-5": "rate must lie in [0, 1]",
    "epsilon --rate 0.1 --noise 0 --steps 10 --delta 1e-5": "noise must lie in [0.05, 1e+06]",
    "epsilon --rate 0.1 --noise -2 --steps 10 --delta 1e-5": "noise must lie in",
    "epsilon --rate 0.1 --noise inf --steps 10 --delta 1e-5": "noise must lie in",
    "epsilon --rate 0.1 --noise 4 --steps 10 --delta 0": "delta must lie in (0, 1)",
    "epsilon --rate 0.1 --noise 4 --steps 10 --delta 1": "delta must lie in (0, 1)",
    "epsilon --rate 0.1 --noise 4 --steps -1 --delta 1e-5": "steps must lie in [0, 1e+12], got -1",
    "epsilon --rate 0.1 --noise 4 --steps 10.5 --delta 1e-5": "--steps",
    "epsilon --rate lots --noise 4 --steps 10 --delta 1e-5": "--rate",
    "epsilon --rate 0.1 --noise loud --steps 10 --delta 1e-5": "--noise",
    "epsilon --rate 0.1 --noise 4 --steps 10 --delta small": "--delta",
    "epsilon --rate 0.1 --noise 4 --steps 10": "--delta",
    "epsilon --rate 0.1 --noise 4 --steps 10 --delta 1e-5 --accountant gdp": "accountant must be one of pld",
    "epsilon --rate 0.1 --noise 4 --steps 10 --delta 1e-5 --sampling weighted": "sampling must be poisson",
    "epsilon --rate 0.013 --noise 4 --steps 10 --delta 1e-5 --sampling shuffled": "whole number of lots",
    "epsilon --rate 0 --noise 4 --steps 10 --delta 1e-5 --sampling allocated": "whole number of lots",
    "epsilon --rate 0.1 --noise 1e-200 --steps 10 --delta 1e-5": "noise must lie in [0.05, 1e+06]",
    "epsilon --rate 0.1 --noise 1e200 --steps 10 --delta 1e-5": "noise must lie in [0.05, 1e+06]",
    "epsilon --rate 0.1 --noise 1e-4 --steps 10 --delta 1e-5": "noise must lie in [0.05, 1e+06]",
    "epsilon --rate 0.1 --noise 4 --steps 1000000000001 --delta 1e-5": "steps must lie in [0, 1e+12]",
    "epsilon --rate 0.1 --noise 4 --steps 1e400 --delta 1e-5": "--steps",
    "delta --rate 0.1 --noise 4 --steps 10 --epsilon -1": "epsilon must lie in [0, 1000]",
    "delta --rate 0.1 --noise 4 --steps 10 --epsilon inf": "epsilon must lie in [0, 1000]",
    "delta --rate 0.1 --noise 4 --steps 10 --epsilon 1 --accountant strong-paper": "no delta from strong-paper",
    "delta --rate 0.1 --noise 4 --steps 10": "--epsilon",
    "noise --epsilon 0 --delta 1e-5 --rate 0.1 --steps 10": "epsilon must be a positive number",
    "noise --epsilon 2 --delta 1e-5 --rate 0.1 --steps 10 --accountant strong-paper": "not a valid bound",
    "steps --epsilon 2 --delta 2 --rate 0.1 --noise 4": "delta must lie in (0, 1)",
    "compare --rate 5e-324 --noise 4 --delta 1e-5": "rate must be 0 or at least 1e-06",
    "epsilon --rate 0.5 --noise 0.01 --steps 100000 --delta 1e-5": "noise must lie in",
    "epsilon --rate 0.5 --noise 0.1 --steps 100000 --delta 1e-5": "came one that costs about epsilon 2.47e+06",
    "epsilon --rate 0.01 --noise 1e-200 --steps 10 --delta 1e-5": "noise must lie in",
    "epsilon --rate 0.01 --noise 1e200 --steps 10 --delta 1e-5": "noise must lie in",
    "epsilon --rate 0.01 --noise 4 --steps 1e400 --delta 1e-5": "not a whole number",
    "epsilon --rate 0.01 --noise 4 --steps 1e18 --delta 1e-5": "steps must lie in",
    "epsilon --rate 1e-6 --noise 1 --steps 100000000 --delta 1e-5 --sampling allocated": "at least 1e-05 for allocated",
    "compare --rate 1e-9 --noise 4 --delta 1e-5 --epochs 1000000": "rate must be 0 or at least 1e-06",
    "epsilon --rate 0.3 --noise 0.06 --steps 1e9 --delta 1e-200": "costs about epsilon",
    "compare --rate 0 --noise 4 --delta 1e-5": "rate must lie in (0, 1]",
    "compare --rate 0.1 --noise 4 --delta 1e-5 --epochs 0": "epochs must lie in [1, 1e+06]",
    "compare --rate 0.5 --noise 4 --delta 1e-5 --epochs 1 --plot /no/such/folder/x.png": "/no/such/folder",
    "compare --rate 0.5 --noise 4 --delta 1e-5 --epochs 1 --plot picture.xyz": "xyz",
    "frobnicate": "frobnicate",
    "epsilon --colour red": "--colour",
}


@pytest.mark.parametrize(("line", "expected"), MISTAKES.items())
def test_a_mistake_is_one_line_and_status_two(capsys: pytest.CaptureFixture[str], line: str, expected: str) -> None:
    status, out, err = hush(capsys, line)
    assert (status, out) == (2, "")
    assert expected in err
    assert err.startswith("hush: ") and err.count("\n") == 1


def test_help_shows_an_example_that_runs(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("epsilon", "noise", "steps", "compare"):
        status, out, _ = hush(capsys, f"{command} --help")
        assert status == 0 and f"hush {command} --" in out


def test_the_installed_command_starts_without_torch_and_leaves_no_traceback() -> None:
    """As a user runs it: a process of its own."""
    program = (
        "import sys; from hush.commands.app import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: print('torch' in sys.modules, file=sys.stderr)"
    )

    def run(line: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-W", "error", "-c", program, *line.split()]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    done = run(f"epsilon {GOLDEN} --accountant moments --json")
    assert (done.returncode, done.stderr) == (0, "False\n")
    assert round(json.loads(done.stdout)["epsilon"], 4) == 1.2586
    done = run("epsilon --rate x --noise 4 --steps 1 --delta 1e-5")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 2 and "Traceback" not in done.stderr
