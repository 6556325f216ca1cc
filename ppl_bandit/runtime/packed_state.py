"""Pytrees of small arrays in one array: every array that enters or leaves a compiled call takes 4 to 7 us.

`pack` puts the leaves into one row of float64 and `unpack` restores them exactly: 64-bit integers are reinterpreted bit by bit,
all narrower numbers are converted, which loses nothing. The form of the pytree is static data of `Packed`. So a packed pytree
describes itself, also as an argument or a result of a jitted function.

Also here: traced functions that another process can compile: JAX export bytes, and what is needed to call them.

The form of a result (a pytree of `jax.ShapeDtypeStruct`) is written as JSON, so that it can be stored without pickle. Dicts,
lists, tuples, None, NamedTuples and `Packed` are supported. A NamedTuple is written as the name of its class, and read only if
that class belongs to this library or is already imported: reading a form runs no other code.
"""

import functools
import importlib
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ppl_bandit.runtime.cpu_threads import needs_limit
from ppl_bandit.runtime.jax_adapter import Tracer, export_function, import_function

_MAX_PACKED_SIZE = 1 << 14  # copying more elements takes longer than passing one more array (6 us against 4 to 7 us)


class PackedLayout:
    """Where `pack` puts each leaf of a pytree. Equal pytrees share one layout, so layouts are compared by identity.

    Attributes:
        treedef: structure of the pytree.
        leaves: (shape, dtype) of each leaf.
        separate: indices of the leaves that are not in the row: large arrays, and dtypes such as random keys.
    """

    def __init__(self, treedef: Any, leaves: tuple[tuple[tuple[int, ...], Any], ...]):
        self.treedef, self.leaves = treedef, leaves
        self.separate = tuple(i for i, (shape, dtype) in enumerate(leaves) if not _fits(shape, dtype))
        self.places, start = (
            list[Any](),
            0,
        )  # index in the row, and whether the bits are reinterpreted; None if separate
        for i, (shape, dtype) in enumerate(leaves):
            stop = start + math.prod(shape)
            index = slice(start, stop) if shape else start
            self.places.append(None if i in self.separate else (index, shape, dtype, _is_wide(dtype)))
            start = start if i in self.separate else stop

    @property
    def form(self) -> Any:
        """The pytree as shapes and dtypes."""
        return self.treedef.unflatten([jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in self.leaves])


def _fits(shape: tuple[int, ...], dtype: Any) -> bool:
    return isinstance(dtype, np.dtype) and dtype.kind in "fiub" and math.prod(shape) <= _MAX_PACKED_SIZE


_layout = functools.cache(PackedLayout)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["row", "separate"], meta_fields=["layout"])
@dataclass(slots=True)  # not frozen: every compiled call builds one, and checked assignments take 2 us
class Packed:
    """A pytree as one row of float64 and the arrays that are not in it."""

    row: Any
    separate: tuple[Any, ...]
    layout: PackedLayout


def pack(tree: Any) -> Packed:
    """Pack a pytree of traced arrays or of NumPy arrays; under `jax.enable_x64(True)`."""
    leaves, treedef = jax.tree.flatten(tree)
    layout = _layout(treedef, tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves))
    separate = tuple(leaves[i] for i in layout.separate)
    numpy: Any = jnp if any(isinstance(leaf, Tracer) for leaf in leaves) else np
    rest = [numpy.ravel(leaf) for i, leaf in enumerate(leaves) if i not in layout.separate]
    parts = [leaf.view(np.float64) if _is_wide(leaf.dtype) else leaf.astype(np.float64) for leaf in rest]
    return Packed(numpy.concatenate(parts) if parts else numpy.zeros(0), separate, layout)


def unpack(packed: Packed) -> Any:
    """Undo `pack`: for a traced row inside a jitted function, otherwise to NumPy arrays and scalars."""
    layout, separate = packed.layout, iter(packed.separate)
    row = packed.row if isinstance(packed.row, Tracer) else np.asarray(packed.row)
    leaves = list[Any]()
    for place in layout.places:
        if place is None:
            leaves.append(next(separate))
            continue
        index, shape, dtype, is_wide = place
        part = row[index].reshape(shape) if shape else row[index]
        leaves.append(part.view(dtype) if is_wide else part.astype(dtype))
    return layout.treedef.unflatten(leaves)


def changed_leaves(after: Any, before: Any) -> Any:
    """Replace the leaves that a traced function returns as it received them by None, so that they are not copied."""
    return jax.tree.map(lambda new, old: None if new is old else new, after, before)


def with_changes(changes: Any, before: Any) -> Any:
    """Undo `changed_leaves`, outside of the traced function."""
    return jax.tree.map(
        lambda new, old: old if new is None else new, changes, before, is_leaf=lambda leaf: leaf is None
    )


def _is_wide(dtype: Any) -> bool:
    return dtype in (np.int64, np.uint64)


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
