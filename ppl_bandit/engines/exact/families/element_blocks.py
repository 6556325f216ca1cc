"""Blocks of elements, of which a program may have none: what is empty is a NumPy array, and nothing is traced for it.

Every operation that is traced takes a quarter of a millisecond of a start, whether it has elements to work on or not.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

__all__ = ["joined", "map_blocks", "nothing", "pick", "where", "where_member"]


def nothing(shape: tuple[int, ...], dtype: Any) -> Any:
    """Return a block without elements, or of zeros, that is known before anything is traced."""
    return np.zeros(shape, dtype)


def map_blocks(function: Callable[..., Any], *trees: Any) -> Any:
    """Apply a function leaf by leaf, on NumPy arrays where a block has no elements, so that nothing is traced for it.

    Args:
        function: of arrays of either kind, written with operators and methods that both have.
    """

    def apply(*leaves: Any) -> Any:
        if leaves[0].size:
            return function(*leaves)
        return function(*(np.zeros(leaf.shape, leaf.dtype) for leaf in leaves))

    return jax.tree.map(apply, *trees)


def joined(*parts: Array) -> Array:
    """Concatenate along the leading axis."""
    if parts[0].size:
        return jnp.concatenate(parts) if len(parts) > 1 else parts[0]
    return nothing((sum(len(part) for part in parts), *parts[0].shape[1:]), parts[0].dtype)


def pick(array: Float[Array, "*batch D"], index: np.ndarray) -> Array:
    """Return array[..., index], for indices that are known: as a reshape, where they go through all elements in order."""
    if not index.size:
        return nothing((*array.shape[:-1], *index.shape), array.dtype)
    if np.array_equal(index.ravel(), np.arange(array.shape[-1])):
        return array.reshape(*array.shape[:-1], *index.shape)
    if isinstance(array, np.ndarray):
        return array[..., index]
    # Not int64: jax caches indices across a change of its precision.
    return array.at[..., index.astype(np.int32)].get(mode="promise_in_bounds")


def where(condition: Bool[Array, ""], chosen: Any, otherwise: Any) -> Any:
    """Return one tree or another."""
    return jax.tree.map(lambda new, old: jnp.where(condition, new, old) if new.size else new, chosen, otherwise)


def where_member(is_member: np.ndarray, values: Array) -> Array:
    """Put 0 where the members of blocks are filled up."""
    return values if is_member.all() else jnp.where(is_member, values, 0.0)
