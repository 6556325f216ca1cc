"""Traced functions that another process can compile: JAX export bytes, and what is needed to call them."""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from ppl_bandit.runtime.cpu_threads import ThreadNeeds, thread_needs
from ppl_bandit.runtime.jax_adapter import export_function, import_function
from ppl_bandit.runtime.tree_forms import form_from_json, form_to_json

__all__ = ["ExportedFunction", "can_export", "export_traced", "import_exported"]


class ExportedFunction(NamedTuple):
    """A function that was traced for one form of its arguments.

    Attributes:
        program: serialized by JAX; a function of flat arguments with flat results.
        output: form of the result, as JSON values.
        needs: CPU threads that it needs at run time.
        options: compiler options.
    """

    program: bytes
    output: Any
    needs: ThreadNeeds
    options: dict[str, Any]


@functools.cache
def can_export() -> bool:
    """Return whether the package is installed that JAX serializes functions with."""
    return importlib.util.find_spec("flatbuffers") is not None


def export_traced(function: Callable, args: Any, options: dict[str, Any]) -> ExportedFunction | None:
    """Trace a function for the forms of its arguments and export it; None if JAX cannot export it."""
    leaves, treedef = jax.tree.flatten(args)
    structured: Any = jax.jit(function)

    @jax.jit
    @functools.wraps(function)
    def flat(*given: Any) -> list[Any]:
        return jax.tree.leaves(structured(*jax.tree.unflatten(treedef, given)))

    try:
        output = form_to_json(jax.eval_shape(structured, *args))  # `flat` reuses this trace
    except TypeError:
        return None
    needs = thread_needs(flat.trace(*leaves).jaxpr)
    program = export_function(flat, leaves)
    return None if program is None else ExportedFunction(program, output, needs, options)


def import_exported(exported: ExportedFunction) -> Callable:
    """Return the function that was exported, under its own name."""
    program, treedef = import_function(exported.program), jax.tree.structure(form_from_json(exported.output))

    def function(*args: Any) -> Any:
        return jax.tree.unflatten(treedef, program(*jax.tree.leaves(args)))

    function.__name__ = program.__name__
    return function
