"""Traced programs that other processes can compile: what was traced once need not be traced, or proved, again."""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from ppl_bandit.runtime.cpu_threads import Needs, needs_of
from ppl_bandit.runtime.jax_adapter import export_function, import_function

__all__ = ["Portable", "can_export", "exported", "imported"]


class Portable(NamedTuple):
    """A traced program in jax's own format.

    Attributes:
        needs: what it needs when it runs.
        shapes: of its arguments.
        options: of the compiler.
    """

    program: bytes
    needs: Needs
    shapes: Any
    options: dict[str, Any]


@functools.cache
def can_export() -> bool:
    """Tell whether jax has what it writes programs with."""
    return importlib.util.find_spec("flatbuffers") is not None


def exported(function: Callable, shapes: Any, options: dict[str, Any]) -> Portable | None:
    """Trace a function for the shapes of its arguments; None if jax cannot write that down.

    It returns arrays, or lists and tuples of arrays.
    """
    leaves = jax.tree.leaves(shapes)
    treedef: Any = jax.tree.structure(shapes)

    @jax.jit
    @functools.wraps(function)
    def flat(*given: Any) -> Any:
        return function(*treedef.unflatten(given))

    needs = needs_of(flat.trace(*leaves).jaxpr)
    program = export_function(flat, leaves)
    return None if program is None else Portable(program, needs, shapes, options)


def imported(portable: Portable) -> Callable:
    """Return the function that was exported, under its own name."""
    program = import_function(portable.program)

    def function(*args: Any) -> Any:
        return program(*jax.tree.leaves(args))

    function.__name__ = program.__name__
    return function
