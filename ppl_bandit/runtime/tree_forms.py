"""Forms of pytrees (structure, shapes and dtypes) as JSON, so that they can be stored without pickle.

A form is a pytree of `jax.ShapeDtypeStruct`. Dicts, lists, tuples, None, NamedTuples and `Packed` are supported. A NamedTuple
is written as the name of its class, and read only if that class is already imported: reading a form runs no code.
"""

import sys
from typing import Any

import jax
import numpy as np

from ppl_bandit.runtime.packed_state import Packed, pack

__all__ = ["form_from_json", "form_of", "form_to_json"]


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
