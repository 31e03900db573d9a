"""A chain of entries: each hash covers the entry and the hash before it; no entry can be changed or taken out alone."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from hush.ledger.errors import LedgerDamaged

BEGINNING = "0" * 64


class Head(NamedTuple):
    """The last entry somebody has seen: its number and its hash. Checkpoints and reports carry it as a witness."""

    sequence: int
    hash: str

    def to_dict(self) -> dict[str, Any]:
        return {"sequence": self.sequence, "hash": self.hash}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> "Head":
        """The head that `to_dict` wrote; anything else is refused.

        >>> Head.from_dict(Head(0, BEGINNING).to_dict()) == Head(0, BEGINNING)
        True
        """
        sequence, digest = values.get("sequence"), values.get("hash")
        if type(sequence) is not int or sequence < 0 or not is_digest(digest):
            raise LedgerDamaged(
                "a head with a sequence and a hash", repr(dict(values))[:200], "use an intact checkpoint"
            )
        return Head(sequence, str(digest))


EMPTY = Head(0, BEGINNING)


class Entry(NamedTuple):
    """One fact, at its place in the chain; `body` is the exact text that was hashed."""

    sequence: int
    body: str
    hash: str

    @property
    def head(self) -> Head:
        return Head(self.sequence, self.hash)

    @property
    def fact(self) -> dict[str, Any]:
        return json.loads(self.body)


def write(fact: Mapping[str, Any], *, after: Head) -> Entry:
    """The entry that records the fact after the given head; its body is ASCII and one line."""
    body = json.dumps(fact, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return Entry(after.sequence + 1, body, digest(after, body.encode("ascii")))


def digest(after: Head, body: bytes) -> str:
    """The hash of the entry with this body after the given head."""
    text = b"%b\n%d\n%b" % (after.hash.encode("ascii"), after.sequence + 1, body)
    return hashlib.sha256(text).hexdigest()


def is_digest(value: Any) -> bool:
    """Whether the value is a hash in the form in which it is written."""
    return isinstance(value, str) and len(value) == 64 and not value.strip("0123456789abcdef")
