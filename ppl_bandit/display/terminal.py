"""Text to print: names and cells that others wrote cannot move a cursor, color a terminal or reorder what is read."""

import unicodedata
from typing import Any

# Letters of right-to-left scripts are printed; characters that reverse the order of others are not.
_REORDERING = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def printable(text: str) -> str:
    """Return a text with control characters written as escapes; line ends and tabs stay."""
    if all(map(_is_harmless, text)):
        return text
    return "".join(char if _is_harmless(char) else char.encode("unicode_escape").decode() for char in text)


def shown_name(name: Any) -> Any:
    """Return a name for one line of a text, or for a cell: line ends are escaped too; a number is returned as it is."""
    return printable(name).replace("\n", "\\n").replace("\t", "\\t") if isinstance(name, str) else name


def _is_harmless(char: str) -> bool:
    return char in "\n\t" or (unicodedata.category(char) not in ("Cc", "Cs") and char not in _REORDERING)
