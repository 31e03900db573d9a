"""How a ledger is written down: text, a line for each entry.

hush-ledger 2
head <sequence> <hash> <checksum>      two lines in turn, written after an entry is durable
head <sequence> <hash> <checksum>
<hash> <body>                          one line an entry, from "created" on, each hash over all that came before
"""

import hashlib
import os
from collections.abc import Iterator

from hush.ledger.chain import Entry, Head

MAGIC = b"hush-ledger 2\n"
HEAD_LENGTH = len(b"head %020d %b %b\n" % (0, b"0" * 64, b"0" * 16))
BEGIN = len(MAGIC) + 2 * HEAD_LENGTH
_PIECE = 1 << 20
_LONGEST_ENTRY = 1 << 26


def lines(descriptor: int, start: int, end: int) -> Iterator[tuple[bytes, bool]]:
    """Lines without their ends, and whether they have one; what has none within the longest entry is no entry."""
    rest, length = [b""], 0
    while start < end and length <= _LONGEST_ENTRY:
        piece = os.pread(descriptor, min(_PIECE, end - start), start)
        if not piece:
            break
        start += len(piece)
        first, *lines = piece.split(b"\n")
        rest.append(first)  # joined once: what is no entry may be long
        length += len(first)
        for line in lines:
            yield b"".join(rest), True
            rest, length = [line], len(line)
    if length:
        yield b"".join(rest), False


def line(entry: Entry) -> bytes:
    return f"{entry.hash} {entry.body}\n".encode("ascii")


def beginning(first: Entry) -> bytes:
    """A file with one entry."""
    return MAGIC + 2 * head_line(first.head) + line(first)


def slot(number: int) -> int:
    return len(MAGIC) + number * HEAD_LENGTH


def head_line(head: Head) -> bytes:
    said = b"head %020d %b " % (head.sequence, head.hash.encode("ascii"))
    return said + hashlib.sha256(said).hexdigest()[:16].encode("ascii") + b"\n"


def parsed_head(line: bytes) -> Head | None:
    """The head in the line; None where a power cut tore it, which can befall one of the two."""
    words = line.split(b" ")
    if len(words) != 4 or not words[1].isdigit():
        return None
    head = Head(int(words[1]), words[2].decode("ascii", "replace"))
    return head if head.hash.isascii() and head_line(head) == line else None
