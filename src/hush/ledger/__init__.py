"""The durable account of a dataset: reserve before use, settle at checkpoints, never less on record than released."""

from hush.ledger.account import Account, MemoryAccount
from hush.ledger.balances import AccountRecord
from hush.ledger.chain import Head
from hush.ledger.errors import (
    AccountRefused,
    BudgetExhausted,
    DataNotLinked,
    LedgerDamaged,
    LedgerError,
    LedgerMismatch,
    LedgerMissing,
    LedgerRolledBack,
    LedgerUnwritable,
)
from hush.ledger.ledger import Ledger

__all__ = [
    "Account",
    "AccountRecord",
    "AccountRefused",
    "BudgetExhausted",
    "DataNotLinked",
    "Head",
    "Ledger",
    "LedgerDamaged",
    "LedgerError",
    "LedgerMismatch",
    "LedgerMissing",
    "LedgerRolledBack",
    "LedgerUnwritable",
    "MemoryAccount",
]
