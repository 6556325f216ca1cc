"""Trees of small arrays as one row of numbers: one transfer from the device in place of one for each leaf."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

__all__ = ["pack", "unpack"]


def pack(tree: Any) -> Float[Array, " n"]:
    """Return all leaves in one row of float64, which holds whole numbers up to 2^53 exactly."""
    return jnp.concatenate([jnp.ravel(leaf).astype(float) for leaf in jax.tree.leaves(tree)])


def unpack(form: Any, row: np.ndarray) -> Any:
    """Undo `pack`: return NumPy arrays in the tree, shapes and types of `form`; leading axes of `row` are kept."""
    leaves, treedef = jax.tree.flatten(form)
    found, start = [], 0
    for leaf in leaves:
        part = row[..., start : start + leaf.size].reshape(row.shape[:-1] + leaf.shape)
        found.append(part.astype(leaf.dtype, copy=False))
        start += leaf.size
    return jax.tree.unflatten(treedef, found)
