"""Trees of small arrays as one row of numbers: one transfer from the device in place of one for each leaf."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

__all__ = ["pack", "unpacker"]


def pack(tree: Any) -> Float[Array, " n"]:
    """Return all leaves in one row of float64, which holds whole numbers up to 2^53 exactly."""
    return jnp.concatenate([jnp.ravel(leaf).astype(float) for leaf in jax.tree.leaves(tree)])


def unpacker(form: Any) -> Callable[[np.ndarray], Any]:
    """Return what undoes `pack`: a row -> NumPy arrays in the tree, shapes and types of `form`."""
    leaves, treedef = jax.tree.flatten(form)
    plan, end = [], 0
    for leaf in leaves:
        start, end = end, end + leaf.size
        plan.append((start, end, leaf.shape, np.dtype(leaf.dtype)))

    def unpack(row: np.ndarray) -> Any:
        parts = []
        for start, end, shape, dtype in plan:
            if not shape:
                parts.append(dtype.type(row[start]))
            else:
                part = row[start:end].astype(dtype)
                parts.append(part if len(shape) == 1 else part.reshape(shape))
        return jax.tree.unflatten(treedef, parts)

    return unpack
