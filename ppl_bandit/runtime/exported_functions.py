"""Traced functions that another process can compile: JAX export bytes, and what is needed to call them.

A warm start is what one process proved and traced, stored for the next one: facts about an engine, as JSON values, and the
exported functions of its first decision and first update. JAX's own cache holds the compiled code. `posterior.warm_start`
converts engines to and from these facts.

Forms of pytrees (structure, shapes and dtypes) are written as JSON, so that they can be stored without pickle. A form is
a pytree of `jax.ShapeDtypeStruct`. Dicts, lists, tuples, None, NamedTuples and `Packed` are supported. A NamedTuple is written
as the name of its class, and read only if that class is already imported: reading a form runs no code.
"""

import functools
import importlib.util
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from ppl_bandit.runtime import disk_cache
from ppl_bandit.runtime.cpu_threads import needs_limit
from ppl_bandit.runtime.disk_cache import CacheEntry
from ppl_bandit.runtime.jax_adapter import export_function, import_function
from ppl_bandit.runtime.packed_state import Packed, pack

__all__ = [
    "ExportedFunction",
    "WarmStart",
    "can_export",
    "export_traced",
    "form_from_json",
    "form_of",
    "form_to_json",
    "import_exported",
    "load_warm_start",
    "save_warm_start",
]


class ExportedFunction(NamedTuple):
    """A function that was traced for one form of its arguments.

    Attributes:
        program: serialized by JAX; a function of flat arguments with flat results.
        output: form of the result, as JSON values.
        is_limited: whether the number of its runs at once is limited.
        options: compiler options.
    """

    program: bytes
    output: Any
    is_limited: bool
    options: dict[str, Any]


class WarmStart(NamedTuple):
    """What a process stores for later processes.

    Attributes:
        facts: JSON values.
        functions: {name of the function: {JSON form of the arguments: exported function}}.
    """

    facts: dict[str, Any]
    functions: dict[str, dict[str, ExportedFunction]]


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
    is_limited = needs_limit(flat.trace(*leaves).jaxpr)
    program = export_function(flat, leaves)
    return None if program is None else ExportedFunction(program, output, is_limited, options)


def import_exported(exported: ExportedFunction) -> Callable:
    """Return the function that was exported, under its own name."""
    program, treedef = import_function(exported.program), jax.tree.structure(form_from_json(exported.output))

    def function(*args: Any) -> Any:
        return jax.tree.unflatten(treedef, program(*jax.tree.leaves(args)))

    function.__name__ = program.__name__
    return function


def save_warm_start(entry: CacheEntry | None, start: WarmStart) -> None:
    """Store a warm start; without effect if the cache is off."""
    exported = [(name, form, own) for name, by_form in start.functions.items() for form, own in by_form.items()]
    described = [[name, form, own.output, own.is_limited, own.options] for name, form, own in exported]
    disk_cache.save(entry, {"facts": start.facts, "functions": described}, [own.program for _, _, own in exported])


def load_warm_start(entry: CacheEntry | None) -> WarmStart | None:
    """Return the warm start that was stored under a key; None if there is none."""
    found = disk_cache.load(entry)
    if found is None:
        return None
    values, programs = found
    functions: dict[str, dict[str, ExportedFunction]] = {}
    for (name, form, output, is_limited, options), program in zip(values["functions"], programs, strict=True):
        try:
            with jax.enable_x64(True):
                form_from_json(output)
        except ValueError:  # a class of the state is not imported
            return None
        functions.setdefault(name, {})[form] = ExportedFunction(program, output, is_limited, options)
    return WarmStart(values["facts"], functions)


def form_of(tree: Any) -> Any:
    """Return the form of a pytree of arrays, numbers or forms."""
    return jax.tree.map(_leaf_form, tree)


def _leaf_form(leaf: Any) -> jax.ShapeDtypeStruct:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    aval = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def form_to_json(form: Any) -> Any:
    """Return a form as JSON values.

    Raises:
        TypeError: if a node of the tree, or a dtype, is not supported.
    """
    if form is None:
        return None
    if isinstance(form, Packed):
        return {"packed": form_to_json(form.layout.form)}
    if isinstance(form, dict) and all(isinstance(name, str) for name in form):
        return {"dict": {name: form_to_json(value) for name, value in form.items()}}
    if isinstance(form, tuple) and hasattr(form, "_fields"):
        kind = type(form)
        return {"class": [kind.__module__, kind.__qualname__], "fields": [form_to_json(value) for value in form]}
    if type(form) in (list, tuple):
        return {type(form).__name__: [form_to_json(value) for value in form]}
    if isinstance(form, jax.ShapeDtypeStruct):
        is_key = jax.dtypes.issubdtype(form.dtype, jax.dtypes.prng_key)
        if is_key and form.dtype != _key_dtype():
            raise TypeError(f"random keys of type {form.dtype} cannot be stored")
        dtype = "key" if is_key else np.dtype(form.dtype).str
        return {"shape": list(form.shape), "dtype": dtype, "weak_type": bool(form.weak_type)}
    raise TypeError(f"a pytree node of type {type(form).__name__} cannot be stored")


def form_from_json(stored: Any) -> Any:
    """Return the form that `form_to_json` wrote.

    Raises:
        ValueError: if a class of it is not imported, or is no NamedTuple.
    """
    match stored:
        case None:
            return None
        case {"packed": tree}:
            return jax.eval_shape(pack, form_from_json(tree))
        case {"dict": entries}:
            return {name: form_from_json(value) for name, value in entries.items()}
        case {"class": [module, name], "fields": fields}:
            kind = getattr(sys.modules.get(module), name, None)
            if not (isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")):
                raise ValueError(f"{module}.{name} is not an imported NamedTuple")
            return kind(*map(form_from_json, fields))
        case {"list": values}:
            return list(map(form_from_json, values))
        case {"tuple": values}:
            return tuple(map(form_from_json, values))
        case {"shape": shape, "dtype": dtype, "weak_type": weak_type}:
            own = _key_dtype() if dtype == "key" else np.dtype(dtype)
            return jax.ShapeDtypeStruct(tuple(shape), own, weak_type=weak_type)
    raise ValueError(f"{stored!r} is not the form of a pytree")


def _key_dtype() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0)).dtype
