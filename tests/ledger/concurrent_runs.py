"""Eight processes on one ledger: python concurrent_runs.py FOLDER. Run by the tests, which read what it prints.

Each process opens accounts until the cap refuses, reserves units, and writes down what it was granted.
"""

import json
import os
import sys
from pathlib import Path

from hush.accounting import Budget, Gaussian, epsilon
from hush.ledger import BudgetExhausted, Ledger

PROCESSES, ACCOUNTS, UNITS = 8, 30, 40
CAP = Budget(epsilon=3.0, delta=1e-5)
PLAN = {"budget": Budget(epsilon=0.1, delta=1e-7), "units": [(Gaussian(1000.0), UNITS)]}


def run(folder: Path, process: int) -> None:
    granted: dict[str, int] = {}
    with Ledger(folder / "data.hush", budget=CAP) as ledger:  # one of them makes the file
        try:
            for number in range(ACCOUNTS + 1):
                name = f"{process}-{number}"
                account = ledger.open_account(name, **PLAN)
                granted[name] = 0
                for _ in range((process * 7 + number * 5) % UNITS):
                    granted[name] = account.take() + 1
                account.settle()
        except BudgetExhausted:
            (folder / f"granted-{process}").write_text(json.dumps(granted))


def main(folder: Path) -> None:
    epsilon(Gaussian(1000.0) * UNITS, delta=1e-7)  # imported once, for all
    children = []
    for process in range(PROCESSES):
        child = os.fork()
        if child == 0:
            try:
                run(folder, process)
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr)
                os._exit(1)
            os._exit(0)
        children.append(child)
    failed = [child for child in children if os.waitpid(child, 0)[1] != 0]
    sys.exit(len(failed))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
