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
    ends = np.cumsum([leaf.size for leaf in leaves])
    plan = [
        (int(end) - leaf.size, int(end), leaf.shape, None if leaf.dtype == np.float64 else leaf.dtype)
        for leaf, end in zip(leaves, ends, strict=True)
    ]

    def unpack(row: np.ndarray) -> Any:
        parts = []
        for start, end, shape, dtype in plan:
            part = row[start:end] if len(shape) == 1 else row[start:end].reshape(shape)
            parts.append(part if dtype is None else part.astype(dtype))
        return treedef.unflatten(parts)

    return unpack
