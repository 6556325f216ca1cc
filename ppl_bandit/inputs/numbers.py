"""Is it a number? What callers hand over as numbers, turned away where NumPy would guess."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import numpy as np

__all__ = ["as_numbers", "check_count", "seconds"]

_KINDS = {
    "c": "complex numbers",
    "U": "text",
    "S": "bytes",
    "M": "dates",
    "m": "spans of time",
    "O": "objects",
    "V": "records",
    "T": "text",
}
_EXACT = 2**53  # beyond it, float64 skips whole numbers


def as_numbers(value: Any, argument: str) -> np.ndarray:
    """Return an array of real numbers, of whatever shape and kind they came in.

    Raises:
        ValueError: for masked entries, complex numbers, text, bytes, dates, sets, dictionaries, and whole numbers that a
            float64 cannot tell from their neighbours.
    """
    if isinstance(value, set | frozenset | Mapping) or hasattr(value, "keys"):
        raise ValueError(
            f"{argument} must be numbers in an order, got a {type(value).__name__}; pass a list or an array"
        )
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        row = tuple(int(i) for i in np.argwhere(np.ma.getmaskarray(value))[0])
        raise ValueError(
            f"{argument} is a masked array with {int(np.ma.count_masked(value))} masked entries, the first at {row}; leave out "
            "the rows that are not known, or fill them in"
        )
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):
        raise ValueError(f"{argument} must be a number, got {_short(value)}") from None
    if array.dtype == object and array.size and all(isinstance(v, int) for v in array.ravel()):
        raise ValueError(
            f"{argument} holds {max(array.ravel(), key=abs)}: counts beyond 2**53 are not exact; use larger units"
        )
    if array.dtype.kind in _KINDS:
        raise ValueError(
            f"{argument} must be a number, got {_short(value)}: {_KINDS[array.dtype.kind]}; convert it first"
        )
    if array.dtype.kind in "iu" and array.size and (array.max() > _EXACT or array.min() < -_EXACT):
        worst = array.max() if array.max() > _EXACT else array.min()
        raise ValueError(f"{argument} holds {worst}: counts beyond 2**53 are not exact; use larger units")
    return array


def check_count(value: Any, argument: str, least: int = 1) -> int:
    """Return a count.

    Raises:
        ValueError: for anything but a whole number of at least `least`.
    """
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer) or value < least:
        kind = "a positive integer" if least == 1 else f"an integer of at least {least}"
        raise ValueError(f"{argument} must be {kind}, got {value!r}")
    return int(value)


def seconds(span: Any, argument: str) -> float:
    """Return a span of time in seconds, given so or as a timedelta.

    Raises:
        ValueError: for anything else, and for a negative span.
    """
    given = span.total_seconds() if isinstance(span, timedelta) else span
    if isinstance(given, bool) or not isinstance(given, int | float | np.number) or not 0 <= float(given) < np.inf:
        raise ValueError(f"{argument} must be seconds, or a datetime.timedelta, of at least 0, got {span!r}")
    return float(given)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
