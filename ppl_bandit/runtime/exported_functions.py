"""Traced programs that other processes can compile: what was traced once need not be traced, or proved, again."""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import export

from ppl_bandit.runtime.cpu_threads import Needs, needs_of

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
    try:
        return Portable(bytes(export.export(flat)(*leaves).serialize()), needs, shapes, options)
    except (NotImplementedError, ValueError):  # an operation whose format is not fixed
        return None


def imported(portable: Portable) -> Callable:
    """Return the function that was exported, under its own name."""
    program = export.deserialize(bytearray(portable.program))

    def function(*args: Any) -> Any:
        return program.call(*jax.tree.leaves(args))

    function.__name__ = program.fun_name
    return function
