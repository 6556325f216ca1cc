"""Check numbers, flags and texts that callers pass, where NumPy or Python would guess."""

import functools
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np

from ppl_bandit.types import UnknownArm

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


class Arms:
    """The arms by name, or by number if they have no names."""

    def __init__(self, num_arms: int | None, names: Sequence[Any] | None):
        if names is None:
            if num_arms is None:
                raise ValueError("give num_arms=, or arms= with a name for each arm")
            self.names: list[Any] = list(range(check_count(num_arms, "num_arms")))
            return
        if isinstance(names, str | bytes | set | frozenset | Mapping) or not hasattr(names, "__len__"):
            raise ValueError(
                f"arms must be a sequence of names, got {names!r} ({type(names).__name__}); pass a list in the program's order"
            )
        self.names = list(names)
        if any(not isinstance(name, str) for name in self.names):
            raise ValueError(f"arms must be strings, got {self.names!r}; leave arms out to number the arms 0, 1, ...")
        if not self.names or len(set(self.names)) < len(self.names):
            raise ValueError(f"arms must be one or more different names, got {self.names!r}")
        for index, name in enumerate(self.names):
            check_text(name, f"arms[{index}]")
        if num_arms is not None and check_count(num_arms, "num_arms") != len(self.names):
            raise ValueError(
                f"arms has {len(self.names)} names, but the program has {num_arms} arms; make them agree: name each arm once"
            )

    def __len__(self) -> int:
        return len(self.names)

    @functools.cached_property
    def all_allowed(self) -> np.ndarray:
        """The mask that allows all arms."""
        mask = np.ones(len(self), bool)
        mask.flags.writeable = False
        return mask

    def index(self, arm: Any, argument: str = "arm") -> int:
        """Return an arm's index; raise `UnknownArm` if there is none of this name."""
        if isinstance(arm, np.generic):
            arm = arm.item()
        if isinstance(arm, bool) or not isinstance(arm, str | int) or arm not in self.names:
            shown = self.names if len(self) <= 12 else [*self.names[:5], "...", self.names[-1]]
            raise UnknownArm(f"{argument}={_shorten(arm)} is not an arm of this bandit; the arms are {shown}")
        return self.names.index(arm)

    def indices(self, arms: Any, argument: str = "arms") -> np.ndarray:
        """Return the indices of a sequence of arms."""
        if isinstance(arms, str | bytes | set | frozenset | Mapping) or not hasattr(arms, "__len__"):
            raise ValueError(f"{argument} must be a sequence of arms, got {arms!r}; pass a list or an array")
        if isinstance(arms, np.ma.MaskedArray) and np.ma.is_masked(arms):
            raise ValueError(
                f"{argument} is a masked array with masked entries; remove the rows whose arm is not known"
            )
        try:
            values = np.asarray(arms)
        except ValueError:  # nested lists of different lengths
            raise ValueError(f"{argument} must be a sequence of arms, got {arms!r}; pass a list or an array") from None
        if isinstance(self.names[0], int) and values.ndim == 1 and values.dtype.kind in "iu":
            wrong = (values < 0) | (values >= len(self))
            if wrong.any():
                row = int(np.flatnonzero(wrong)[0])
                raise UnknownArm(
                    f"{argument}[{row}]={values[row]} is not an arm of this bandit; the arms are 0 to {len(self) - 1}"
                )
            return values.astype(np.int64)
        return np.array([self.index(arm, f"{argument}[{row}]") for row, arm in enumerate(arms)], np.int64)

    def mask(self, allowed: Any) -> np.ndarray:
        """Return a boolean mask (A,) from None (all arms), a mask, or a list of arms."""
        if allowed is None:
            return self.all_allowed
        if isinstance(allowed, str | bytes | Mapping) or not hasattr(allowed, "__len__"):
            raise ValueError(f"allowed must be a list of arms or a mask of booleans, got {allowed!r}")
        try:
            values = np.asarray(list(allowed) if isinstance(allowed, set | frozenset) else allowed)
        except ValueError:  # nested lists of different lengths
            raise ValueError(f"allowed must be a list of arms or a mask of booleans, got {allowed!r}") from None
        if values.dtype == bool:
            if values.shape != (len(self),):
                raise ValueError(f"allowed has shape {values.shape}; a mask needs one entry per arm, ({len(self)},)")
            mask = values
        else:
            indices = self.indices(list(allowed), "allowed")
            if np.unique(indices).size < indices.size:
                meant = [bool(index) for index in indices] if set(indices) <= {0, 1} else "one boolean per arm"
                raise ValueError(
                    f"allowed={allowed!r} names an arm twice: give each arm once, or, for a mask, booleans: {meant}"
                )
            mask = np.zeros(len(self), bool)
            mask[indices] = True
        if not mask.any():
            raise ValueError("allowed excludes every arm: allow at least one")
        return mask
