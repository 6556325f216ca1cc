"""Checks of arguments that are one value: a number, a flag, a function. Each message names the argument and what was given."""

from collections.abc import Callable
from typing import Any

import numpy as np


def check_flag(value: Any, argument: str) -> bool:
    """Return a flag as a bool.

    Raises:
        ValueError: for anything but True or False; a text such as "no" is true in Python.
    """
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{argument} must be True or False, got {value!r}")
    return bool(value)


def check_number(value: Any, argument: str) -> Any:
    """Return one number as it is.

    Raises:
        ValueError: for a text, a sequence, None, and a bool.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise ValueError(f"{argument} must be a number, got {value!r}")
    return value


def check_function(value: Any, argument: str, what: str) -> Callable[..., Any]:
    """Return a function as it is.

    Args:
        what: the function does, for the message.

    Raises:
        ValueError: for anything that cannot be called.
    """
    if not callable(value):
        raise ValueError(f"{argument} must be a function {what}, got {value!r}")
    return value
