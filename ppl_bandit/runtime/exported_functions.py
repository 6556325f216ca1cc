"""Traced functions that another process can compile: JAX export bytes, and what is needed to call them.

The form of a result (a pytree of `jax.ShapeDtypeStruct`) is written as JSON, so that it can be stored without pickle. Dicts,
lists, tuples, None, NamedTuples and `Packed` are supported. A NamedTuple is written as the name of its class, and read only if
that class belongs to this library or is already imported: reading a form runs no other code.
"""

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from ppl_bandit.runtime.cpu_threads import needs_limit
from ppl_bandit.runtime.jax_adapter import export_function, import_function
from ppl_bandit.runtime.packed_state import Packed, pack


class ExportedFunction(NamedTuple):
    """A function that was traced for one form of its arguments.

    Attributes:
        program: serialized by JAX; a function of flat arguments with flat results.
        arguments: `arguments_text` of the form.
        output: form of the result, as JSON values.
        is_limited: whether the number of its runs at once is limited.
        options: compiler options.
    """

    program: bytes
    arguments: str
    output: Any
    is_limited: bool
    options: dict[str, Any]


def arguments_text(form: Any) -> str:
    """Return the dtypes and shapes of arguments, in the order of their leaves."""
    return " ".join(f"{leaf.dtype}{leaf.shape}" for leaf in jax.tree.leaves(form))


def export_traced(function: Callable, form: Any, options: dict[str, Any]) -> ExportedFunction | None:
    """Trace a function for the forms of its arguments and export it; None if JAX cannot export it."""
    leaves, treedef = jax.tree.flatten(form)
    structured: Any = jax.jit(function)

    @jax.jit
    @functools.wraps(function)
    def flat(*given: Any) -> list[Any]:
        return jax.tree.leaves(structured(*jax.tree.unflatten(treedef, given)))

    try:
        output = form_to_json(jax.eval_shape(structured, *form))  # `flat` reuses this trace
    except TypeError:
        return None
    is_limited = needs_limit(flat.trace(*leaves).jaxpr)
    program = export_function(flat, leaves)
    return None if program is None else ExportedFunction(program, arguments_text(form), output, is_limited, options)


def import_exported(exported: ExportedFunction) -> Callable:
    """Return the function that was exported, under its own name."""
    program, treedef = import_function(exported.program), jax.tree.structure(form_from_json(exported.output))

    def function(*args: Any) -> Any:
        return jax.tree.unflatten(treedef, program(*jax.tree.leaves(args)))

    function.__name__ = program.__name__
    return function


def form_to_json(form: Any) -> Any:
    """Return a form as JSON values.

    Raises:
        TypeError: if a node of the tree, or a dtype, is not supported.
    """
    kind = type(form)
    if form is None:
        return None
    if kind is Packed:
        return {"packed": form_to_json(form.layout.form)}
    if kind is dict and all(isinstance(name, str) for name in form):
        return {"dict": {name: form_to_json(value) for name, value in form.items()}}
    if isinstance(form, tuple) and hasattr(form, "_fields"):
        return {"class": [kind.__module__, kind.__qualname__], "fields": list(map(form_to_json, form))}
    if kind in (list, tuple):
        return {kind.__name__: list(map(form_to_json, form))}
    if kind is jax.ShapeDtypeStruct:
        is_key = form.dtype == _key_dtype()
        return {"shape": list(form.shape), "dtype": "key" if is_key else np.dtype(form.dtype).str}
    raise TypeError(f"a pytree node of type {kind.__name__} cannot be stored")


def form_from_json(stored: Any) -> Any:
    """Return the form that `form_to_json` wrote.

    Raises:
        ValueError: if a class of it is neither this library's nor imported, or is no NamedTuple.
    """
    match stored:
        case None:
            return None
        case {"packed": tree}:
            return jax.eval_shape(pack, form_from_json(tree))
        case {"dict": entries}:
            return {name: form_from_json(value) for name, value in entries.items()}
        case {"class": [module, name], "fields": fields}:
            if module.startswith(f"{__package__.partition('.')[0]}."):
                importlib.import_module(module)
            kind = getattr(sys.modules.get(module), name, None)
            if not (isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")):
                raise ValueError(f"{module}.{name} is not an imported NamedTuple")
            return kind(*map(form_from_json, fields))
        case {"list": values}:
            return list(map(form_from_json, values))
        case {"tuple": values}:
            return tuple(map(form_from_json, values))
        case {"shape": shape, "dtype": dtype}:
            return jax.ShapeDtypeStruct(tuple(shape), _key_dtype() if dtype == "key" else np.dtype(dtype))
    raise ValueError(f"{stored!r} is not the form of a pytree")


def _key_dtype() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0)).dtype
