"""Cells of CSV files that no spreadsheet takes for a formula."""

import unicodedata
from typing import Any


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
