"""Pytrees of small arrays in one array: every array that enters or leaves a compiled call takes 4 to 7 us.

`pack` puts the leaves into one row of float64 and `unpack` restores them exactly: 64-bit integers are reinterpreted bit by bit,
all narrower numbers are converted, which loses nothing. The form of the pytree is static data of `Packed`. So a packed pytree
describes itself, also as an argument or a result of a jitted function.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ppl_bandit.runtime.jax_adapter import is_tracer

__all__ = ["Packed", "PackedLayout", "changed_leaves", "pack", "unpack", "with_changes"]

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
        self.starts, start = [], 0
        for i, (shape, _) in enumerate(leaves):
            self.starts.append(start)
            start += 0 if i in self.separate else math.prod(shape)

    @property
    def form(self) -> Any:
        """The pytree as shapes and dtypes."""
        return self.treedef.unflatten([jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in self.leaves])

    @functools.cached_property
    def slices(self) -> list[tuple[int, Any]]:
        """Where NumPy finds each leaf: in the row (0), the row as booleans (1) or `separate` (2), and its index there."""
        found: list[tuple[int, Any]] = []
        for i, (start, (shape, dtype)) in enumerate(zip(self.starts, self.leaves, strict=True)):
            where = slice(start, start + math.prod(shape)) if shape else start
            found.append((2, self.separate.index(i)) if i in self.separate else (int(dtype.kind == "b"), where))
        return found

    @functools.cached_property
    def converted(self) -> list[tuple[int, tuple[int, ...], Any]]:
        """(index, shape, dtype) of the leaves in the row that are not slices of it: tables, and other dtypes."""
        rows = [(i, *leaf) for i, leaf in enumerate(self.leaves) if i not in self.separate]
        return [row for row in rows if len(row[1]) > 1 or (row[2].kind != "b" and row[2] != np.float64)]


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
    rest = [leaf for i, leaf in enumerate(leaves) if i not in layout.separate]
    if not any(map(is_tracer, leaves)):
        arrays = [np.ravel(leaf) for leaf in rest]
        row = np.concatenate(
            [a.view(np.float64) if _is_wide(a.dtype) else a.astype(np.float64) for a in arrays] or [np.zeros(0)]
        )
        return Packed(row, separate, layout)
    traced = [jnp.ravel(leaf) for leaf in rest]
    parts = [
        jax.lax.bitcast_convert_type(a, jnp.float64) if _is_wide(a.dtype) else a.astype(jnp.float64) for a in traced
    ]
    return Packed(jnp.concatenate(parts) if parts else jnp.zeros(0), separate, layout)


def unpack(packed: Packed) -> Any:
    """Undo `pack`: for a traced row inside a jitted function, otherwise to NumPy arrays and scalars."""
    layout = packed.layout
    if is_tracer(packed.row):
        separate = iter(packed.separate)
        leaves = [
            next(separate) if i in layout.separate else _slice(packed.row, start, shape, dtype)
            for i, (start, (shape, dtype)) in enumerate(zip(layout.starts, layout.leaves, strict=True))
        ]
    else:
        row = np.asarray(packed.row)
        sources = row, row.astype(bool), packed.separate
        leaves = [sources[source][where] for source, where in layout.slices]
        for i, shape, dtype in layout.converted:
            part = leaves[i].view(dtype) if _is_wide(dtype) else leaves[i].astype(dtype, copy=False)
            leaves[i] = part.reshape(shape) if shape else part
    return layout.treedef.unflatten(leaves)


def changed_leaves(after: Any, before: Any) -> Any:
    """Replace the leaves that a traced function returns as it received them by None, so that they are not copied."""
    return jax.tree.map(lambda new, old: None if new is old else new, after, before)


def with_changes(changes: Any, before: Any) -> Any:
    """Undo `changed_leaves`, outside of the traced function."""
    return jax.tree.map(
        lambda new, old: old if new is None else new, changes, before, is_leaf=lambda leaf: leaf is None
    )


def _slice(row: Any, start: int, shape: tuple[int, ...], dtype: Any) -> Any:
    part = row[start : start + math.prod(shape)].reshape(shape)
    return jax.lax.bitcast_convert_type(part, dtype) if _is_wide(dtype) else part.astype(dtype)


def _is_wide(dtype: Any) -> bool:
    return dtype in (np.int64, np.uint64)
