"""Process rows in chunks of equal size, so that memory is bounded and shapes are fixed."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

__all__ = ["for_each", "join_chunks", "scan_chunks", "split_chunks"]


def split_chunks(rows: Any, num_rows: int, size: int) -> tuple[Any, Array]:
    """Return rows as (chunks, size, ...), and whether each is a row of the input.

    The last chunk is padded with copies of the first row.

    Args:
        size: at most the number of rows.
    """
    num_chunks = -(-num_rows // size)
    if num_chunks == 1:
        return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], rows), jnp.ones((1, num_rows), bool)
    index = jnp.arange(num_chunks * size)
    is_row = index < num_rows

    def split(leaf: Array) -> Array:
        leaf = jnp.asarray(leaf)
        return leaf[jnp.where(is_row, index, 0)].reshape((num_chunks, size, *leaf.shape[1:]))

    return jax.tree.map(split, rows), is_row.reshape(num_chunks, size)


def for_each(function: Callable, *rows: Any) -> Any:
    """Apply a function to each row: `vmap`, or a plain call for a single row, which is faster to trace."""
    if jax.tree.leaves(rows)[0].shape[0] > 1:
        return jax.vmap(function)(*rows)
    return jax.tree.map(lambda leaf: leaf[None], function(*jax.tree.map(lambda leaf: leaf[0], rows)))


def scan_chunks(step: Callable[[Any, Any], tuple[Any, Any]], carry: Any, chunks: Any) -> tuple[Any, Any]:
    """Scan over chunks; without a loop for a single chunk."""
    if jax.tree.leaves(chunks)[0].shape[0] > 1:
        return jax.lax.scan(step, carry, chunks)
    carry, found = step(carry, jax.tree.map(lambda leaf: leaf[0], chunks))
    return carry, jax.tree.map(lambda leaf: leaf[None], found)


def join_chunks(chunks: Any, num_rows: int) -> Any:
    """Undo `split_chunks`."""
    return jax.tree.map(lambda leaf: leaf.reshape((leaf.shape[0] * leaf.shape[1], *leaf.shape[2:]))[:num_rows], chunks)
