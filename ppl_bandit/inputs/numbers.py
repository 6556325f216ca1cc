"""Check numbers, flags and texts that callers pass, where NumPy or Python would guess."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import numpy as np

_KINDS = {
    "c": "complex numbers",
    "U": "text",
    "S": "bytes",
    "M": "dates",
    "m": "time spans",
    "O": "objects",
    "V": "records",
    "T": "text",
}
_MAX_EXACT = 2**53  # float64 cannot represent every integer beyond it


def as_numbers(value: Any, argument: str) -> np.ndarray:
    """Return an array of real numbers, with its shape and dtype unchanged.

    Raises:
        ValueError: for masked entries, complex numbers, text, bytes, dates, sets, dictionaries, and integers beyond 2**53.
    """
    if isinstance(value, set | frozenset | Mapping) or hasattr(value, "keys"):
        raise ValueError(
            f"{argument} must be a sequence of numbers, got a {type(value).__name__}; pass a list or an array"
        )
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        row = tuple(int(i) for i in np.argwhere(np.ma.getmaskarray(value))[0])
        raise ValueError(
            f"{argument} is a masked array with {int(np.ma.count_masked(value))} masked entries, the first at {row}; remove "
            "the rows that are not known, or fill them in"
        )
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):
        raise ValueError(f"{argument} must be a number, got {_shorten(value)}") from None
    largest = None
    if array.dtype == object and array.size and all(isinstance(v, int) for v in array.ravel()):
        largest = max(array.ravel(), key=abs)
    elif array.dtype.kind in _KINDS:
        raise ValueError(
            f"{argument} must be a number, got {_shorten(value)}: {_KINDS[array.dtype.kind]}; convert it first"
        )
    elif array.dtype.kind in "iu" and array.size and (array.max() > _MAX_EXACT or array.min() < -_MAX_EXACT):
        largest = array.max() if array.max() > _MAX_EXACT else array.min()
    if largest is not None:
        raise ValueError(f"{argument} holds {_shorten(largest)}: counts beyond 2**53 are not exact; use larger units")
    return array


def as_plain_numbers(value: Any, argument: str) -> np.ndarray:
    """Return an array of float64, for settings: flags are refused too.

    Raises:
        ValueError: as `as_numbers`, and for booleans.
    """
    array = as_numbers(value, argument)
    if array.dtype == bool or (isinstance(value, list | tuple) and any(isinstance(each, bool) for each in value)):
        raise ValueError(
            f"{argument} must be a number, got {_shorten(value)}: booleans; give 0 or 1 where you mean numbers"
        )
    return array.astype(float)


def check_count(value: Any, argument: str, least: int = 1) -> int:
    """Return a count as an int.

    Raises:
        ValueError: for anything but an integer of at least `least`.
    """
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool | np.bool_)
    if is_integer and value >= 2**63:
        raise ValueError(f"{argument} must be an integer below 2**63, got {_shorten(value)}")
    if not is_integer or value < least:
        kind = "a positive integer" if least == 1 else f"an integer of at least {least}"
        raise ValueError(f"{argument} must be {kind}, got {value!r}")
    return int(value)


def check_text(value: Any, argument: str) -> str:
    """Return a name.

    Raises:
        ValueError: for anything but a text that is not empty and can be written in UTF-8.
    """
    if not isinstance(value, str) or not value:
        raise ValueError(f"{argument} must be a text that is not empty, got {value!r}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{argument} holds half of a surrogate pair, which is not valid text, got {value!r}") from None
    return value


def as_seconds(span: Any, argument: str) -> float:
    """Return a time span in seconds; it may be given as a timedelta.

    Raises:
        ValueError: for anything else, and for a negative span.
    """
    given = span.total_seconds() if isinstance(span, timedelta) else span
    if isinstance(given, bool) or not isinstance(given, int | float | np.number) or not 0 <= given < _MAX_EXACT:
        raise ValueError(
            f"{argument} must be seconds, or a datetime.timedelta, of at least 0 and below 2**53, got {_shorten(span)}"
        )
    return float(given)


def _shorten(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > 10_000:  # Python refuses to write it
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
