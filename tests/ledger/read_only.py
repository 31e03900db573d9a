"""A ledger that may not be written, seen by an ordinary user: python read_only.py file|folder. Run by the tests."""

import os
import sys
import tempfile
from pathlib import Path

from hush.accounting import Budget, Gaussian, epsilon
from hush.ledger import Ledger, LedgerUnwritable

ORDINARY = 65534
PLAN = {"budget": Budget(epsilon=1.0, delta=1e-6), "units": [(Gaussian(100.0), 10)]}


def main() -> None:
    epsilon(Gaussian(100.0), delta=1e-6)  # everything is imported before the rights are dropped
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        Ledger(folder / "data.hush", create=True).close()
        if os.getuid() == 0:
            for path in (folder, *folder.iterdir()):
                os.chown(path, ORDINARY, ORDINARY)
        process = os.fork()
        if process == 0:
            os._exit(as_ordinary_user(folder))
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0, "granted"
        with Ledger(folder / "data.hush") as ledger:
            assert not ledger.accounts()
    print("nothing granted")


def as_ordinary_user(folder: Path) -> int:
    if os.getuid() == 0:
        os.setgid(ORDINARY)
        os.setuid(ORDINARY)
    try:
        if sys.argv[1] == "file":
            (folder / "data.hush").chmod(0o400)
        else:
            folder.chmod(0o500)
        with Ledger(folder / "data.hush") as ledger:
            ledger.open_account("run", **PLAN).take()
    except LedgerUnwritable as error:
        print(error, file=sys.stderr)
        return 0
    except BaseException as error:
        print(f"not said clearly: {type(error).__name__}: {error}", file=sys.stderr)
    finally:
        folder.chmod(0o700)
        (folder / "data.hush").chmod(0o600)
    return 1


if __name__ == "__main__":
    main()
