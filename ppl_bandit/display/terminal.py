"""Text for a terminal: names and cells that others wrote cannot move its cursor, color it or change what was printed before."""

import unicodedata

__all__ = ["printable"]

# Letters of right-to-left scripts are printed; characters that reverse the order of others are not.
_REORDERING = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def printable(text: str) -> str:
    """Return a text with control characters written as escapes; line ends and tabs stay."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(char if _is_harmless(char) else char.encode("unicode_escape").decode() for char in text)


def _is_harmless(char: str) -> bool:
    return char in "\n\t" or (unicodedata.category(char) not in ("Cc", "Cs") and char not in _REORDERING)
