"""Text that others wrote, made safe to print: names and labels come from files and users, and go to terminals."""

import unicodedata

_MOST = 200  # characters of a name in a message


def plain(text: object, *, most: int | None = None) -> str:
    r"""The text with everything that moves a cursor, hides, reorders or cannot be written shown as an escape.

    Control and format characters (among them ESC, newline and the bidirectional marks), surrogates, characters that
    Unicode has not assigned, and line and paragraph separators. Markup is the printer's matter: HTML is escaped where
    HTML is made, and nothing is handed to a terminal as markup.

    >>> print(plain("spent\x1b[8m\n\u202eno"))
    spent\x1b[8m\n\u202eno
    """
    shown = "".join(_shown(character) for character in str(text))
    return shown if most is None or len(shown) <= most else shown[: most - 1] + "…"


def short(text: object) -> str:
    """The same, no longer than a message can bear."""
    return plain(text, most=_MOST)


def _shown(character: str) -> str:
    if unicodedata.category(character)[0] != "C" and character not in "\u2028\u2029":
        return character
    return character.encode("unicode_escape").decode("ascii")
