"""Values as text: for a terminal, a spreadsheet, a report, and as plain values for JSON."""

import math
import sys
import time
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
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


def safe_cell(value: Any) -> Any:
    """Return a text that a spreadsheet would run as a formula with an apostrophe before it; anything else unchanged."""
    return f"'{value}" if isinstance(value, str) and _is_formula(value) else value


def original_cell(text: str) -> str:
    """Undo `safe_cell`."""
    return text[1:] if text.startswith("'") and _is_formula(text[1:]) else text


def safe_frame(frame: Any) -> Any:
    """Return a DataFrame whose cells, index and column names are `safe_cell`s."""
    return frame.map(safe_cell).rename(index=safe_cell, columns=safe_cell)


def _is_formula(text: str) -> bool:
    # Spreadsheets skip blanks, and take full-width signs for signs.
    return text[:1] in ("\t", "\r", "\n") or unicodedata.normalize("NFKC", text).strip()[:1] in ("=", "+", "-", "@")


def to_plain(value: Any) -> Any:
    """Return NamedTuples as dicts and arrays as lists, with None for nan and infinities, which JSON does not have."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(name): to_plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows)]
    return "\n".join(lines)


_SECONDS_BETWEEN_LINES = {True: 2.0, False: 20.0}  # on a terminal, and elsewhere


def progress_reporter(
    name: str, total: int, unit: str, more: str = "", seconds: Sequence[float] | None = None
) -> Callable[[int], None]:
    """Return a function of the number of units that have finished since its last call; it writes what is done and left.

    Args:
        name: of the computation.
        total: number of units.
        unit: in the plural.
        more: what follows the time that is left.
        seconds: that the units are likely to take, one after another, which a line says at once; later lines scale them with
            the time so far. None if the units take equally long.
    """
    name = printable(name)
    each = [1.0] * total if seconds is None else list(seconds)
    done, begun, last = 0, time.monotonic(), -math.inf
    if seconds is not None:
        sys.stderr.write(f"{name}: about {sum(each):.0f} s{more}\n")

    def advance(num: int) -> None:
        nonlocal done, last
        done, now = min(done + num, total), time.monotonic()
        if now - last > _SECONDS_BETWEEN_LINES[sys.stderr.isatty()] or done == total:
            last, left = now, (now - begun) * sum(each[done:]) / sum(each[:done])
            sys.stderr.write(f"{name}: {done} of {total} {unit}, about {left:.0f} s left{more}\n")

    return advance
