"""The `hush` command: parse, call, print. A user's mistake becomes one line on standard error and exit status 2."""

import sys

import typer

from hush.commands import accounting, ledger, plan, report, train, tune

app = typer.Typer(
    name="hush",
    help="Train neural networks with differential privacy, and account for it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
train.mount(app)
tune.mount(app)
plan.mount(app)
report.mount(app)
accounting.mount(app)
ledger.mount(app)


def main(arguments: list[str] | None = None) -> None:
    """The entry point; never a traceback for what a user can mistype."""
    sys.exit(_run(sys.argv[1:] if arguments is None else arguments))


def _run(arguments: list[str]) -> int:
    command = typer.main.get_command(app)
    try:
        status = command.main(arguments, prog_name="hush", standalone_mode=False)
    except (ValueError, OSError) as mistake:
        return _complain(str(mistake))
    except typer.Abort:
        return _complain("stopped")
    except Exception as mistake:
        # Usage errors of typer's own parser (its base class has moved between versions) know how to say themselves.
        say = getattr(mistake, "format_message", None)
        if say is None:
            raise
        where = getattr(getattr(mistake, "ctx", None), "command_path", "hush")
        return _complain(f"{say() or 'no command given'} (see {where} --help)")
    return status if isinstance(status, int) else 0


def _complain(message: str) -> int:
    print("hush: " + " ".join(message.split()), file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
