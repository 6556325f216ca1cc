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

from ppl_bandit.runtime.jax_adapter import Tracer

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
