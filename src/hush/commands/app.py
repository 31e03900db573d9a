"""The `hush` command: parse, call, print. A user's mistake becomes one line on standard error and exit status 2."""

import os
import re
import sys
import traceback
import warnings
from contextlib import suppress
from typing import Annotated, Any

try:
    import typer
except ModuleNotFoundError:
    print("hush: the command line needs the package typer; pip install 'hush[cli]'", file=sys.stderr)
    raise SystemExit(2) from None

import hush
from hush.commands import accounting, ledger, plan, report, train, tune
from hush.ledger.plain import plain

STOPPED = 130  # as shells say it for Ctrl-C
_SAID_BY_ITS_TEXT = (ValueError, TypeError, RuntimeError)  # what hush and torch refuse with; others need their name

app = typer.Typer(
    name="hush",
    help="Train neural networks with differential privacy, and account for it.",
    no_args_is_help=True,
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", is_eager=True, help="Print the version and leave.")] = False,
) -> None:
    if version:
        print(f"hush {hush.__version__}")
        raise typer.Exit


train.mount(app)
tune.mount(app)
plan.mount(app)
report.mount(app)
accounting.mount(app)
ledger.mount(app)


def main(arguments: list[str] | None = None) -> None:
    """The entry point; never a traceback for what a user can mistype (HUSH_TRACEBACK=1 asks for one)."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError):  # a name that the terminal cannot write is shown as escapes
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)
        warnings.showwarning = _warn  # type: ignore[assignment]
        sys.exit(_run(sys.argv[1:] if arguments is None else arguments))


def _run(arguments: list[str]) -> int:
    command = typer.main.get_command(app)
    try:
        status = command.main(arguments, prog_name="hush", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads has read enough
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # for the flush at the end of the process
        return 1
    except (KeyboardInterrupt, typer.Abort):
        return _complain("stopped", STOPPED)
    except Exception as mistake:
        if os.environ.get("HUSH_TRACEBACK"):
            traceback.print_exception(mistake)
        if type(mistake).__name__ == "NoArgsIsHelpError":  # hush, or hush ledger, and nothing behind it
            print(str(mistake), file=sys.stderr)
            return 2
        return _complain(_words(mistake), STOPPED if isinstance(mistake, train.Stopped) else 2)
    return status if isinstance(status, int) else 0


def _words(mistake: Exception) -> str:
    """What to say of a mistake."""
    # Usage errors of typer's own parser (its base class has moved between versions) know how to say themselves.
    say = getattr(mistake, "format_message", None)
    if say is not None:
        where = getattr(getattr(mistake, "ctx", None), "command_path", "hush")
        return f"{say() or 'no command given'} (see {where} --help)"
    if isinstance(mistake, OSError) and mistake.strerror:
        return f"{mistake.strerror}: {mistake.filename}" if mistake.filename is not None else mistake.strerror
    ours = type(mistake).__module__.split(".")[0] == "hush"
    if str(mistake) and (ours or (isinstance(mistake, _SAID_BY_ITS_TEXT) and not isinstance(mistake, RecursionError))):
        return str(mistake)
    last = traceback.extract_tb(mistake.__traceback__)[-1:]
    place = "".join(f" ({frame.filename}, line {frame.lineno})" for frame in last)
    return f"{type(mistake).__name__}: {mistake}{place}; HUSH_TRACEBACK=1 shows how it came to that"


def _complain(message: str, status: int = 2) -> int:
    print(f"hush: {_line(message)}", file=sys.stderr)
    return status


def _line(message: str) -> str:
    """The message in one line that a terminal can show; of what is endless, the beginning."""
    return plain(re.sub(r"\S{301,}", lambda found: found[0][:300] + "…", " ".join(message.split())), most=2000)


def _warn(message: Any, *_: Any) -> None:
    print(f"hush: warning: {_line(str(message))}", file=sys.stderr)


if __name__ == "__main__":
    main()
