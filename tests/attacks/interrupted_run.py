"""A run that is interrupted (Ctrl-C) at any instruction, again and again: python interrupted_run.py LEDGER SECONDS.

Run by the tests, which read what it prints: the units that it was given, and how often it was interrupted.
"""

import json
import random
import signal
import sys
import time
from types import FrameType

from hush.accounting import Budget, Gaussian, epsilon
from hush.ledger import Account, BudgetExhausted, Ledger, LedgerError

PLAN = {"budget": Budget(epsilon=1.0, delta=1e-6), "units": [(Gaussian(1000.0), 20_000)]}


def main(path: str, seconds: float) -> None:
    chance, got, interrupts = random.Random(0), [], 0
    epsilon(Gaussian(1000.0) * 20_000, delta=1e-6)
    ledger = Ledger(path, create=True)
    account = ledger.open_account("run", **PLAN)  # type: ignore[arg-type]

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-5, 8e-3))
            one_of(account, chance, got)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            interrupts += 1
        except BudgetExhausted:
            break
        except LedgerError:  # an object that was interrupted in the middle of reading may be of no use any more
            signal.setitimer(signal.ITIMER_REAL, 0)
            ledger = Ledger(path)
            account = ledger.resume_account("run")
    signal.setitimer(signal.ITIMER_REAL, 0)
    print(json.dumps({"units": got, "interrupts": interrupts}))


def one_of(account: Account, chance: random.Random, got: list[int]) -> None:
    for _ in range(chance.randrange(1, 12)):
        got.append(account.take())  # an interrupt in here loses the unit to the private side
    if chance.random() < 0.5:
        account.settle()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
