"""Where in the user's own code an operation of a traced program stands, in words.

Every equation of a jaxpr remembers the Python frames that made it, the innermost first. What jax and NumPyro do on the way is
not the user's: a line counts as written by the user where the innermost frame outside of these libraries is the program's.
"""

import functools
import linecache
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro

from ppl_bandit.runtime.jax_adapter import source_frames

__all__ = ["Place", "place_of"]

_MAX_SOURCE = 100  # characters of a line that are worth showing
_PUBLIC = (jnp, jax.nn, jax.lax, jax.scipy.special, jax.scipy.stats.norm)


class Place(NamedTuple):
    """A line of the user's.

    Attributes:
        words: line, file and source; "" where the operation stands in no line of the user's.
        called: the function of jax that was called there, "" where there is none.
        is_users: whether the user wrote the operation, rather than NumPyro on a line of the user's.
    """

    words: str
    called: str
    is_users: bool


def place_of(equations: Sequence[Any]) -> Place:
    """Say where an operation stands.

    Args:
        equations: the equation itself, then the one that calls the jaxpr it is in, and so on outwards. Functions that are
            jitted are traced once, wherever they are called, so that it may be an outer equation that knows the user's line.
    """
    called = ""
    for equation in equations:
        passed_numpyro = False
        for frame in source_frames(equation):
            owner = _owner(frame.file_name)
            if owner == "own":
                break
            if owner == "":
                source = linecache.getline(frame.file_name, frame.line_number).strip()
                shown = f": `{source[:_MAX_SOURCE]}{'...' if len(source) > _MAX_SOURCE else ''}`" if source else ""
                line = f"line {frame.line_number} of {Path(frame.file_name).name}{shown}"
                return Place(line, "" if passed_numpyro else called, not passed_numpyro)
            passed_numpyro |= owner == "numpyro"
            called = _public_name(frame.function_name) or called
        called = _public_name(str(equation.params.get("name", ""))) or called
    return Place("", "", False)


def _public_name(function: str) -> str:
    name = function.rsplit(".", 1)[-1].strip("_")
    return name if name and any(callable(getattr(module, name, None)) for module in _PUBLIC) else ""


@functools.cache
def _owner(file: str) -> str:
    """Return "own", "numpyro" or "other" for files of this library, of NumPyro, of jax and of Python; "" for the user's."""
    path = Path(file)
    for name, folder in _folders().items():
        if path.is_relative_to(folder):
            # Packages that are installed may be the user's; jax and its like are not.
            is_installed = name == "python" and "site-packages" in path.parts
            return "" if is_installed else name if name in ("own", "numpyro") else "other"
    return "other" if file.startswith("<frozen") else ""


@functools.cache
def _folders() -> dict[str, Path]:
    return {
        "own": Path(__file__).parents[2],
        "numpyro": Path(numpyro.__file__).parent,
        "jax": Path(jax.__file__).parent,
        "python": Path(sysconfig.get_path("stdlib")),
    }
