"""What a ledger says when it refuses: what was expected, what came, what to do."""


class LedgerError(Exception):
    """The ledger refused; nothing was charged that is not in the file, and nothing may be released."""

    def __init__(self, expected: str, came: str, do: str) -> None:
        expected, came, do = printable(expected), printable(came), printable(do)
        super().__init__(f"expected {expected}; came {came}; {do}")
        self.expected, self.came, self.do = expected, came, do


class BudgetExhausted(LedgerError):
    """The account has no units left, or a new account would pass the cap of the ledger."""


class LedgerMissing(LedgerError):
    """There is no file, and nobody asked for a new ledger."""


class LedgerDamaged(LedgerError):
    """The file was edited, cut short or corrupted, or is no ledger at all."""


class LedgerRolledBack(LedgerDamaged):
    """The file is older than something that was seen of it before."""


class LedgerUnwritable(LedgerError):
    """The disk is full, the file is read-only or removed, or another process holds the lock for too long."""


class LedgerMismatch(LedgerError):
    """The rule, the cap or the plan asked for is not the one that the file has fixed."""


class DataNotLinked(LedgerError):
    """The data is not the data of this ledger, and nobody has linked it."""


class AccountRefused(LedgerError):
    """No such account, a name already taken, an account closed or taken over by another process."""


def printable(text: str) -> str:
    """The text with control, formatting and unassigned characters escaped: a path or a name never steers a terminal.

    >>> print(printable("red \\x1b[31m, turned \\u202e, two" + chr(10) + "lines"))
    red \\x1b[31m, turned \\u202e, two\\nlines
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)
