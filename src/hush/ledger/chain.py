"""A chain of entries: each hash covers the entry and the hash before it; no entry can be changed or taken out alone."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hush.ledger.errors import LedgerDamaged

BEGINNING = "0" * 64


@dataclass(frozen=True)
class Head:
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
        if type(sequence) is not int or sequence < 0 or not isinstance(digest, str) or len(digest) != 64:
            raise LedgerDamaged("a head with a sequence and a hash", repr(dict(values)), "use an intact checkpoint")
        return Head(sequence, digest)


EMPTY = Head(0, BEGINNING)


@dataclass(frozen=True)
class Entry:
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
    """The entry that records the fact after the given head."""
    body = json.dumps(fact, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return Entry(after.sequence + 1, body, _hash(after, body))


def check(entry: Entry, *, after: Head) -> None:
    """Refuse an entry that does not follow from the head before it."""
    follows = entry.sequence == after.sequence + 1 and isinstance(entry.body, str) and isinstance(entry.hash, str)
    if not follows or entry.hash != _hash(after, entry.body):
        raise LedgerDamaged(
            f"entry {after.sequence + 1} to continue the chain of hashes",
            "an entry that was changed, moved or put in",
            "restore the file from a copy; do not train on this data until its balance is known",
        )


def _hash(after: Head, body: str) -> str:
    text = f"{after.hash}\n{after.sequence + 1}\n{body}"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
