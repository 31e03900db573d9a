"""The durable account of a dataset: reserve before use, settle at checkpoints, never less on record than released."""

from hush.ledger.account import Account, MemoryAccount
from hush.ledger.book import Ledger
from hush.ledger.chain import Head
from hush.ledger.errors import (
    AccountRefused,
    BudgetExhausted,
    DataNotLinked,
    LedgerDamaged,
    LedgerError,
    LedgerMismatch,
    LedgerRolledBack,
    LedgerUnwritable,
)

__all__ = [
    "Account",
    "AccountRefused",
    "BudgetExhausted",
    "DataNotLinked",
    "Head",
    "Ledger",
    "LedgerDamaged",
    "LedgerError",
    "LedgerMismatch",
    "LedgerRolledBack",
    "LedgerUnwritable",
    "MemoryAccount",
]
