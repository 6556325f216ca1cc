"""The line of the user's code that an equation of a jaxpr comes from.

JAX records the Python stack at which each equation was traced. Frames inside JAX, NumPyro, Python's library and this package
are skipped; the innermost other frame is the user's line.
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

_MAX_SOURCE = 100  # characters of a source line to quote
_PUBLIC = (jnp, jax.nn, jax.lax, jax.scipy.special, jax.scipy.stats.norm)


class SourceLine(NamedTuple):
    """A line of the user's code.

    Attributes:
        text: line number, file and source; "" if the operation comes from no line of the user's.
        called: the public JAX function that was called there; "" if there is none.
        is_users: whether the user wrote the operation; false if NumPyro added it on behalf of the user's line.
    """

    text: str
    called: str
    is_users: bool


def source_line(equations: Sequence[Any]) -> SourceLine:
    """Return the line of the user's code that an operation comes from.

    Args:
        equations: the equation itself, then the one that calls the jaxpr it is in, and so on outwards. JAX caches the trace of
            a jitted function, so only an outer equation may have recorded this call's line.
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
                return SourceLine(line, "" if passed_numpyro else called, not passed_numpyro)
            passed_numpyro |= owner == "numpyro"
            called = _public_name(frame.function_name) or called
        called = _public_name(str(equation.params.get("name", ""))) or called
    return SourceLine("", "", False)


def location_of(line: SourceLine, reason: str) -> str:
    """Return where an operation stands, as the end of a sentence."""
    if not line.text:
        return ", inside the formula of the distribution"
    if not line.is_users:
        return f", inside NumPyro's code ({line.text})"
    called = f", in `{line.called}`" if line.called and f"`{line.called}`" not in reason else ""
    return f"{called} ({line.text})"


def _public_name(function: str) -> str:
    name = function.rsplit(".", 1)[-1].strip("_")
    return name if name and any(callable(getattr(module, name, None)) for module in _PUBLIC) else ""


def is_users_file(file: str) -> bool:
    """Return whether a source file belongs neither to this package, nor to NumPyro, JAX or Python."""
    return _owner(file) == ""


@functools.cache
def _owner(file: str) -> str:
    """Return "own", "numpyro" or "other" for files of this package, of NumPyro, and of JAX or Python; "" for the user's."""
    path = Path(file)
    if path.is_relative_to(Path(__file__).parents[2]):
        return "own"
    if path.is_relative_to(Path(numpyro.__file__).parent):
        return "numpyro"
    # Installed packages other than JAX and NumPyro count as the user's code.
    is_python = path.is_relative_to(sysconfig.get_path("stdlib")) and "site-packages" not in path.parts
    is_jax = path.is_relative_to(Path(jax.__file__).parent)
    return "other" if is_python or is_jax or file.startswith("<frozen") else ""
