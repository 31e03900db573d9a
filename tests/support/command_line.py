"""The command line as a person types it."""

import pytest

from hush.commands import app as cli


def call(capfd: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main([str(argument) for argument in arguments])
    out, err = capfd.readouterr()
    return int(ended.value.code or 0), out, err
