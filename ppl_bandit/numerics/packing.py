"""Trees of small arrays as one row of numbers: one transfer from the device in place of one for each leaf."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

__all__ = ["pack", "unpacker"]

_FLOAT, _BOOL = np.dtype(float), np.dtype(bool)


def pack(tree: Any) -> Float[Array, " n"]:
    """Return all leaves in one row of float64, which holds whole numbers up to 2^53 exactly."""
    return jnp.concatenate([jnp.ravel(leaf).astype(float) for leaf in jax.tree.leaves(tree)])


def unpacker(form: Any) -> Callable[[np.ndarray], Any]:
    """Return what undoes `pack`: a row -> NumPy arrays in the tree, shapes and types of `form`."""
    treedef: Any = jax.tree.structure(form)
    plan, end = [], 0
    for leaf in jax.tree.leaves(form):
        start, end = end, end + leaf.size
        where = start if not leaf.shape else slice(start, end)
        plan.append((np.dtype(leaf.dtype), where, leaf.shape if len(leaf.shape) > 1 else None))

    def unpack(row: np.ndarray) -> Any:
        rows = {_FLOAT: row, _BOOL: row.astype(bool)}  # whole: a leaf of these is a view
        parts = []
        for dtype, where, shape in plan:
            part = rows[dtype][where] if dtype in rows else row[where].astype(dtype)
            parts.append(part if shape is None else part.reshape(shape))
        return treedef.unflatten(parts)

    return unpack
