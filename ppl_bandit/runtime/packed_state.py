"""Pytrees of small arrays in one array: every array that enters or leaves a compiled call takes 4 to 7 us.

`pack` puts the leaves into one row of float64 and `unpack` restores them exactly: 64-bit integers are reinterpreted bit by bit,
all narrower numbers are converted, which loses nothing. The form of the pytree is static data of `Packed`. So a packed pytree
describes itself, also as an argument or a result of a jitted function.
"""

import functools
import math
from collections.abc import Callable
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
    def readers(self) -> list[Callable[[np.ndarray, np.ndarray], Any] | None]:
        """Functions (row, row as booleans) -> leaf, for NumPy; None for separate leaves."""
        return [
            None if i in self.separate else _reader(start, shape, dtype)
            for i, (start, (shape, dtype)) in enumerate(zip(self.starts, self.leaves, strict=True))
        ]


def _fits(shape: tuple[int, ...], dtype: Any) -> bool:
    return isinstance(dtype, np.dtype) and dtype.kind in "fiub" and math.prod(shape) <= _MAX_PACKED_SIZE


_layout = functools.cache(PackedLayout)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["row", "separate"], meta_fields=["layout"])
@dataclass(frozen=True)
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
    separate = iter(packed.separate)
    if is_tracer(packed.row):
        leaves = [
            next(separate) if i in layout.separate else _slice(packed.row, start, shape, dtype)
            for i, (start, (shape, dtype)) in enumerate(zip(layout.starts, layout.leaves, strict=True))
        ]
    else:
        row = np.asarray(packed.row)
        as_bool = row.astype(bool)
        leaves = [next(separate) if read is None else read(row, as_bool) for read in layout.readers]
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


def _reader(start: int, shape: tuple[int, ...], dtype: Any) -> Callable[[np.ndarray, np.ndarray], Any]:
    where: Any = slice(start, start + math.prod(shape)) if shape else start
    if dtype.kind == "b":
        read = lambda row, as_bool: as_bool[where]  # noqa: E731
    elif dtype == np.float64:
        read = lambda row, as_bool: row[where]  # noqa: E731
    elif _is_wide(dtype):
        read = lambda row, as_bool: row[where].view(dtype)  # noqa: E731
    else:
        read = lambda row, as_bool: row[where].astype(dtype)  # noqa: E731
    return read if len(shape) < 2 else lambda row, as_bool: read(row, as_bool).reshape(shape)


def _is_wide(dtype: Any) -> bool:
    return dtype in (np.int64, np.uint64)
