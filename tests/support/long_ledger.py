"""Ledgers with many entries, written at once as years of charges would leave them."""

from pathlib import Path

from hush.accounting import Budget, Gaussian
from hush.accounting.events import to_dict
from hush.ledger import Ledger, chain, file_format

OWNER, AT = "0" * 32, "2026-01-01T00:00:00+00:00"


def write_long_ledger(path: Path, *, accounts: int, entries: int, alike: bool = True) -> None:
    """A ledger with that many accounts, and with reservations up to that many entries."""
    with Ledger(path, create=True) as ledger:
        head = ledger.head()
    facts = [_opened(i, alike) for i in range(accounts)]
    units = entries // max(1, accounts) + 1
    facts += [
        {"kind": "reserved", "account": f"run {i % accounts}", "units": min(units, 1 + i // accounts), "at": AT}
        for i in range(entries - accounts - 1)
    ]
    with open(path, "r+b") as file:
        file.seek(0, 2)
        for fact in facts:
            entry = chain.write(fact, after=head)
            head = entry.head
            file.write(file_format.line(entry))
        file.seek(file_format.slot(0))
        file.write(2 * file_format.head_line(head))


def _opened(number: int, alike: bool) -> dict[str, object]:
    noise = 1000.0 if alike else 1000.0 + number
    return {
        "kind": "opened",
        "account": f"run {number}",
        "at": AT,
        "budget": {"epsilon": 0.001 * (1 + number % 7), "delta": 1e-9},
        "upfront": to_dict(Gaussian(noise) * 0),
        "units": [[to_dict(Gaussian(noise)), 10**6]],
        "costs": [],
        "distance": 0.0,
        "data": None,
        "owner": OWNER,
    }


BUDGET = Budget(epsilon=0.001, delta=1e-9)
